"""The user's model at the widths of given tensors, for work that any engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedmerge.graph.resize import resize_module
from fedmerge.workflow.models import ModelCode

BUILDER = "fedmerge.workflow.retrain.builder:build"


def build(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    factory: str,
    arguments: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> nn.Module:
    """Return the model that the user's code builds, resized to these shapes.

    `aliases` are further names of tied tensors, which have no shape of their own.
    """
    model = ModelCode(factory, arguments).build()
    resize_module(model, {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}})
    return model
