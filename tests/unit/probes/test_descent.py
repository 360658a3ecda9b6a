"""Steps downhill, against torch's own optimisers and known lowest places."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fedmerge.probes import Adam, lowest


def test_adam_goes_as_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    begun = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2,))]
    ours, theirs = ([x.clone() for x in begun] for _ in range(2))
    adam, reference = Adam(ours, rate=0.1), torch.optim.Adam(theirs, lr=0.1)
    for step in range(20):
        slopes = [torch.randn(x.shape, generator=generator) for x in begun[:2]]
        for x, slope in zip(theirs, slopes, strict=False):
            x.grad = slope
        adam.rate = reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        reference.step()
        adam.step([*slopes, None])
    for one, other, start in zip(ours[:2], theirs[:2], begun[:2], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
        assert not torch.allclose(one, start, rtol=0, atol=1e-2)
    assert torch.equal(ours[2], begun[2])  # it had no gradient


@pytest.mark.parametrize("start", [[-1.2, 1.0], [3.0, -2.0]])
def test_the_lowest_place_of_a_bent_valley_is_found(start: list[float]) -> None:
    def valley(place: Tensor) -> Tensor:
        return (1 - place[0]) ** 2 + 100 * (place[1] - place[0] ** 2) ** 2

    found = lowest(valley, torch.tensor(start, dtype=torch.double))
    assert torch.allclose(found, torch.ones(2, dtype=torch.double), rtol=0, atol=1e-6)


def test_a_search_that_meets_no_numbers_stays_where_it_began() -> None:
    start = torch.tensor([1.0, 2.0], dtype=torch.double)
    assert torch.equal(lowest(lambda place: (place * torch.nan).sum(), start), start)


def test_torchs_optimisers_would_load_its_compiler_and_these_do_not() -> None:
    code = """
import sys, torch
from fedmerge.probes import Adam, lowest
x = torch.zeros(2)
Adam([x], rate=0.1).step([torch.ones(2)])
lowest(lambda place: place.square().sum(), torch.ones(2))
print("torch._dynamo" in sys.modules)
torch.optim.Adam([x.requires_grad_()])
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]
