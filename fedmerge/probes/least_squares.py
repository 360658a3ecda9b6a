"""Least squares from sums: what is kept of rows of inputs and targets, and the fit to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

WIDE = 512  # inputs of a layer from which on not all strengths are tried
SINGLE = 1024  # inputs from which on systems are solved in single precision first
COLUMNS_AT_ONCE = 256  # of a product with itself, of which only one half is computed
QUIET = 1e-12  # of the largest variance: outputs that vary less weigh no more than that


@dataclass(frozen=True)
class Fit:
    """A layer in closed form: x · weightᵀ + bias, weight (out, in)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Summary:
    """What is known of rows (x, t) about their means, in double precision.

    Without an intercept all is about 0, and the means are 0.
    """

    targets: Tensor  # (out,), variances
    input_mean: Tensor  # (in,)
    target_mean: Tensor  # (out,)

    @property
    def like(self) -> Tensor:
        """A tensor of the precision, and where the numbers are."""
        return self.input_mean

    def variance(self, weight: Tensor) -> Tensor:
        """Return the variance (out,) of x · weightᵀ."""
        raise NotImplementedError

    def error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the mean square (out,) of x · weightᵀ + bias - t."""
        raise NotImplementedError

    def ridge(self, start: Tensor, strength: float) -> Fit:
        """Return the layer that minimises the mean square error + strength·scale·|weight - start|².

        `scale` is the inputs' mean variance, so that a strength of 1 weighs as much as the data.
        What is no number, of a diverged net, leaves the start.
        """
        raise NotImplementedError

    def as_lively(self, weight: Tensor) -> Tensor:
        """Return the weight (out, in) with rows scaled so that outputs vary as the targets do.

        Rows whose outputs hardly vary, or are no numbers, are left as they are.
        """
        variance = self.variance(weight)
        is_lively = variance > QUIET * float(self.targets.max())
        scale = (self.targets / variance).sqrt().where(is_lively, 1.0)
        return weight * scale[:, None]

    def fit_of(self, weight: Tensor) -> Fit:
        """Return the layer of a weight (out, in) whose outputs have the targets' mean."""
        return Fit(weight, self.target_mean - weight @ self.input_mean)

    def _shift(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the mean (out,) of x · weightᵀ + bias - t."""
        return self.input_mean @ weight.T + bias - self.target_mean


@dataclass(frozen=True)
class Gram(Summary):
    """Rows as their second moments."""

    inputs: Tensor  # (in, in)
    cross: Tensor  # (in, out)

    def variance(self, weight: Tensor) -> Tensor:
        """Return the variance (out,) of x · weightᵀ."""
        return (weight.T * (self.inputs @ weight.T)).sum(0).clamp_min(0)

    def error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the mean square (out,) of x · weightᵀ + bias - t."""
        crossed = (weight.T * self.cross).sum(0)
        shift = self._shift(weight, bias)
        return self.variance(weight) - 2 * crossed + self.targets + shift**2

    def ridge(self, start: Tensor, strength: float) -> Fit:
        """Return the layer of least error, held to a start: W·(G + p) = Cᵀ + p·start.

        Large systems in single precision, which takes half as long and errs by less than the
        strengths differ; in double where that fails.
        """
        penalty = strength * float(self.inputs.diagonal().mean()) or strength
        wanted = self.cross + penalty * start.T
        is_large = len(wanted) >= SINGLE
        for precision in (torch.float32, torch.float64) if is_large else (torch.float64,):
            matrix = self.inputs.to(precision, copy=True)
            matrix.diagonal().add_(penalty)
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if not failed:
                solved = torch.cholesky_solve(wanted.to(precision), factor)
                return self.fit_of(solved.T.to(wanted))
        return self.fit_of(start.clone())

    def about_zero(self) -> Gram:
        """Return the moments about 0."""
        mean, target_mean = self.input_mean, self.target_mean
        return Gram(
            inputs=self.inputs + torch.outer(mean, mean),
            cross=self.cross + torch.outer(mean, target_mean),
            targets=self.targets + target_mean**2,
            input_mean=torch.zeros_like(mean),
            target_mean=torch.zeros_like(target_mean),
        )

    def part(self, inputs: slice, targets: slice) -> Gram:
        """Return the moments of some of the inputs and some of the targets."""
        return Gram(
            inputs=self.inputs[inputs, inputs],
            cross=self.cross[inputs, targets],
            targets=self.targets[targets],
            input_mean=self.input_mean[inputs],
            target_mean=self.target_mean[targets],
        )


@dataclass(frozen=True)
class FewRows(Summary):
    """Rows themselves, where they are few or only judge: their moments would cost more."""

    rows: Tensor  # (rows, in), about the mean
    wanted: Tensor  # (rows, out), about the mean

    def variance(self, weight: Tensor) -> Tensor:
        """Return the variance (out,) of x · weightᵀ."""
        return self._made(weight).square().mean(0)

    def error(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the mean square (out,) of x · weightᵀ + bias - t."""
        apart = (self._made(weight) - self.wanted).square().mean(0)
        return apart + self._shift(weight, bias) ** 2

    def ridge(self, start: Tensor, strength: float) -> Fit:
        """Return the layer of least error: W = start + (T - X·startᵀ)ᵀ (X·Xᵀ + p·rows)⁻¹ X."""
        count = len(self.rows)
        penalty = strength * float(self.rows.square().mean()) or strength
        matrix = self._products.clone()
        matrix.diagonal().add_(penalty * count)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed:
            return self.fit_of(start.clone())
        missing = self.wanted - self._made(start)
        solved = torch.cholesky_solve(missing, factor).to(self.rows.dtype)
        return self.fit_of(start + (solved.T @ self.rows).double())

    @cached_property
    def _products(self) -> Tensor:
        return (self.rows @ self.rows.T).double()

    def _made(self, weight: Tensor) -> Tensor:
        return (self.rows @ weight.to(self.rows.dtype).T).double()


def few_rows(inputs: Tensor, targets: Tensor, *, has_intercept: bool) -> FewRows:
    """Return rows (rows, in) and (rows, out), about their means if there is an intercept."""
    share = 1.0 if has_intercept else 0.0
    mean, target_mean = share * inputs.mean(0), share * targets.mean(0)
    wanted = (targets - target_mean).double()
    return FewRows(
        rows=inputs - mean,
        wanted=wanted,
        targets=wanted.square().mean(0),
        input_mean=mean.double(),
        target_mean=target_mean.double(),
    )


class GramSum:
    """Adds up the moments of rows, batch by batch: products in the rows' precision, sums in double.

    Memory is that of (in + out) x in numbers, however many rows there are. Sums are about the
    first batch's mean: numbers that vary little about a large one keep their digits. Of the inputs'
    products with each other one half is computed, which the other one mirrors.
    """

    def __init__(self, inputs: int, outputs: int, *, device: str) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.rows = 0
        self._origin = zeros(inputs), zeros(outputs)
        self._inputs = zeros(inputs, inputs)
        self._cross = zeros(inputs, outputs)
        self._targets = zeros(outputs)
        self._input_sum = zeros(inputs)
        self._target_sum = zeros(outputs)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add rows (rows, in) and (rows, out)."""
        if not self.rows:
            self._origin = inputs.mean(0).double(), targets.mean(0).double()
        self.rows += len(inputs)
        inputs, targets = (
            rows - origin.to(rows.dtype)  # which was of that precision
            for rows, origin in zip((inputs, targets), self._origin, strict=True)
        )
        for low in range(0, inputs.shape[1], COLUMNS_AT_ONCE):
            some = slice(low, low + COLUMNS_AT_ONCE)
            self._inputs[some, low:] += inputs[:, some].T @ inputs[:, low:]
        self._cross += inputs.T @ targets
        self._targets += targets.square().sum(0)
        self._input_sum += inputs.sum(0)
        self._target_sum += targets.sum(0)

    def result(self, *, has_intercept: bool) -> Gram:
        """Return the moments, about the means if there is an intercept to take these up."""
        assert self.rows, "no rows were added"
        shift, target_shift = self._input_sum / self.rows, self._target_sum / self.rows
        for low in range(0, len(shift), COLUMNS_AT_ONCE):
            high = low + COLUMNS_AT_ONCE
            self._inputs[high:, low:high] = self._inputs[low:high, high:].T
        about_means = Gram(
            inputs=(self._inputs / self.rows).addr_(shift, shift, alpha=-1),
            cross=self._cross / self.rows - torch.outer(shift, target_shift),
            targets=self._targets / self.rows - target_shift**2,
            input_mean=self._origin[0] + shift,
            target_mean=self._origin[1] + target_shift,
        )
        return about_means if has_intercept else about_means.about_zero()


@dataclass(frozen=True)
class Moments:
    """What is known of rows that a layer is fitted to, and of held-out ones that judge the fit."""

    fitted: Summary
    held_out: Summary

    def part(self, inputs: slice, targets: slice) -> Moments:
        """Return the moments of some of the inputs and some of the targets."""
        assert isinstance(self.fitted, Gram)
        assert isinstance(self.held_out, Gram)
        return Moments(self.fitted.part(inputs, targets), self.held_out.part(inputs, targets))


def best_ridge(moments: Moments, start: Tensor, strengths: Sequence[float]) -> Fit:
    """Return the fit whose strength errs least on held-out rows, outputs weighed alike.

    Of a layer that reads much, the first such strength on the way down from the middle one.
    """
    variances = moments.held_out.targets
    scale = variances.clamp_min(QUIET * float(variances.max()) or 1.0)

    fit_at = cache(lambda place: moments.fitted.ridge(start, strengths[place]))

    @cache
    def error_at(place: int) -> float:
        fit = fit_at(place)
        error = float((moments.held_out.error(fit.weight, fit.bias) / scale).mean())
        return error if math.isfinite(error) else math.inf

    places = range(len(strengths))
    if len(start[0]) <= WIDE:
        return fit_at(min(places, key=error_at))
    place, best = -1, len(strengths) // 2
    while place != best:  # downhill: a factorisation takes seconds
        place = best
        near = (k for k in (place - 1, place + 1) if k in places)
        best = next((k for k in near if error_at(k) < error_at(place)), place)
    return fit_at(best)


def lively_ridge(moments: Moments, start: Tensor, strengths: Sequence[float]) -> Fit:
    """Return the best ridge with outputs that vary as their targets do.

    Least squares gives back only what it can explain, and the mean of units that match badly is
    small: hidden units would fade from layer to layer. So it starts from, and ends in, rows of
    the targets' variance.
    """
    fitted = moments.fitted
    fit = best_ridge(moments, fitted.as_lively(start), strengths)
    return fitted.fit_of(fitted.as_lively(fit.weight))
