"""Gather the features of a group's units, place a client into the global layout, average."""

from fedmerge.units.average import Averaging, average_tensor
from fedmerge.units.blocks import SKETCH
from fedmerge.units.gather import GatheredUnits, TieBreaker, gather_units
from fedmerge.units.place import Placement, place_tensor

__all__ = [
    "SKETCH",
    "Averaging",
    "GatheredUnits",
    "Placement",
    "TieBreaker",
    "average_tensor",
    "gather_units",
    "place_tensor",
]
