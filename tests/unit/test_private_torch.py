"""What fedmerge takes from torch's private parts is there, and does what we rely on.

If a release of torch changes one of them, the test that fails says which, and who uses it.
"""

import ast
import importlib
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PACKAGE = Path(__file__).parent.parent.parent / "fedmerge"
ATEN = torch.ops.aten

# Each private name of torch's, and what private_torch makes of it.
NAMES = {
    "torch.utils._pytree.tree_leaves": "leaves",
    "torch.utils._pytree.tree_map": "map_leaves",
    "torch.utils._pytree.tree_map_only": "map_tensors",
    "torch._ops.OpOverload": "Op",
    "torch._ops.HigherOrderOperator": "HigherOrderOp",
    "torch._C.DispatchKey.CompositeExplicitAutograd": "plain_kernel",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": "uncompiled",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "uncompiled",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "uncompiled",
    "torch.utils._python_dispatch.TorchDispatchMode": "CostMode",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "UncompiledMode",
    "torch.utils._python_dispatch._disable_current_modes": "without_modes",
    "torch._C.DisableTorchFunction": "unseen",
    "torch._C._get_mkldnn_enabled": "without_onednn",
    "torch._C._set_mkldnn_enabled": "without_onednn",
    "torch.nn.modules.conv._ConvNd": "ConvLayer",
    "torch.nn.modules.conv._ConvTransposeNd": "TransposedConvLayer",
    "torch.nn.modules.batchnorm._BatchNorm": "BatchNormLayer",
    "torch.nn.modules.batchnorm._NormBase": "StatisticsNormLayer",
    "torch._utils._rebuild_tensor_v2": "rebuild_tensor",
    "torch._utils._rebuild_tensor_v3": "rebuild_tensor_as",
}
# Attributes of torch's objects: an object that has it.
ATTRIBUTES: dict[str, tuple[str, Callable[[], object]]] = {
    "_schema": ("schema_of", lambda: ATEN.add.Tensor),
    "_overloadpacket": ("packet_of", lambda: ATEN.add.Tensor),
    "_name": ("higher_order_name", lambda: torch.ops.higher_order.cond),
    "py_kernels": ("plain_kernel", lambda: torch.ops.higher_order.cond),
    "_cdata": ("storage_address", lambda: torch.ones(1).untyped_storage()),
    "_modules": ("direct_parts", nn.Module),
}


def users(name: str) -> str:
    """Return the files of fedmerge that import a name from private_torch, as a hint."""
    return ", ".join(file for file, names in imported_by_files().items() if name in names)


@cache
def imported_by_files() -> dict[str, set[str]]:
    """Return what every file of fedmerge imports from private_torch."""
    imported: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "fedmerge.private_torch":
                imported.setdefault(path.name, set()).update(alias.name for alias in node.names)
    return imported


def private(name: str) -> Any:
    """Return what private_torch calls so; a module that does not import is a failure by itself."""
    return getattr(importlib.import_module("fedmerge.private_torch"), name)


def resolve(dotted: str) -> object:
    """Return what a dotted name stands for, as far as modules go by import."""
    value: Any = torch
    path = "torch"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part) and isinstance(value, type(torch)):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("dotted", NAMES)
def test_torch_has_the_private_name(dotted: str) -> None:
    name = NAMES[dotted]
    try:
        resolve(dotted)
    except (AttributeError, ImportError):
        pytest.fail(f"torch has no {dotted}: private_torch.{name}, used in {users(name)}")


def test_a_name_that_is_gone_is_told() -> None:
    with pytest.raises(ImportError, match="_no_such_function"):
        resolve("torch._utils._no_such_function")


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_an_object_of_torch_has_the_private_attribute(attribute: str) -> None:
    name, make = ATTRIBUTES[attribute]
    told = f"no attribute {attribute}: private_torch.{name}, used in {users(name)}"
    assert hasattr(make(), attribute), told


def test_every_name_of_the_file_is_used() -> None:
    source = (PACKAGE / "private_torch.py").read_text(encoding="utf-8")
    defined = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert {name for name in defined | set(NAMES.values()) if not users(name)} == set()


def test_leaves_are_found_in_lists_tuples_and_dicts_from_left_to_right() -> None:
    assert private("leaves")([1, (2, {"a": 3}), None]) == [1, 2, 3, None], users("leaves")


def test_leaves_of_two_nested_values_are_mapped_together() -> None:
    added = private("map_leaves")(lambda a, b: a + b, {"a": [1, 2]}, {"a": [10, 20]})
    assert added == {"a": [11, 22]}, users("map_leaves")


def test_only_tensors_are_mapped() -> None:
    mapped = private("map_tensors")(Tensor.item, (torch.tensor(2), "a", [torch.tensor(3)]))
    assert mapped == (2, "a", [3]), users("map_tensors")


