"""Matched averaging for NVIDIA FLARE: an aggregator, a controller of rounds, and its sites.

Needs NVFLARE itself: `pip install 'fedmerge[nvflare]'`.
"""

import importlib.util

import lazy_loader

if importlib.util.find_spec("nvflare") is None:
    raise ModuleNotFoundError(
        "fedmerge.nvflare needs NVFLARE, which is not installed: pip install 'fedmerge[nvflare]'",
        name="nvflare",
    )

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
