"""Gather the features of a group's units, place a client into the global layout, average."""

from fedmerge.units.average import Averaging, average_tensor, out_places
from fedmerge.units.blocks import SKETCH
from fedmerge.units.gather import GatheredUnits, TieBreaker, folded, gather_units
from fedmerge.units.norms import with_owners_norms
from fedmerge.units.place import Placement, place_tensor, targets_of

__all__ = [
    "SKETCH",
    "Averaging",
    "GatheredUnits",
    "Placement",
    "TieBreaker",
    "average_tensor",
    "folded",
    "gather_units",
    "out_places",
    "place_tensor",
    "targets_of",
    "with_owners_norms",
]
