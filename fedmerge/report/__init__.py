"""The report: one HTML page about a merge, drawn from plain values.

Most names are loaded when they are first used: a merge of files needs nothing that looks at models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
