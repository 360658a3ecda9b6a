"""Numbers that models take out of their data: followed to where they decide, or refused."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import plan_checked
from fedmerge.architecture.from_code import ways_of
from fedmerge.errors import ArchitectureError
from tests.unit.architecture.from_code.test_ways import (
    Between,
    Net,
    inputs_of,
    is_sound,
    numbered,
    planned,
)

ODD = 13  # a number that no input of the tests gives by itself


def same(h: Tensor) -> Tensor:
    return h


def thousandths(x: Tensor) -> int:
    return int(x.sum() * 1000)


def chosen(is_odd: Callable[[Tensor], Any]) -> Between:
    """Return what knows units by their numbers where a condition holds of the input."""
    return lambda net, h, x: numbered(h) if is_odd(x) else h


TABLE = [*[same] * ODD, numbered, *[same] * 83]
RARE = {ODD: numbered}


def by_turns(net: Net, h: Tensor, x: Tensor) -> Tensor:
    for turn in range(int(x.abs().sum().clamp(max=40))):
        if turn == 2 * ODD:
            h = numbered(h)
    return h


def by_match(net: Net, h: Tensor, x: Tensor) -> Tensor:
    match thousandths(x) % 97:
        case 13:
            return numbered(h)
        case _:
            return h


def by_what_is_kept(net: Net, h: Tensor, x: Tensor) -> Tensor:
    net.calls.append(thousandths(x) % 97)
    return numbered(h) if net.calls[-1] == ODD else h


def cut(net: Net, h: Tensor, x: Tensor) -> Tensor:
    size = int(x.abs().sum() * 1e-6)
    return torch.cat([h[:, :size], h[:, size:] * 2], 1)


DECIDED: Mapping[str, Between] = {
    "a remainder": chosen(lambda x: thousandths(x) % 97 == ODD),
    "a larger remainder": chosen(lambda x: thousandths(x) % 9973 == ODD),
    "a quotient": chosen(lambda x: x.sum().item() // 0.01 == ODD),
    "both": chosen(lambda x: divmod(thousandths(x), 97)[1] == ODD),
    "bits": chosen(lambda x: thousandths(x) & 127 == ODD),
    "a rounded number": chosen(lambda x: round(x.sum().item(), 2) == 1.13),
    "a rounded float": chosen(lambda x: round(float(x.sum())) == 100 + ODD),
    "a floor": chosen(lambda x: math.floor(x.sum() * 1000) % 97 == ODD),
    "a root": chosen(lambda x: int(math.sqrt(x.abs().sum()) * 1000) % 97 == ODD),
    "nearness": chosen(lambda x: math.isclose(x.sum().item(), 0.13, rel_tol=1e-4)),
    "a whole number": chosen(lambda x: float(x.sum() * 8).is_integer()),
    "a list's": chosen(lambda x: int(max(x.flatten().tolist()) * 1000) % 97 == ODD),
    "a sum of truths": chosen(lambda x: sum(v > 3.3 for v in x.flatten().tolist()) == 7),
    "one of several": chosen(lambda x: thousandths(x) % 97 in (ODD, 14)),
    "mapped": chosen(lambda x: next(map(int, [x.sum() * 1000])) % 97 == ODD),
    "a count": chosen(lambda x: (x > 1).sum().item() % 97 == ODD),
    "a length": chosen(lambda x: len((x > 50).nonzero()) % 97 == ODD),
    "a size": chosen(lambda x: x[x > 50].shape[0] % 97 == ODD),
    "a number of elements": chosen(lambda x: x[x > 50].numel() % 97 == ODD),
    "turns of a loop": by_turns,
    "a case": by_match,
    "a kept number": by_what_is_kept,
    "where units are cut": cut,
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_decides_by_a_number_is_planned_on_both_sides(name: str) -> None:
    torch.manual_seed(0)
    net = Net(DECIDED[name])
    plan = planned(net)
    assert [group.name for group in plan.groups] == ["first", "one"]  # what comes before it
    assert is_sound(net, plan)
    assert plan.notes == ()


def by_position(net: Net, h: Tensor, x: Tensor) -> Tensor:
    from math import sqrt  # not among the module's names

    return numbered(h) if int(sqrt(x.abs().sum().item())) == ODD else h


def by_halving(net: Net, h: Tensor, x: Tensor) -> Tensor:
    halvings, size = 0, x.abs().sum()
    while size.item() > 1:
        size, halvings = size / 2, halvings + 1
        if halvings == 20:
            h = numbered(h)
    return h


def by_counting(net: Net, h: Tensor, x: Tensor) -> Tensor:
    count = 0
    for _ in range(int(x.abs().sum().clamp(max=40))):
        count += 1
    return numbered(h) if count == 2 * ODD else h


def by_layer(net: Net, h: Tensor, x: Tensor) -> Tensor:
    made: Tensor = nn.ModuleList([net.one, net.two])[(x.sum() * 1000).int() % 2](h)  # type: ignore[call-overload]
    return made


REFUSED: Mapping[str, tuple[Between, str]] = {
    "a dictionary": (
        lambda net, h, x: RARE.get(thousandths(x) % 97, same)(h),
        "is looked up in a dictionary or a set",
    ),
    "a set": (chosen(lambda x: thousandths(x) % 97 in {ODD}), "is looked up in a dictionary"),
    "a list": (lambda net, h, x: TABLE[thousandths(x) % 97](h), "is looked up by, or counts"),
    "a list of layers": (by_layer, "becomes a plain number"),
    "a part of a list": (
        chosen(lambda x: len(TABLE[: thousandths(x) % 97]) == ODD),
        "is looked up by, or counts",
    ),
    "a tensor's text": (chosen(lambda x: f"{x.sum():.2f}".endswith("13")), "becomes text"),
    "a number's text": (chosen(lambda x: str(thousandths(x)).endswith("13")), "becomes text"),
    "old text": (
        chosen(lambda x: ("%d" % thousandths(x)).endswith("13")),  # noqa: UP031
        "becomes a plain integer",
    ),
    "bytes": (
        chosen(lambda x: bytes([thousandths(x) % 97]) == b"\r"),
        "is looked up by, or counts",
    ),
    "numpy": (chosen(lambda x: int(x.numpy().sum() * 1000) % 97 == ODD), "becomes numpy's"),
    "numpy's function": (
        chosen(lambda x: int(np.floor(x.sum().item() * 1000)) % 97 == ODD),
        "becomes numpy's",
    ),
    "a library": (
        chosen(lambda x: statistics.mean(x.flatten().tolist()) > ODD),
        "can't be followed: TypeError",
    ),
    "a method": (chosen(lambda x: x.sum().__int__() % 97 == ODD), "becomes a plain number"),
    "an import of its own": (by_position, "becomes a plain number"),
    "parts of what was found": (chosen(lambda x: len([*x[x > 1]]) == ODD), "how many parts"),
    "how many pass": (
        chosen(lambda x: len([v for v in x.flatten().tolist() if v > 3.3]) == 7),
        "says how many there are",
    ),
    "turns that are counted": (by_halving, "says how many there are"),
    "turns counted behind the loop": (by_counting, "says how many there are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_that_gets_out_of_sight_is_refused_with_its_line(name: str) -> None:
    torch.manual_seed(0)
    between, how = REFUSED[name]
    with pytest.raises(
        ArchitectureError, match=rf"takes a number out of its data that .*{how}"
    ) as caught:
        planned(Net(between))
    assert "test_numbers.py:" in caught.value.problem
    assert "`numbers=trusted`" in caught.value.hint


def test_a_number_that_is_taken_on_trust_is_noted() -> None:
    torch.manual_seed(0)
    net = Net(REFUSED["a dictionary"][0])
    plan = plan_checked(net, inputs_of(), seed=0, state=(), trusts_numbers=True)
    assert [group.name for group in plan.groups] == ["first", "one", "two"]
    (note,) = plan.notes
    assert "taken on trust (`numbers`)" in note
    assert "(test_numbers.py:" in note


def told(net: Net, h: Tensor, x: Tensor) -> Tensor:
    text = f"the sum is {x.sum()}"
    logging.getLogger(__name__).debug("%s %.3f %d", x.sum().item(), float(x.sum()), int(x.sum()))
    print(f"{int(x.sum())} {x.sum().item():.3f}")
    if x.sum().item() > 1e12:
        raise ValueError(text)
    assert not math.isnan(x.sum().item()), f"not a number: {x}"
    return h


def checked(net: Net, h: Tensor, x: Tensor) -> Tensor:
    count = (x > 1e9).sum().item()
    if count != 0:
        raise ValueError(f"{count} numbers are too large")
    return h


def sized(net: Net, h: Tensor, x: Tensor) -> Tensor:
    longest = int((x > 0).sum(1).max())
    made = torch.zeros(len(h), max(longest, 1)).to(h)
    return h * (1 + made.sum() * 0)


def turned(net: Net, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(int((x > 0).sum(1).max())):
        h = h.relu() * 0.9 + h * 0.1
    return h


def found(net: Net, h: Tensor, x: Tensor) -> Tensor:
    rows = h[(x[:, 0] > -100).nonzero().squeeze(1)]
    count, _ = rows.shape
    return rows.view(count, -1).relu() if count else h


def masked(net: Net, h: Tensor, x: Tensor) -> Tensor:
    out, mask = h.clone(), x[:, 0] > 0
    out[mask] = h[mask].relu()
    return out


def kept(net: Net, h: Tensor, x: Tensor) -> Tensor:
    net.calls.append(float(h.norm()))
    return h


HARMLESS: Mapping[str, Between] = {
    "told": told,
    "checked": checked,
    "a size": sized,
    "turns of a loop": turned,
    "rows that are found": found,
    "rows of a mask": masked,
    "kept": kept,
    "lengths of parts": lambda net, h, x: torch.cat(torch.split(h, h.new_ones(2).long().tolist())),
    "a norm": lambda net, h, x: h / max(1e-6, math.sqrt(h.pow(2).sum().item())),
    "a temperature": lambda net, h, x: h * float(x.std()) ** -0.5,
    "bounds": lambda net, h, x: h.clamp(-float(h.abs().max()), float(h.abs().max())),
    "a place in the input": lambda net, h, x: h * x[:, x.mean(0).argmax().item() :][:, :1],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_numbers_that_are_harmless_cost_a_plan_nothing(name: str) -> None:
    torch.manual_seed(0)
    net = Net(HARMLESS[name])
    plan = planned(net)
    assert [group.name for group in plan.groups] == ["first", "one", "two"]
    assert plan.notes == ()


def test_a_modules_names_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(globals())
    ways = ways_of(Net(DECIDED["a root"]), inputs_of())
    assert len(ways.all) > 1
    assert globals() == before
    assert functools.partial(int)("3") == 3
