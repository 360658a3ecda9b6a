"""Updates as products of two factors: their sum, their size, and the nearest one of lower rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """An update B·A of a layer, all in double precision."""

    b: Tensor  # (outputs, rank)
    a: Tensor  # (rank, inputs)

    @property
    def rank(self) -> int:
        """How many columns B has."""
        return self.b.shape[1]

    @property
    def energy(self) -> float:
        """The squared Frobenius norm of B·A: the sum of (BᵀB) ∘ (A·Aᵀ)."""
        return float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum())

    def distance(self, other: Product) -> float:
        """Return the squared Frobenius norm of the difference from another product."""
        return max(0.0, combined([self, other], [1.0, -1.0]).energy)


def combined(products: Sequence[Product], shares: Sequence[float]) -> Product:
    """Return the weighted sum of products, exactly, at the sum of their ranks.

    Σ s_j B_j A_j = [s_1 B_1, s_2 B_2, …] · [A_1; A_2; …]
    """
    b = torch.cat([share * own.b for own, share in zip(products, shares, strict=True)], dim=1)
    return Product(b, torch.cat([own.a for own in products]))


def truncated(product: Product, rank: int) -> tuple[Product, float]:
    """Return the nearest product of at most this rank, and the share of the energy that it keeps.

    With B = Q_B R_B and Aᵀ = Q_A R_A, the singular values of B·A are those of the small matrix
    R_B R_Aᵀ; the largest ones are kept, half of each in either factor.
    """
    q_b, r_b = torch.linalg.qr(product.b)
    q_a, r_a = torch.linalg.qr(product.a.T)
    u, values, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    energies = values.square()
    whole = float(energies.sum())
    kept = float(energies[:rank].sum()) / whole if whole > 0 else 1.0
    roots = values[:rank].sqrt()
    return Product(q_b @ u[:, :rank] * roots, roots[:, None] * (v[:rank] @ q_a.T)), kept
