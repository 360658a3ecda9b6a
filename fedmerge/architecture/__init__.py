"""From an architecture to a plan: which axis of which tensor carries which units."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