def test_a_schema_says_name_arguments_and_what_is_changed() -> None:
    schema = private("schema_of")(ATEN.add_.Tensor)
    arguments = [
        (a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments
    ]
    assert (schema.name, schema.is_mutable, arguments) == (
        "aten::add_",
        True,
        [("self", True), ("other", False), ("alpha", False)],
    ), users("schema_of")


def test_overloads_share_a_packet_and_a_base_name() -> None:
    add, scalar = ATEN.add.Tensor, ATEN.add.Scalar
    assert private("packet_of")(add) is private("packet_of")(scalar), users("packet_of")
    assert private("base_name")(scalar) == "add", users("base_name")


def test_an_aten_op_is_an_op_and_a_branch_is_of_higher_order() -> None:
    assert isinstance(ATEN.add.Tensor, private("Op")), users("Op")
    assert isinstance(torch.ops.higher_order.cond, private("HigherOrderOp"))
    assert not isinstance(ATEN.add.Tensor, private("HigherOrderOp")), users("HigherOrderOp")


def test_a_higher_order_op_has_a_name_and_a_plain_kernel() -> None:
    cond = torch.ops.higher_order.cond
    assert private("higher_order_name")(cond) == "cond", users("higher_order_name")
    kernel = private("plain_kernel")(cond)
    taken = kernel(torch.tensor(True), torch.sin, torch.cos, (torch.zeros(1),))
    assert taken.tolist() == [0.0], users("plain_kernel")


def test_views_have_their_storage_in_common_and_copies_do_not() -> None:
    address, tensor = private("storage_address"), torch.ones(4)
    assert address(tensor) == address(tensor[1:]), users("storage_address")
    assert address(tensor) != address(tensor.clone()), users("storage_address")


def test_a_part_that_has_two_names_is_listed_twice() -> None:
    module, part = nn.Module(), nn.Linear(1, 1)
    module.add_module("a", part)
    module.add_module("b", part)
    assert list(private("direct_parts")(module)) == ["a", "b"], users("direct_parts")


class Functions(torch.overrides.TorchFunctionMode):
    """Counts the functions it is told of."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a function and call it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_functions_are_seen_by_no_mode_where_we_ask_for_it() -> None:
    tensor = torch.ones(1)
    with Functions() as mode:
        tensor.add(1)
        seen = mode.count
        with private("unseen")():
            tensor.add(1)
        assert seen > 0
        assert mode.count == seen, users("unseen")


def counting_mode(base: str) -> Any:
    """Return a mode of ops that counts them, derived from one of private_torch."""

    class Counting(private(base)):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    return Counting()


@pytest.mark.parametrize("base", ["CostMode", "UncompiledMode"])
def test_ops_are_seen_by_a_mode_and_not_where_we_ask_for_it(base: str) -> None:
    tensor = torch.ones(1)
    with counting_mode(base) as mode:
        tensor.add(1)
        assert mode.count == 1, users(base)
        with private("without_modes")():
            tensor.add(1)
        assert mode.count == 1, users("without_modes")


@pytest.mark.slow
def test_an_uncompiled_mode_runs_without_an_import_of_the_compiler() -> None:
    code = (
        "import sys, torch; from fedmerge import private_torch as p\n"
        "class Mode(p.UncompiledMode):\n"
        "    @p.uncompiled\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*args, **(kwargs or {}))\n"
        "with Mode(): torch.ones(2).add(1)\n"
        "print(p.is_compiler_loaded(), 'torch._dynamo' in sys.modules)\n"
        "import torch._dynamo; print(p.is_compiler_loaded()); p.forget_compiled()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\nTrue\n", users("UncompiledMode")


def test_onednn_is_off_inside_and_as_before_outside() -> None:
    before = torch._C._get_mkldnn_enabled()
    try:
        for enabled in (True, False):
            torch._C._set_mkldnn_enabled(enabled)
            with private("without_onednn")():
                assert not torch._C._get_mkldnn_enabled(), users("without_onednn")
            assert torch._C._get_mkldnn_enabled() is enabled, users("without_onednn")
    finally:
        torch._C._set_mkldnn_enabled(before)


@pytest.mark.parametrize(
    ("base", "kinds"),
    [
        ("ConvLayer", (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)),
        ("TransposedConvLayer", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
        ("StatisticsNormLayer", (nn.BatchNorm1d, nn.InstanceNorm2d)),
        ("BatchNormLayer", (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)),
    ],
)
def test_layers_of_a_kind_have_one_base(base: str, kinds: tuple[type[nn.Module], ...]) -> None:
    assert all(issubclass(kind, private(base)) for kind in kinds), users(base)
    assert not issubclass(nn.Linear, private(base)), users(base)


def test_torch_pickles_a_tensor_by_the_function_that_we_name(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "a.pt")
    torch.save(torch.ones(2, dtype=torch.uint16), tmp_path / "b.pt")
    named = []
    for path in (tmp_path / "a.pt", tmp_path / "b.pt"):
        with zipfile.ZipFile(path) as archive:
            data = next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
        named.append(
            next(str(arg) for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL")
        )
    functions = (private("rebuild_tensor"), private("rebuild_tensor_as"))
    assert named == [f"{f.__module__} {f.__name__}" for f in functions], users("rebuild_tensor")
