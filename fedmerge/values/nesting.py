"""Groups inside others: which may be, and plans with and without them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from fedmerge.values.plans import Concat, Layout, Plan, Product, Units, plain_products


def with_inside(plan: Plan, inside: Mapping[str, str]) -> Plan:
    """Return the plan in which these groups (group → outer) have own orders, and no others."""

    def placed(layout: Layout) -> Layout:
        match layout:
            case Units(group):
                return Units(group, inside.get(group))
            case Product(factors):
                return Product(tuple(map(placed, factors)))
            case Concat(parts):
                return Concat(tuple(map(placed, parts)))
        return layout

    tensors = {
        name: replace(tensor, axes=tuple(map(placed, tensor.axes)))
        for name, tensor in plan.tensors.items()
    }
    return replace(plan, tensors=tensors)


def possible_outers(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return by group the groups that stand around it wherever it stands, outermost first."""
    found: dict[str, tuple[str, ...]] = {}
    for tensor in plan.tensors.values():
        for factors in itertools.chain.from_iterable(map(plain_products, tensor.axes)):
            around: tuple[str, ...] = ()
            for factor in factors:
                if isinstance(factor, Units):
                    known = found.get(factor.group, around)
                    found[factor.group] = tuple(group for group in known if group in around)
                    around += (factor.group,)
    return found
