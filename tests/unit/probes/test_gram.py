"""Least squares from sums, against torch's solver on the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedmerge.probes import (
    Fit,
    Gram,
    GramSum,
    Moments,
    best_ridge,
    few_rows,
    least_squares,
    lively_ridge,
)

ROWS, INPUTS, OUTPUTS = 60, 5, 3


def data(seed: int = 0, shift: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return rows (60, 5) and targets (60, 3) of a noisy linear map, in float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64) + shift
    noise = torch.randn(ROWS, OUTPUTS, generator=generator, dtype=torch.float64)
    true = torch.arange(15.0, dtype=torch.float64).reshape(INPUTS, OUTPUTS)
    return inputs, inputs @ true + 4 + 0.1 * noise


def gram(inputs: Tensor, targets: Tensor, *, has_intercept: bool = True, chunk: int = 60) -> Gram:
    total = GramSum(INPUTS, OUTPUTS, device="cpu")
    for start in range(0, len(inputs), chunk):
        total.add(inputs[start : start + chunk], targets[start : start + chunk])
    return total.result(has_intercept=has_intercept)


def start() -> Tensor:
    return torch.ones(OUTPUTS, INPUTS, dtype=torch.float64)


def test_a_weak_ridge_is_the_least_squares_solution() -> None:
    inputs, targets = data()
    fit = gram(inputs, targets).ridge(start(), 1e-14)
    with_ones = torch.cat([inputs, torch.ones(ROWS, 1, dtype=torch.float64)], dim=1)
    expected = torch.linalg.lstsq(with_ones, targets).solution.T
    assert torch.allclose(fit.weight, expected[:, :-1], rtol=0, atol=1e-9)
    assert torch.allclose(fit.bias, expected[:, -1], rtol=0, atol=1e-9)


def test_without_an_intercept_the_bias_is_zero() -> None:
    inputs, targets = data()
    fit = gram(inputs, targets, has_intercept=False).ridge(start(), 1e-14)
    expected = torch.linalg.lstsq(inputs, targets).solution.T
    assert torch.allclose(fit.weight, expected, rtol=0, atol=1e-9)
    assert torch.equal(fit.bias, torch.zeros(OUTPUTS, dtype=torch.float64))
    free = gram(inputs, targets).ridge(start(), 1e-14)
    assert not torch.allclose(free.weight, fit.weight, rtol=0, atol=1e-2)


def test_a_strong_ridge_is_the_start_with_the_right_mean() -> None:
    inputs, targets = data()
    fit = gram(inputs, targets).ridge(start(), 1e12)
    assert torch.allclose(fit.weight, start(), rtol=0, atol=1e-9)
    residual = targets - inputs @ fit.weight.T - fit.bias
    assert torch.allclose(residual.mean(0), torch.zeros(OUTPUTS, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("has_intercept", [True, False])
def test_the_error_is_the_mean_square_over_the_rows(has_intercept: bool) -> None:
    inputs, targets = data()
    weight, bias = start(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * has_intercept
    found = gram(inputs, targets, has_intercept=has_intercept).error(weight, bias)
    expected = (inputs @ weight.T + bias - targets).square().mean(0)
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("has_intercept", [True, False])
def test_chunks_add_up_to_the_whole(has_intercept: bool) -> None:
    inputs, targets = data()
    whole = gram(inputs, targets, has_intercept=has_intercept)
    parts = gram(inputs, targets, has_intercept=has_intercept, chunk=7)
    fewer = gram(inputs[:-7], targets[:-7], has_intercept=has_intercept, chunk=7)
    for name, values in vars(whole).items():
        assert torch.allclose(values, getattr(parts, name), rtol=1e-10, atol=1e-10), name
    assert not torch.allclose(whole.inputs, fewer.inputs, rtol=1e-3, atol=0)


def test_single_precision_keeps_what_varies_little_about_a_large_mean() -> None:
    inputs, targets = data(shift=0.0)
    far = (inputs + 10_000).float()
    found = gram(far, targets.float(), chunk=7)
    expected = torch.cov(far.double().T, correction=0)
    assert torch.allclose(found.inputs, expected, rtol=0, atol=1e-3)
    fit = found.ridge(start(), 1e-8)
    assert float(found.error(fit.weight, fit.bias).max()) < 0.05


def test_a_part_of_the_moments_is_the_moments_of_a_part() -> None:
    inputs, targets = data()
    part = gram(inputs, targets).part(slice(1, 4), slice(0, 2))
    assert torch.allclose(
        part.inputs, torch.cov(inputs[:, 1:4].T, correction=0), rtol=0, atol=1e-12
    )
    assert part.cross.shape == (3, 2)
    assert torch.allclose(part.target_mean, targets[:, :2].mean(0), rtol=0, atol=1e-12)


def test_the_strength_that_errs_least_on_held_out_rows_is_chosen() -> None:
    inputs, targets = data()
    few = gram(inputs[:6], targets[:6] + 30 * torch.randn(6, 3, dtype=torch.float64))
    held_out = gram(inputs[6:], targets[6:])
    true = torch.arange(15.0, dtype=torch.float64).reshape(INPUTS, OUTPUTS).T
    chosen = best_ridge(Moments(few, held_out), true, (1e-6, 1e6))
    assert torch.allclose(chosen.weight, true, rtol=0, atol=1e-3)  # noise: the start is better
    exact = best_ridge(Moments(held_out, held_out), torch.zeros_like(true), (1e-6, 1e6))
    assert torch.allclose(exact.weight, true, rtol=0, atol=0.1)  # the start is wrong


@pytest.mark.parametrize("solve", [best_ridge, lively_ridge])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_moments_that_are_no_numbers_leave_the_start(
    spoilt: float, solve: Callable[..., Fit]
) -> None:
    inputs, targets = data()
    inputs[3, 2] = spoilt
    moments = gram(inputs, targets)
    fit = solve(Moments(moments, moments), start(), (1e-4, 1.0))
    assert torch.equal(fit.weight, start())


def test_a_lively_fit_varies_as_its_targets_and_about_their_mean() -> None:
    inputs, targets = data()
    generator = torch.Generator().manual_seed(1)
    noisy = targets + 60 * torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    moments = gram(inputs, noisy)
    both = Moments(moments, moments)
    lively, plain = (solve(both, start(), (1e-9,)) for solve in (lively_ridge, best_ridge))
    outputs, faded = (inputs @ fit.weight.T + fit.bias for fit in (lively, plain))
    assert torch.allclose(outputs.var(0, unbiased=False), noisy.var(0, unbiased=False))
    assert torch.allclose(outputs.mean(0), noisy.mean(0))
    assert (faded.var(0) < 0.9 * noisy.var(0)).all()  # what noise hides least squares leaves out
    alike = torch.cosine_similarity(lively.weight, plain.weight)
    assert torch.allclose(alike, torch.ones_like(alike))  # longer, the same way


def test_a_lively_fit_of_what_can_be_explained_is_the_fit() -> None:
    inputs, targets = data()
    moments = gram(inputs, targets)
    lively = lively_ridge(Moments(moments, moments), start(), (1e-9,))
    plain = moments.ridge(start(), 1e-9)
    assert torch.allclose(lively.weight, plain.weight, rtol=1e-3, atol=0)
    assert not torch.equal(lively.weight, plain.weight)  # the noise is given back, too


def test_rows_that_give_nothing_are_not_blown_up() -> None:
    moments = gram(*data())
    silent = start()
    silent[1] = 0
    scaled = moments.as_lively(silent)
    assert torch.equal(scaled[1], silent[1])
    assert torch.allclose(moments.variance(scaled)[[0, 2]], moments.targets[[0, 2]])


def test_inputs_that_never_vary_fit_nothing_but_the_mean() -> None:
    _, targets = data()
    fit = gram(torch.ones(ROWS, INPUTS, dtype=torch.float64), targets).ridge(start(), 1e-3)
    assert torch.allclose(fit.weight, start(), rtol=0, atol=1e-9)
    assert torch.allclose(fit.weight.sum(1) + fit.bias, targets.mean(0), rtol=0, atol=1e-9)


@pytest.mark.parametrize("noise", [1e-3, 0.3, 3.0])
def test_a_wide_layer_finds_its_strength_downhill(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3, 30, generator=generator, dtype=torch.float64)

    def moments_of(rows: int) -> Gram:
        inputs = torch.randn(rows, 30, generator=generator, dtype=torch.float64)
        error = noise * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        total = GramSum(30, 3, device="cpu")
        total.add(inputs, inputs @ true.T + error)
        return total.result(has_intercept=True)

    moments = Moments(moments_of(40), moments_of(400))
    strengths = tuple(10.0**k for k in range(-6, 4))
    tried: list[float] = []

    solve = Gram.ridge

    def counted(gram: Gram, start: torch.Tensor, strength: float) -> Fit:
        tried.append(strength)
        return solve(gram, start, strength)

    monkeypatch.setattr(Gram, "ridge", counted)
    every = best_ridge(moments, torch.zeros_like(true), strengths)
    assert len(tried) == len(strengths)
    monkeypatch.setattr(least_squares, "WIDE", 29)
    downhill = best_ridge(moments, torch.zeros_like(true), strengths)
    assert torch.equal(downhill.weight, every.weight)
    assert len(tried) < 2 * len(strengths)


@pytest.mark.parametrize("has_intercept", [True, False])
@pytest.mark.parametrize("strength", [1e-3, 1.0])
def test_few_rows_say_what_their_moments_say(has_intercept: bool, strength: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = 1 + torch.randn(20, 50, generator=generator, dtype=torch.float64)
    targets = 2 + torch.randn(20, 4, generator=generator, dtype=torch.float64)
    begin = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    sums = GramSum(50, 4, device="cpu")
    sums.add(inputs, targets)
    moments = sums.result(has_intercept=has_intercept)
    rows = few_rows(inputs, targets, has_intercept=has_intercept)
    one, two = (own.ridge(begin, strength) for own in (moments, rows))
    assert torch.allclose(one.weight, two.weight, rtol=0, atol=1e-9)
    assert torch.allclose(one.bias, two.bias, rtol=0, atol=1e-9)
    assert not torch.allclose(one.weight, begin, rtol=0, atol=1e-3)
    assert torch.allclose(moments.variance(begin), rows.variance(begin))
    assert torch.allclose(moments.error(begin, one.bias + 1), rows.error(begin, one.bias + 1))


def test_large_systems_are_solved_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, start = gram(*data()), torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    exact = moments.ridge(start, 0.1)
    monkeypatch.setattr(least_squares, "SINGLE", INPUTS)
    single = moments.ridge(start, 0.1)
    assert single.weight.dtype == torch.float64
    assert not torch.equal(single.weight, exact.weight)
    assert torch.allclose(single.weight, exact.weight, rtol=1e-5, atol=0)


def test_what_single_precision_cannot_solve_is_solved_in_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, targets = data()
    inputs[:, 1] = inputs[:, 0] + 1e-5 * inputs[:, 1]  # alike as far as single precision sees
    moments, start = gram(inputs, targets), torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    exact = moments.ridge(start, 1e-14)
    monkeypatch.setattr(least_squares, "SINGLE", INPUTS)
    found = moments.ridge(start, 1e-14)
    assert torch.equal(found.weight, exact.weight)
    assert not torch.equal(found.weight, start)
