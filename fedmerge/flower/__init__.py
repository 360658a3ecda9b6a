"""Matched averaging for Flower: strategies of a ServerApp, and a ClientApp.

Needs Flower itself: `pip install 'fedmerge[flower]'`.
"""

import importlib.util

import lazy_loader

if importlib.util.find_spec("flwr") is None:
    raise ModuleNotFoundError(
        "fedmerge.flower needs Flower, which is not installed: pip install 'fedmerge[flower]'",
        name="flwr",
    )

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
