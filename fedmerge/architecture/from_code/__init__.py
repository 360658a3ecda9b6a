"""Plans from model code: run a model once, follow its units, check the plan by numbers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
