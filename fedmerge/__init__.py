"""Merge separately trained PyTorch checkpoints by federated matched averaging.

The names below are loaded when they are first used, so that `import fedmerge` costs nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
