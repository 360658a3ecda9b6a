"""Merging with the model's code: every model of the zoo, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import resize_module, solve_widths
from fedmerge.architecture.from_code import permuted, plan_model, random_moves
from fedmerge.checkpoint import open_checkpoint
from fedmerge.cli import run
from tests.model_zoo import ZOO, Model

# The command line describes one input; models that also take a state are tested by their plans.
NAMES = [name for name, model in ZOO.items() if len(model.shapes) == 1]
TIGHT = 1e-9
QUICK = ("mlp", "gpt")  # a chain and a net with skips

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Let models build and run in float64, also what they make inside."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name: str) -> nn.Module:
    """Return a model of the zoo: the factory that the command line is given."""
    return ZOO[name].build()


def arguments(name: str) -> list[str]:
    """Return the options that describe a model of the zoo."""
    shape = ",".join(map(str, ZOO[name].shapes[0]))
    dtype = ["--set", "input_dtype=long"] if ZOO[name].tokens else []
    factory = ["--model", f"{__name__}:build", "--model-arg", f"name={name}"]
    return [*factory, "--input-shape", shape, *dtype]


def generic(model: Model, seed: int) -> nn.Module:
    """Return a model with random values everywhere, in float64."""
    torch.manual_seed(seed)
    module = model.build().eval()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor) * 0.5)
                if "var" in name:
                    tensor.copy_(0.5 + torch.rand_like(tensor))
    return module


def outputs(module: nn.Module, model: Model) -> Tensor:
    """Return a model's first output on the zoo's inputs, in float64."""
    with torch.no_grad():
        found = module(*model.inputs())
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def copies(module: nn.Module, model: Model, folder: Path, count: int) -> list[str]:
    """Save a model and copies of it with the units of every group in random order."""
    plan = plan_model(module, model.inputs())
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    widths = solve_widths(plan, shapes, source=str(folder))
    files = []
    for number in range(count):
        moves = random_moves(plan, widths, np.random.default_rng(number))
        if not number:
            moves = {group: np.arange(width) for group, width in widths.items()}
        files.append(str(folder / f"client-{number}.pt"))
        torch.save(permuted(module, plan, moves, widths).state_dict(), files[-1])
    return files


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES],
)
def test_permuted_copies_merge_back_to_the_function(name: str, tmp_path: Path) -> None:
    model = ZOO[name]
    module = generic(model, seed=1)
    files = copies(module, model, tmp_path, 3)
    output = tmp_path / "global.pt"
    assert run(["match", *files, *arguments(name), "-o", str(output), "-q"]) == 0
    merged = model.build().eval()
    checkpoint = open_checkpoint(output)
    state = {n: checkpoint.read_torch(n) for n in checkpoint.tensors}
    resize_module(merged, {n: tuple(t.shape) for n, t in state.items()})
    merged.load_state_dict(state)
    expected = outputs(module, model)
    assert torch.allclose(outputs(merged, model), expected, rtol=TIGHT, atol=TIGHT)
    assert run(["verify", str(output), *files, *arguments(name), "-q"]) == 0


def test_averaging_permuted_copies_element_by_element_is_another_function(tmp_path: Path) -> None:
    model = ZOO["resnet B"]
    module = generic(model, seed=1)
    files = copies(module, model, tmp_path, 3)
    options = [*arguments("resnet B"), "--method", "average"]
    assert run(["match", *files, *options, "-o", str(tmp_path / "g.pt"), "-q"]) == 0
    merged = model.build().eval()
    merged.load_state_dict(torch.load(tmp_path / "g.pt", weights_only=True))
    assert not torch.allclose(outputs(merged, model), outputs(module, model), atol=1e-2)


@pytest.mark.slow
def test_independent_residual_nets_kept_apart_are_their_ensemble(tmp_path: Path) -> None:
    model = ZOO["resnet B"]
    modules = [generic(model, seed) for seed in range(2)]
    files = []
    for number, module in enumerate(modules):
        files.append(str(tmp_path / f"client-{number}.pt"))
        torch.save(module.state_dict(), files[-1])
    options = [*arguments("resnet B"), "--set", "match_threshold=1", "--max-growth", "none"]
    assert run(["match", *files, *options, "-o", str(tmp_path / "g.pt"), "-q"]) == 0
    merged = model.build().eval()
    state = torch.load(tmp_path / "g.pt", weights_only=True)
    resize_module(merged, {name: tuple(tensor.shape) for name, tensor in state.items()})
    merged.load_state_dict(state)
    mean = torch.stack([outputs(module, model) for module in modules]).mean(0)
    assert torch.allclose(outputs(merged, model), mean, rtol=0, atol=TIGHT)


@pytest.mark.slow
def test_an_exported_program_agrees_with_the_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ZOO["resnet B"]
    files = copies(generic(model, seed=1), model, tmp_path, 2)
    merged, exported = str(tmp_path / "g.pt"), str(tmp_path / "g.pt2")
    assert run(["match", *files, *arguments("resnet B"), "-o", merged, "-q"]) == 0
    assert run(["export", merged, *arguments("resnet B"), "-o", exported]) == 0
    printed = capsys.readouterr().out
    assert "differ by" in printed
    assert "batches of any size" in printed
    program = torch.export.load(exported).module()
    module = model.build().eval()
    module.load_state_dict(torch.load(merged, weights_only=True))
    (images,) = model.inputs()
    for batch in (images[:1], images, torch.cat([images] * 3)):
        with torch.no_grad():
            assert torch.allclose(program(batch), module(batch), atol=TIGHT)
    assert run(["export", merged, *arguments("resnet B"), "-o", exported]) == 2  # exists


FIXED_BATCH = """
import torch
from torch import nn

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).relu().view(2, 6))
"""


def test_a_model_of_one_batch_size_is_exported_for_that_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(FIXED_BATCH)
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        first, second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        state = torch.nn.ModuleDict({"first": first, "second": second}).state_dict()
        files.append(str(tmp_path / f"{seed}.pt"))
        torch.save(state, files[-1])
    code = ["--model", f"{tmp_path / 'net.py'}:Fixed", "--input-shape", "2,4"]
    merged, exported = str(tmp_path / "g.pt"), str(tmp_path / "g.pt2")
    assert run(["match", *files, *code, "--max-growth", "1", "-o", merged, "-q"]) == 0
    capsys.readouterr()
    assert run(["export", merged, *code, "-o", exported, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["any_batch"] is False
    program = torch.export.load(exported).module()
    assert program(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("name", ["resnet B", "lstm, 2 layers", "vit"])
@pytest.mark.slow
def test_an_exported_program_or_torchscript_carries_its_own_graph(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ZOO[name]
    module = generic(model, seed=1)
    files = copies(module, model, tmp_path, 2)
    shape = arguments(name)[4:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript, and dislikes LSTMs
        torch.export.save(torch.export.export(module, model.inputs()), tmp_path / "net.pt2")
        torch.jit.save(torch.jit.trace(module, model.inputs()), str(tmp_path / "net.ts"))  # type: ignore[no-untyped-call]
    written = []
    for graph in ("net.pt2", "net.ts"):
        output = tmp_path / f"{graph}.pt"
        command = ["match", *files, "--model", str(tmp_path / graph), *shape, "-o", str(output)]
        assert run([*command, "--max-growth", "1", "--json"]) == 0
        written.append(torch.load(output, weights_only=True))
        assert len(json.loads(capsys.readouterr().out)["groups"]) == model.groups
    merged = model.build().eval()
    for state in written:
        merged.load_state_dict(state)
        assert torch.allclose(outputs(merged, model), outputs(module, model), atol=TIGHT)


def test_a_carried_state_is_paired_by_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    file = tmp_path / "carried.py"
    file.write_text(CARRIED)
    code = ["--model", f"{file}:Carried"]
    namespace: dict[str, type[nn.Module]] = {}
    exec(CARRIED, namespace)
    torch.save(namespace["Carried"]().state_dict(), tmp_path / "a.pt")
    client = str(tmp_path / "a.pt")
    assert run(["plan", client, *code]) == 0
    assert "--set state" in capsys.readouterr().err  # nothing is free: the state is an output
    assert run(["plan", client, *code, "--set", "state=1:1"]) == 0
    assert "1 group\n" in capsys.readouterr().out
    explicit = ["--input-shape", "2,4,5", "--input-shape", "1,2,6", "--set", "state=1:1"]
    assert run(["plan", client, *code, *explicit]) == 0
    assert "1 group\n" in capsys.readouterr().out


CARRIED = """
import torch
from torch import nn

