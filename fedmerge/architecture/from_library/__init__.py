"""Models of libraries, built from a folder's config.json or by their names in the library."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
