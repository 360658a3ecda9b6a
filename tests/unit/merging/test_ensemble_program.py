"""An ensemble as a program is the mean of its clients, at their cost, for anybody to run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.errors import ArchitectureError, UsageError
from tests.model_zoo import ZOO as BY_CODE
from tests.unit.checkpoint.archives import save_exported
from tests.zoo import ZOO

EXACT = 1e-5  # float32 outputs of the order of 1, summed in another order
NETS = (
    *("residual mlp", "mlp with norms", "resnet A", "lstm", "gru, both directions"),
    *("vit", "language model", "tied language model", "u-net"),
)


def clients_of(build: Callable[[], nn.Module], count: int = 3) -> list[nn.Module]:
    """Return nets that began apart and whose norms have seen something."""
    nets = []
    for seed in range(count):
        torch.manual_seed(seed)
        net = build().eval()
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand_like(buffer))
        nets.append(net)
    return nets


def written(path: Path, nets: list[nn.Module], **options: Any) -> fedmerge.Merge:
    return match(nets, method="ensemble", output=path, **options)


def loaded(path: Path) -> nn.Module:
    return torch.export.load(path).module()


def code_of(build: Callable[[], nn.Module], *inputs: Tensor) -> ModelCode:
    """Return the code with the shapes and types of these inputs."""
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in inputs)
    return ModelCode(build, input_shapes=tuple(x.shape for x in inputs), input_dtypes=dtypes)


@pytest.mark.parametrize("name", NETS)
def test_its_outputs_are_the_mean_of_the_clients(name: str, tmp_path: Path) -> None:
    entry = BY_CODE[name]
    nets = clients_of(entry.build)
    merge = written(tmp_path / "e.pt2", nets, model=code_of(entry.build, *entry.inputs()))
    with torch.no_grad():
        each = torch.stack([net(*entry.inputs()) for net in nets])
        found = loaded(tmp_path / "e.pt2")(*entry.inputs())
    assert torch.allclose(found, each.mean(0), rtol=0, atol=EXACT)
    assert not torch.allclose(found, each[0], rtol=0, atol=10 * EXACT)
    assert merge.growth == pytest.approx(3)
    program = torch.export.load(tmp_path / "e.pt2")
    distinct = {t.data_ptr(): t for t in program.state_dict.values() if t.is_floating_point()}
    assert sum(t.numel() for t in distinct.values()) == merge.parameters
    assert fedmerge.verify(tmp_path / "e.pt2").ok


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))


@pytest.fixture
def nets() -> list[nn.Module]:
    return clients_of(mlp)


@pytest.fixture
def files(nets: list[nn.Module], tmp_path: Path) -> list[Path]:
    for number, net in enumerate(nets):
        torch.save(net.state_dict(), tmp_path / f"c{number}.pt")
    return [tmp_path / f"c{number}.pt" for number in range(len(nets))]


def test_it_runs_without_fedmerge_on_batches_of_any_size(
    nets: list[nn.Module], tmp_path: Path
) -> None:
    written(tmp_path / "e.pt2", nets)
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch; program = torch.export.load('e.pt2').module(); "
        "torch.save(program(torch.load('x.pt')).detach(), 'y.pt'); "
        "assert not any(name.startswith('fedmerge') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={})
    with torch.no_grad():
        expected = torch.stack([net(x) for net in nets]).mean(0)
    assert torch.allclose(torch.load(tmp_path / "y.pt"), expected, atol=EXACT)


def test_clients_count_by_their_weights(nets: list[nn.Module], tmp_path: Path) -> None:
    sizes = {"client-1": 1.0, "client-2": 3.0, "client-3": 2.0}
    written(tmp_path / "e.pt2", nets, client_weight=sizes)
    x = torch.randn(5, 6)
    with torch.no_grad():
        outputs = [net(x) for net in nets]
        found = loaded(tmp_path / "e.pt2")(x)
    assert torch.allclose(found, (outputs[0] + 3 * outputs[1] + 2 * outputs[2]) / 6, atol=EXACT)
    assert not torch.allclose(found, sum(outputs[1:], outputs[0]) / 3, atol=10 * EXACT)


def test_clients_count_by_the_classes_that_they_saw(nets: list[nn.Module], tmp_path: Path) -> None:
    counts = {"client-1": [1, 0, 2], "client-2": [1, 0, 2], "client-3": [2, 0, 0]}
    merge = written(tmp_path / "e.pt2", nets, class_counts=counts)
    shares = merge.session.averaging.class_weights
    assert shares is not None
    x = torch.randn(5, 6)
    with torch.no_grad():
        outputs = torch.stack([net(x) for net in nets])
        found = loaded(tmp_path / "e.pt2")(x)
    weights = torch.from_numpy(np.asarray(shares)).float()
    alike = torch.full_like(weights, 1 / 3)
    weights = torch.where(weights.sum(0) > 0, weights, alike)
    expected = (weights[:, None] * outputs).sum(0) / weights.sum(0)
    assert torch.allclose(found, expected, atol=EXACT)
    assert not torch.allclose(found, outputs.mean(0), atol=10 * EXACT)


def test_the_same_clients_give_the_same_bytes_without_paths(
    files: list[Path], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        match(files, method="ensemble", model=mlp, output=tmp_path / name / "e.pt2")
    one, two = (tmp_path / name / "e.pt2" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert b"test_ensemble_program.py" not in one.read_bytes()
    records = [path.with_name("e.pt2.json").read_text() for path in (one, two)]
    assert records[0] == records[1]


def test_exported_clients_need_no_code(nets: list[nn.Module], tmp_path: Path) -> None:
    x = torch.randn(2, 6)
    paths = [save_exported(net, tmp_path / f"{k}.pt2", x) for k, net in enumerate(nets)]
    merge = match(paths, method="ensemble", output=tmp_path / "e.pt2")
    assert merge.warnings[-1].startswith("the program runs on batches of 2 samples only")
    with torch.no_grad():
        expected = torch.stack([net(x) for net in nets]).mean(0)
        assert torch.allclose(loaded(tmp_path / "e.pt2")(x), expected, atol=EXACT)
    assert fedmerge.verify(tmp_path / "e.pt2", paths).recomputed == 3


def test_verify_compares_tensors_weights_and_outputs(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "e.pt2"
    match(files, method="ensemble", model=mlp, output=path)
    found = fedmerge.verify(path, files, model=mlp)
    assert (found.ok, found.recomputed, found.tensors) == (True, 3, 27)
    other = tmp_path / "other"
    other.mkdir()
    weights = {"c0": 5.0, "c1": 1.0, "c2": 1.0}
    match(files, method="ensemble", model=mlp, output=other / "e.pt2", client_weight=weights)
    assert fedmerge.verify(other / "e.pt2", files, model=mlp).ok
    shutil.copy(other / "e.pt2", path)  # with the record of equal weights
    (told,) = fedmerge.verify(path, files).differences
    assert told == "the members' weights are not those of the recorded options"


def test_verify_tells_of_another_client(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "e.pt2"
    match(files, method="ensemble", model=mlp, output=path)
    record = json.loads((tmp_path / "e.pt2.json").read_text())
    first, *others = record["sources"]
    record["sources"] = [{**others[0], "name": first["name"]}, {**first, "name": "c1"}, others[1]]
    (tmp_path / "e.pt2.json").write_text(json.dumps(record))
    differences = fedmerge.verify(path, files).differences
    assert "tensor 'members.0.0.weight' is not c0's '0.weight'" in differences


def test_a_member_less_is_no_ensemble_of_the_record(files: list[Path], tmp_path: Path) -> None:
    match(files, method="ensemble", model=mlp, output=tmp_path / "e.pt2")
    match(files[:2], method="ensemble", model=mlp, output=tmp_path / "two.pt2")
    shutil.copy(tmp_path / "two.pt2", tmp_path / "e.pt2")
    found = fedmerge.verify(tmp_path / "e.pt2", files)
    assert "tensor 'members.2.0.weight' of the record is not in the file" in found.differences


def test_it_is_evaluated_as_the_ensemble(files: list[Path], tmp_path: Path) -> None:
    match(files, method="ensemble", model=mlp, output=tmp_path / "e.pt2")
    match(files, method="ensemble", output=tmp_path / "dense.pt")
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40))
    rows = fedmerge.compare(
        files, data, model=mlp, merged=[tmp_path / "e.pt2", tmp_path / "dense.pt"], is_matched=False
    ).rows
    by_kind = {row.kind: row for row in rows if row.kind != "global"}
    program, dense = (row for row in rows if row.kind == "global")
    ensemble = by_kind["ensemble"]
    assert ensemble.evaluation is not None
    for row in (program, dense):
        assert row.evaluation is not None
        assert row.evaluation.loss == pytest.approx(ensemble.evaluation.loss, abs=EXACT)
    assert program.parameters == ensemble.parameters == 3 * (by_kind["client"].parameters or 0)
    assert by_kind["client"].evaluation != ensemble.evaluation
    (score,) = fedmerge.evaluate([tmp_path / "e.pt2"], data, model=mlp)
    assert score.evaluation.loss == pytest.approx(ensemble.evaluation.loss, abs=EXACT)


class Fixed(nn.Module):
    """Runs on two samples at a time only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fc(x).relu().reshape(2, 5))
        return out


