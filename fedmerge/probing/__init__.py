"""Inputs on which clients are run, and what their units make of them."""

from fedmerge.probing.data import read_probes
from fedmerge.probing.noise import Spectrum, noise_probes
from fedmerge.probing.synthetic import SYNTHETIC, Ascent, synthetic_probes
from fedmerge.probing.text import generated_probes, is_language_model
from fedmerge.probing.values import Probes

__all__ = [
    "SYNTHETIC",
    "Ascent",
    "Probes",
    "Spectrum",
    "generated_probes",
    "is_language_model",
    "noise_probes",
    "read_probes",
    "synthetic_probes",
]