class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, state=None):
        steps, state = self.gru(x, state)
        return self.fc(steps), state
"""


@pytest.mark.parametrize(
    ("option", "value", "code", "says"),
    [
        ("--model", "nowhere.py:build", 3, "nowhere.py"),
        ("--model", f"{__name__}:nothing", 3, "nothing"),
        ("--model-arg", "name", 2, "NAME=VALUE"),
        ("--input-shape", "3,x", 2, "--input-shape"),
        ("--input-shape", "2,99", 3, ""),
        ("--set", "state=1", 2, "ARGUMENT:OUTPUT"),
    ],
)
def test_what_can_not_be_built_or_run_is_refused(
    option: str,
    value: str,
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = copies(generic(ZOO["mlp"], seed=1), ZOO["mlp"], tmp_path, 2)
    given = dict(zip(*[iter(arguments("mlp"))] * 2, strict=True)) | {option: value}
    words = [word for pair in given.items() for word in pair]
    assert run(["match", *files, *words, "-o", str(tmp_path / "g.pt")]) == code
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "g.pt").exists()


def test_a_real_process_merges_with_model_code(tmp_path: Path) -> None:
    model = ZOO["mlp"]
    files = copies(generic(model, seed=1), model, tmp_path, 2)
    words = ["match", *files, *arguments("mlp"), "-o", str(tmp_path / "g.pt"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fedmerge", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["growth"] == 1
    merged = model.build().eval()
    merged.load_state_dict(torch.load(tmp_path / "g.pt", weights_only=True))
    assert torch.allclose(
        outputs(merged, model), outputs(generic(model, seed=1), model), atol=TIGHT
    )


def test_code_that_exits_is_refused_and_does_not_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = copies(generic(ZOO["mlp"], seed=1), ZOO["mlp"], tmp_path, 2)
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    command = ["match", *files, "--model", f"{tmp_path / 'script.py'}:build"]
    assert run([*command, "-o", str(tmp_path / "g.pt")]) == 3
    assert "__main__" in capsys.readouterr().err


def test_what_the_model_prints_does_not_reach_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = copies(generic(ZOO["mlp"], seed=1), ZOO["mlp"], tmp_path, 2)
    (tmp_path / "loud.py").write_text(LOUD)
    command = ["match", *files, "--model", f"{tmp_path / 'loud.py'}:build", "--dtype", "float16"]
    assert run([*command, "-o", str(tmp_path / "g.pt"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["growth"] == 1
    assert "building" in printed.err
    model = ["--model", f"{tmp_path / 'loud.py'}:build"]
    assert run(["verify", str(tmp_path / "g.pt"), *files, *model]) == 0  # in the clients' precision


def test_a_plan_that_the_model_contradicts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = copies(generic(ZOO["mlp"], seed=1), ZOO["mlp"], tmp_path, 2)
    assert run(["plan", files[0], *arguments("mlp"), "-o", str(tmp_path / "plan.json")]) == 0
    text = (tmp_path / "plan.json").read_text()
    plan = json.loads(text)
    plan["tensors"]["2.weight"][1] = "another"
    (tmp_path / "wrong.json").write_text(json.dumps(plan))
    for name, code in (("plan", 0), ("wrong", 3)):
        words = [*arguments("mlp"), "--plan", str(tmp_path / f"{name}.json")]
        assert run(["match", *files, *words, "-o", str(tmp_path / f"{name}.pt")]) == code
    assert "does not fit the model" in capsys.readouterr().err


LOUD = """
from torch import nn

