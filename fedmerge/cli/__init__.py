"""The command line: options in, tables or JSON out, errors as messages and exit codes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