def test_a_program_of_one_batch_size_is_said_to_be_one(tmp_path: Path) -> None:
    merge = written(tmp_path / "e.pt2", clients_of(Fixed, 2))
    assert merge.warnings[-1] == "the program runs on batches of 2 samples only"
    record = json.loads((tmp_path / "e.pt2.json").read_text())
    assert record["warnings"] == list(merge.warnings)


class Two(nn.Module):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.fc(x).relu()
        return self.head(hidden), self.head(hidden * 2)


def test_outputs_that_have_no_mean_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="returns 2 tensors") as caught:
        written(tmp_path / "e.pt2", clients_of(Two, 2))
    assert "end in .pt" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_files_alone_and_other_methods_give_no_program(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="files alone can't be run") as caught:
        match(files, method="ensemble", output=tmp_path / "e.pt2")
    assert "`model`" in caught.value.hint
    with pytest.raises(UsageError, match="only an ensemble"):
        match(files, model=mlp, output=tmp_path / "e.pt2")
    with pytest.raises(UsageError, match="`dtype`"):
        match(files, model=mlp, method="ensemble", dtype="float16", output=tmp_path / "e.pt2")
    assert sorted(tmp_path.iterdir()) == files


def test_what_exists_is_overwritten_only_with_force(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "e.pt2"
    match(files, method="ensemble", model=mlp, output=path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        match(files, method="ensemble", model=mlp, output=path)
    match(files[:2], method="ensemble", model=mlp, output=path, force=True)
    assert path.read_bytes() != before
    assert fedmerge.verify(path, files[:2]).ok


def test_an_ensembles_program_has_no_units_to_report_on(files: list[Path], tmp_path: Path) -> None:
    match(files, method="ensemble", model=mlp, output=tmp_path / "e.pt2")
    with pytest.raises(ArchitectureError, match="in which no units are merged"):
        fedmerge.write_report(tmp_path / "e.pt2", tmp_path / "page.html")
    with pytest.raises(UsageError, match="`report` is about one net"):
        match(
            files,
            method="ensemble",
            model=mlp,
            output=tmp_path / "f.pt2",
            report=tmp_path / "p.html",
        )


@pytest.mark.parametrize("name", ["lenet", "char-lstm, tied"])
def test_double_precision_stays(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    nets = [entry.fresh(seed) for seed in range(2)]
    model = code_of(lambda: entry.build().double(), entry.inputs())
    written(tmp_path / "e.pt2", nets, model=model)
    with torch.no_grad():
        expected = (nets[0](entry.inputs()) + nets[1](entry.inputs())) / 2
        found = loaded(tmp_path / "e.pt2")(entry.inputs())
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
