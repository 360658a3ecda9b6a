"""Steps downhill. Torch's own optimisers load its compiler first, which takes a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DECAY, SQUARE_DECAY = 0.9, 0.999  # of Adam's means
EPSILON = 1e-8
SEARCH_STEPS = 100  # of a search, at most
HALVINGS = 40  # of a step that leads uphill
ENOUGH = 1e-4  # of the expected descent: a step is taken that gives so much
FLAT = 1e-9  # gradient at which a search is at its end


class Adam:
    """Adam (Kingma and Ba) on some tensors, which are changed in place."""

    def __init__(self, tensors: Sequence[Tensor], *, rate: float) -> None:
        self.rate = rate
        self._tensors = list(tensors)
        self._steps = 0
        self._means = [torch.zeros_like(own) for own in self._tensors]
        self._squares = [torch.zeros_like(own) for own in self._tensors]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Take one step, given every tensor's gradient; one without any stays."""
        self._steps += 1
        rate = self.rate / (1 - DECAY**self._steps)
        unbiased = math.sqrt(1 - SQUARE_DECAY**self._steps)
        state = zip(self._tensors, gradients, self._means, self._squares, strict=True)
        for tensor, gradient, mean, square in state:
            if gradient is None:
                continue
            mean.lerp_(gradient, 1 - DECAY)
            square.mul_(SQUARE_DECAY).addcmul_(gradient, gradient, value=1 - SQUARE_DECAY)
            tensor.addcdiv_(mean, (square.sqrt() / unbiased).add_(EPSILON), value=-rate)


def lowest(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return where a smooth loss of a few numbers (n,) is lowest, by BFGS with halved steps."""
    place = start.detach().clone()
    inverse = torch.eye(len(place), dtype=place.dtype)  # of the curvature, as far as it is known
    value, gradient = _slope(loss, place)
    for _ in range(SEARCH_STEPS):
        if not gradient.isfinite().all() or float(gradient.abs().max()) < FLAT:
            break
        step = -inverse @ gradient
        expected = float(gradient @ step)
        for _ in range(HALVINGS):
            new_value, new_gradient = _slope(loss, place + step)
            if new_value <= value + ENOUGH * expected:
                break
            step, expected = step / 2, expected / 2
        else:
            break  # nothing but rounding is left
        change = new_gradient - gradient
        curvature = float(step @ change)
        if curvature > 0:
            project = (
                torch.eye(len(place), dtype=place.dtype) - torch.outer(step, change) / curvature
            )
            inverse = project @ inverse @ project.T + torch.outer(step, step) / curvature
        place, value, gradient = place + step, new_value, new_gradient
    return place


def _slope(loss: Callable[[Tensor], Tensor], place: Tensor) -> tuple[float, Tensor]:
    """Return the loss at a place, and its gradient."""
    with torch.enable_grad():
        free = place.detach().clone().requires_grad_()
        found = loss(free)
        (gradient,) = torch.autograd.grad(found, [free])
    return float(found.detach()), gradient
