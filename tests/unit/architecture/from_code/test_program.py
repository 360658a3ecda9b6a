"""The graphs of exported programs: run without torch.export.load, and without its powers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import (
    Budget,
    BudgetError,
    ExportedProgram,
    operator_of,
    plan_model,
    program_budget,
    program_inputs,
)
from fedmerge.checkpoint import open_checkpoint
from fedmerge.errors import ArchitectureError
from fedmerge.values import Program
from tests.model_zoo import ZOO
from tests.unit.checkpoint.archives import save_exported


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.one, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: x + 0, (x,))
        with torch.no_grad():
            x = x.masked_fill(x < -3, float("-inf")).exp()
        out: Tensor = self.head(x)
        return out


def program_of(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Program:
    program = open_checkpoint(save_exported(module, folder / "a.pt2", *inputs)).program
    assert program is not None
    return program


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Program:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return program_of(module, (torch.randn(2, 4),), tmp_path_factory.mktemp("mlp"))


def edited(program: Program, change: Callable[[Any], None]) -> Program:
    described = copy.deepcopy(dict(program.graph_module))
    change(described)
    return replace(program, graph_module=described)


@pytest.mark.parametrize("name", ["resnet B", "lstm, 2 layers", "vit", "weight norm"])
def test_a_graph_gives_the_groups_and_outputs_of_its_model(name: str, tmp_path: Path) -> None:
    model = ZOO[name]
    torch.manual_seed(0)
    module = model.build().eval()
    program = ExportedProgram(program_of(module, model.inputs(), tmp_path))
    with torch.no_grad():
        outputs = program(*model.inputs())
        expected = module(*model.inputs())
    listed = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(outputs, listed, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert list(program.state_dict()) == list(module.state_dict())
    assert len(plan_model(program, program_inputs(program)).groups) == model.groups


def test_branches_infinities_and_grad_modes_are_followed(tmp_path: Path) -> None:
    module, inputs = Branching().eval(), (torch.randn(2, 4),)
    program = ExportedProgram(program_of(module, inputs, tmp_path))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(program(*inputs)[0], module(*inputs), atol=1e-6)
    assert [g.name for g in plan_model(program, program_inputs(program)).groups] == ["stem"]


def test_inputs_have_the_exported_shapes_and_the_examples_whole_numbers(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
            out: Tensor = self.table(tokens) * scale
            return out

    tokens = torch.tensor([[8, 1, 2], [0, 7, 8]])
    program = ExportedProgram(program_of(Two(), (tokens, torch.ones(4)), tmp_path))
    drawn = program_inputs(program)
    assert torch.equal(drawn[0], tokens)
    assert drawn[1].shape == (4,)
    assert not torch.equal(drawn[1], torch.ones(4))


def test_a_dynamic_batch_is_run_at_its_exported_size(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(module, (torch.randn(5, 1, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "a.pt2")
    program = open_checkpoint(tmp_path / "a.pt2").program
    assert program is not None
    inputs = program_inputs(ExportedProgram(program))
    assert inputs[0].shape == (5, 1, 8, 8)
    assert len(plan_model(ExportedProgram(program), inputs).groups) == 1


@pytest.mark.parametrize(
    "target",
    [
        *("torch.ops.aten.save.default", "torch.ops.aten.from_file.default", "os.system"),
        *("torch.ops.aten.__class__.__init__", "_operator.attrgetter", "torch.load", "math.prod"),
        *("torch.ops.aten._sparse_coo_tensor_unsafe.default", "torch.ops.prim.device.default"),
        *("torch.ops.higher_order.call_torchbind", "torch.ops.aten.relu.default.__call__"),
    ],
)
def test_only_functions_of_the_tables_are_called(target: str, mlp: Program) -> None:
    with pytest.raises(ValueError, match="which fedmerge does not know"):
        operator_of(target)

    def change(described: Any) -> None:
        described["graph"]["nodes"][0]["target"] = target

    with pytest.raises(ArchitectureError, match=f"it calls '{target}'") as caught:
        ExportedProgram(edited(mlp, change))
    assert "`model=FILE.pt2`" in caught.value.hint


def test_ops_that_are_known_are_found() -> None:
    assert operator_of("torch.ops.aten.conv2d.default") is torch.ops.aten.conv2d.default
    assert operator_of("_operator.mul")(3, 4) == 12
    assert operator_of("torch.ops.aten._assert_scalar.default")(False, "no") is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["signature"]["input_specs"].append({"custom_obj": {}}), "a custom obj among"),
        (lambda d: d["signature"]["input_specs"][0]["parameter"].update(
            parameter_name="nothing"), "'nothing' has no tensor"),
        (lambda d: d["signature"]["input_specs"][0]["parameter"].update(
            parameter_name="forward"), "'forward' has no tensor"),
        (lambda d: d.pop("graph"), "'graph'"),
    ],
)  # fmt: skip
def test_graphs_that_make_no_sense_are_refused(
    change: Callable[[Any], None], problem: str, mlp: Program
) -> None:
    with pytest.raises(ArchitectureError, match=f"not understood: {problem}"):
        ExportedProgram(edited(mlp, change))


def test_inputs_larger_than_memory_are_refused(mlp: Program) -> None:
    def change(described: Any) -> None:
        name = described["graph"]["inputs"][-1]["as_tensor"]["name"]
        described["graph"]["tensor_values"][name]["sizes"] = [{"as_int": 1 << 40}, {"as_int": 4}]

    with pytest.raises(ArchitectureError, match="inputs of more than 8,388,608 numbers"):
        program_inputs(ExportedProgram(edited(mlp, change)))


def test_names_that_are_not_there_are_refused_when_the_graph_runs(mlp: Program) -> None:
    def change(described: Any) -> None:
        described["graph"]["nodes"][0]["inputs"][0]["arg"]["as_tensor"]["name"] = "nowhere"

    program = ExportedProgram(edited(mlp, change))
    with pytest.raises(ArchitectureError, match="not understood: 'nowhere'"):
        plan_model(program, program_inputs(program))


def with_op(program: Program, target: str, *arguments: dict[str, Any]) -> Program:
    """Return a program that begins with another op, on the first layer's result or on numbers."""

    def change(described: Any) -> None:
        nodes = described["graph"]["nodes"]
        node = copy.deepcopy(nodes[0])
        first = nodes[0]["outputs"][0]
        node["target"] = target
        node["inputs"] = [
            {"name": f"a{k}", "arg": argument or first, "kind": 1}
            for k, argument in enumerate(arguments)
        ]
        node["outputs"] = [{"as_tensor": {"name": "extra"}}]
        nodes.insert(1, node)

    return edited(program, change)


