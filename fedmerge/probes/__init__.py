"""Inputs on which clients are run, and what their units make of them.

Most names are loaded when they are first used: options need nothing that runs models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
