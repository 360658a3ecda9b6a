"""Training as engines find it: importing this module takes what a first training would.

Torch imports its compiler, for seconds, when the first optimizer is made. An engine imports the
module of its work before the client's time begins.
"""

import torch

from fedmerge.training.client_work import train

__all__ = ["train"]

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
