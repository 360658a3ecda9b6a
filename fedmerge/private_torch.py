"""Every use of torch's private names, under names of ours.

Torch may change what starts with an underscore in any release. Nothing else in fedmerge names such
a thing, and the tests of this file say which one a new release of torch has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._ops import HigherOrderOperator as HigherOrderOp
from torch._ops import OpOverload as Op
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["HigherOrderOp", "Op"]

ConvLayer = nn.modules.conv._ConvNd
TransposedConvLayer = nn.modules.conv._ConvTransposeNd
BatchNormLayer = nn.modules.batchnorm._BatchNorm
StatisticsNormLayer = nn.modules.batchnorm._NormBase  # batch and instance norms
CostMode = TorchDispatchMode  # sees every op; the compiler skips what it does

# What the pickle of a tensor calls, with the storage's dtype and with one of its own.
rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_tensor_as = torch._utils._rebuild_tensor_v3

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def leaves(nested: Any) -> list[Any]:
    """Return what nested lists, tuples, dicts and outputs of models hold, from left to right."""
    return pytree.tree_leaves(nested)


def map_leaves(function: Callable[..., Any], nested: Any, *others: Any) -> Any:
    """Return a nested value with each of its leaves, and those of others, given to a function."""
    return pytree.tree_map(function, nested, *others)


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """Return a nested value with each of its tensors given to a function."""
    return pytree.tree_map_only(Tensor, function, nested)


def schema_of(op: Any) -> Any:
    """Return an op's schema: its full name, its arguments, and which of them it changes."""
    return op._schema


def packet_of(op: Any) -> Any:
    """Return what an op's overloads have in common."""
    return op._overloadpacket


def base_name(op: Any) -> str:
    """Return an op's name without its namespace and overload."""
    name: str = op._overloadpacket.__name__
    return name


def higher_order_name(op: HigherOrderOp) -> str:
    """Return the name of a higher-order op, such as `cond`."""
    name: str = op._name
    return name


def plain_kernel(op: HigherOrderOp) -> Callable[..., Any] | None:
    """Return the function that runs a higher-order op without gradients, if there is one."""
    return op.py_kernels.get(DispatchKey.CompositeExplicitAutograd)


def storage_address(tensor: Tensor) -> int:
    """Return what two tensors have in common if and only if they share a storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def direct_parts(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return the parts of a module under their names, a shared one under each of them."""
    return module._modules


def unseen() -> AbstractContextManager[Any]:
    """Return a context in which no mode of functions is told of what is called."""
    return torch._C.DisableTorchFunction()


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no mode of ops is told of what runs."""
    return _disable_current_modes()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Run without oneDNN, whose ops hide what they do."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of ops that leaves torch's compiler alone, whose import takes seconds."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def uncompiled(function: _Function) -> _Function:
    """Keep torch's compiler out of a function and what it calls, without importing the compiler.

    A compiled module, or a higher-order op, would else have the modes themselves compiled.
    """
    set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


def is_compiler_loaded() -> bool:
    """Return whether anything imported torch's compiler in this process."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Import torch's compiler, as the first op without numbers does, which takes seconds."""
    import torch._dynamo  # noqa: F401


def forget_compiled() -> None:
    """Let torch's compiler forget what it compiled, and what it could not compile."""
    torch._dynamo.reset()