LAYER: dict[str, Any] = {}  # stands for the first layer's result
HUGE = {"as_ints": [1 << 20, 1 << 20]}


@pytest.mark.parametrize(
    ("target", "arguments", "problem"),
    [
        ("torch.ops.aten.repeat.default", [LAYER, HUGE], "seconds of CPU time"),
        ("torch.ops.aten.repeat.default", [LAYER, {"as_ints": [1 << 11, 1 << 10]}], "holds more"),
        ("torch.ops.aten.expand.default", [LAYER, HUGE], "can't be foreseen"),
        ("_operator.mul", [{"as_string": "a" * 1000}, {"as_int": 1 << 40}], "numbers of ordinary"),
        ("_operator.mul", [{"as_ints": [1]}, {"as_int": 1 << 40}], "numbers of ordinary"),
        ("_operator.mul", [{"as_int": 1 << 62}, {"as_int": 1 << 62}], "numbers of ordinary"),
        ("_operator.getitem", [{"as_string": "abc"}, {"as_int": 1}], "no list"),
    ],
)
def test_a_graph_that_would_cost_too_much_is_refused_before_it_does(
    mlp: Program, target: str, arguments: list[dict[str, Any]], problem: str
) -> None:
    program = ExportedProgram(with_op(mlp, target, *arguments))
    with pytest.raises(ArchitectureError, match=problem):
        program(*program_inputs(program))


def test_what_costs_little_runs(mlp: Program) -> None:
    for target, arguments in (
        ("torch.ops.aten.repeat.default", [LAYER, {"as_ints": [2, 2]}]),
        ("_operator.mul", [{"as_int": 1 << 30}, {"as_int": 1 << 30}]),
    ):
        program = ExportedProgram(with_op(mlp, target, *arguments))
        expected = ExportedProgram(mlp)(*program_inputs(program))
        assert torch.equal(program(*program_inputs(program))[0], expected[0])


def test_a_graph_that_goes_on_and_on_is_refused(
    mlp: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ExportedProgram(mlp)
    assert program(*program_inputs(program))
    monkeypatch.setattr(program_budget, "MOST_STEPS", 2)
    with pytest.raises(ArchitectureError, match="runs more than 2 ops"):
        program(*program_inputs(program))


def test_a_product_of_large_matrices_is_foreseen() -> None:
    limits, wide = Budget.beside(0), torch.empty(1, 1).expand(1 << 13, 1 << 13)
    limits.foresee(torch.ops.aten.mm.default, [wide[:8], wide], {})
    with pytest.raises(BudgetError, match="more than 5 seconds of CPU time"):
        limits.foresee(torch.ops.aten.mm.default, [wide, wide], {})