def build():
    print("building")
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
"""


BRANCHES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(self.choose(h, x))

    def choose(self, h, x):
        return h

class Numbered(Net):
    def choose(self, h, x):
        return h * torch.arange(6) if x.sum() > 1e3 else h

class Broken(Net):
    def choose(self, h, x):
        return h @ torch.ones(7, 7) if x.sum() > 1e3 else h
"""


def test_a_branch_by_data_is_planned_on_both_sides_or_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(BRANCHES)
    parts = nn.ModuleDict({"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)})
    torch.save(parts.state_dict(), tmp_path / "a.pt")
    line = next(k for k, text in enumerate(BRANCHES.splitlines(), 1) if "torch.ones" in text)
    groups = {}
    for name, code in (("Net", 0), ("Numbered", 0), ("Broken", 3)):
        factory = ["--model", f"{tmp_path / 'net.py'}:{name}"]
        assert run(["plan", str(tmp_path / "a.pt"), *factory, "--json"]) == code
        printed = capsys.readouterr()
        groups[name] = json.loads(printed.out).get("groups")
    assert [len(groups[name]) for name in ("Net", "Numbered")] == [1, 0]
    assert f"decides by its data or weights ({tmp_path / 'net.py'}:{line})" in printed.err
    assert "--plan" in printed.err
