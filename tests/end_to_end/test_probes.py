"""One-shot merges that run the clients on probe inputs, through the command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.values import percent
from tests import digits
from tests.end_to_end.helpers import Cli, Outcome, load, record_of, save

MODEL = ("--model", digits.MODEL, "--input-shape", "2,1,8,8")
FEW = ("--set", "probe=noise", "--set", "probe_count=60")


@pytest.fixture
def clients(tmp_path: Path) -> list[Path]:
    """Three clients on digits as c1.pt, c2.pt, c3.pt."""
    return digits.save_clients(tmp_path)


def real_inputs(folder: Path, count: int = 100) -> Path:
    """Write images as bytes, without labels."""
    pixels = (255 * digits.images()[0][:count]).astype(np.uint8)
    np.savez(folder / "inputs.npz", x=pixels)
    return folder / "inputs.npz"


def quality_lines(outcome: Outcome) -> list[str]:
    return [line for line in outcome.out.splitlines() if "ensemble does" in line]


def test_the_quality_is_in_the_json_the_text_and_the_record(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.pt"
    found = cli.done("match", *clients, *MODEL, *FEW, "-o", output, "--json").json["quality"]
    assert found["probes"] == "noise"
    assert found["samples"] == 4 * 12
    assert set(found["clients"]) == {"c1", "c2", "c3"}
    assert found["agreement"] == found["candidates"][found["chosen"]]
    assert all(0 <= own["decisions"] <= 1 for own in found["candidates"].values())
    record = record_of(output)
    assert record["quality"] == found
    assert record["probes"]["source"] == "noise"
    assert record["probes"]["count"] == 60
    text = cli.done("match", *clients, *MODEL, *FEW, "-o", output, "--force")
    (line,) = quality_lines(text)
    assert f"{percent(found['agreement']['decisions'])} of 48 held-out probes (noise)" in line
    assert all(
        f"{percent(own['decisions'])} ({name})" in line for name, own in found["clients"].items()
    )
    assert f"chosen of {len(found['candidates'])}: {found['chosen']}" in text.out


def test_without_the_models_code_the_quality_is_unknown(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    outcome = cli.done("match", *clients, "-o", tmp_path / "out.pt")
    assert "quality: unknown without data" in outcome.out
    assert quality_lines(outcome) == []
    again = cli.done("match", *clients, "-o", tmp_path / "b.pt", "--json").json
    assert again["quality"] is None


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (("--set", "merge_units=mean"), {"merge_units": "mean"}),
        (("--set", "merge_units=fit"), {"merge_units": "fit"}),
        (("--set", "lead=c2"), {"lead": "c2"}),
        (
            ("--set", "lead=none", "--set", "merge_units=mean"),
            {"lead": "none", "merge_units": "mean"},
        ),
        (
            (
                "--set",
                "drop_outliers=true",
            ),
            {"drop_outliers": True},
        ),
        (("--set", "max_params=1500"), {"max_params": None}),
        (("--set", "probe_mean=0.3", "--set", "probe_std=0.4"), {}),
    ],
)
def test_every_option_is_obeyed_and_recorded(
    given: tuple[str, ...],
    recorded: dict[str, object],
    cli: Cli,
    clients: list[Path],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.pt"
    found = cli.done("match", *clients, *MODEL, *FEW, *given, "-o", output, "--json").json
    record = record_of(output)
    assert record["options"].items() >= recorded.items()
    candidates = found["quality"]["candidates"]
    if "merge_units" in recorded:
        assert all(name.endswith(str(recorded["merge_units"])) for name in candidates)
        assert bool(record["fitted"]) == (recorded["merge_units"] == "fit")
    if "lead" in recorded:
        label = "equal clients" if recorded["lead"] == "none" else f"{recorded['lead']} leads"
        assert all(name.startswith(label) for name in candidates)
    if "max_params=" in str(given):
        assert 1210 <= found["parameters"] <= 1500
    if "probe_mean=" in str(given):
        assert (record["probes"]["mean"], record["probes"]["std"]) == ([0.3], [0.4])
    assert cli.done("verify", output, *clients, "--json").json["ok"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--set", "probe=pixels"), "--set probe is 'pixels', expected noise, synthetic or none"),
        (("--set", "probe=noise", "--probe-data", "x.npz"), "exclude each other"),
        (
            ("--set", "probe_count=3"),
            "--set probe_count is 3, expected a whole number from 10 to 100,000",
        ),
        (("--set", "probe_std=0"), "--set probe_std is (0.0,), expected finite numbers above 0"),
        (("--set", "probe_mean=nan"), "--set probe_mean is (nan,), expected finite numbers"),
        (("--set", "probe_std=inf"), "--set probe_std is (inf,), expected finite numbers"),
        (("--probe-data", "x.npz", "--set", "probe_std=2"), "are for noise, not for --probe-data"),
        (("--set", "probe_mean=a"), "--set probe_mean is 'a', expected numbers"),
        (("--set", "probe_mean=1,2,3"), "--set probe_mean has 3 numbers"),
        (
            ("--set", "probe=none", "--set", "probe_count=50"),
            "--set probe=none takes no other options",
        ),
        (
            ("--set", "probe=none", "--set", "merge_units=fit"),
            "--set merge_units: the clients are not run",
        ),
        (
            ("--method", "average", "--set", "drop_outliers=true"),
            "--set drop_outliers=true: the clients are not run",
        ),
        (("--set", "preset=paper", *FEW), "the clients are not run"),
        (("--set", "normalize=0.5,0.5"), "are for --probe-data"),
        (
            ("--set", "preset=paper", "--set", "lead=c2"),
            "--set lead=c2 and --set preset=paper exclude each other",
        ),
        (("--set", "merge_units=sum"), "--set merge_units is 'sum'"),
        (("--set", "lead=d"), "--set lead names 'd', which is no client"),
        (
            ("--set", "max_params=10"),
            "--set max_params is 10, but a net as wide as the widest client",
        ),
        (("--set", "max_params=2000", "--max-growth", "2"), "exclude each other"),
        (("--method", "ensemble", "--max-growth", "2"), "--method ensemble merges nothing"),
    ],
)
def test_misuse_is_refused(
    given: tuple[str, ...], says: str, cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.pt"
    cli.refused("match", *clients, *MODEL, *given, "-o", output, code=2, says=[says])
    assert not output.exists()


@pytest.mark.parametrize(
    "given",
    [
        FEW,
        ("--set", "probe_count=50"),
        ("--set", "probe_mean=0.5"),
        ("--set", "probe_std=2"),
        ("--probe-data", "x.npz"),
        ("--set", "merge_units=fit"),
    ],
)
def test_probes_need_a_model_that_can_be_run(
    given: tuple[str, ...], cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    name = " ".join(given[:2]).partition("=")[0] if given[0] == "--set" else given[0]
    says = [f"{name}: the clients have to be run for it", "--model, or a .pt2 file"]
    cli.refused("match", *clients, *given, "-o", tmp_path / "out.pt", code=2, says=says)


def test_no_probes_is_the_merge_of_weights_alone(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    cli.done("match", *clients, "-o", one)
    found = cli.done("match", *clients, *MODEL, "--set", "probe=none", "-o", two, "--json").json
    assert found["quality"] is None
    assert all(torch.equal(tensor, load(two)[name]) for name, tensor in load(one).items())


def test_real_inputs_are_bytes_normalised_as_in_training(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    data, output = real_inputs(tmp_path), tmp_path / "out.pt"
    arguments = ["match", *clients, *MODEL, "--probe-data", data, "-o", output, "--force", "--json"]
    found = cli.done(*arguments, "--set", "normalize=0,1").json["quality"]
    assert found["probes"] == "data"
    assert found["samples"] == 4 * 20
    other = cli.done(*arguments, "--set", "normalize=0.5,0.1").json["quality"]
    assert found["clients"] != other["clients"]
    assert record_of(output)["probes"]["data"] == "inputs.npz"


@pytest.mark.parametrize(
    ("array", "code", "says"),
    [
        (
            np.zeros((50, 1, 9, 9), np.float32),
            3,
            "the model does not run on inputs of shape (40, 1, 9, 9): RuntimeError: mat1",
        ),
        (np.zeros((4, 1, 8, 8), np.float32), 2, "has 4 inputs, expected at least 10"),
        (np.full((50, 1, 8, 8), np.nan, np.float32), 1, "NaN or infinite"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    array: np.ndarray, code: int, says: str, cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", x=array)
    given = (*MODEL, "--probe-data", tmp_path / "x.npz", "-o", tmp_path / "out.pt")
    cli.refused("match", *clients, *given, code=code, says=[says])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_same_command_gives_the_same_bytes(
    suffix: str, cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    written = []
    for number in range(2):
        output = tmp_path / f"{number}" / f"out{suffix}"
        output.parent.mkdir()
        cli.done("match", *clients, *MODEL, "--set", "probe_count=40", "-o", output)
        written.append({path.name: path.read_bytes() for path in output.parent.iterdir()})
    assert written[0] == written[1]
    output = tmp_path / f"other{suffix}"
    cli.done("match", *clients, *MODEL, "--set", "probe_count=40", "--seed", "1", "-o", output)
    assert output.read_bytes() != written[0][f"out{suffix}"]


def test_a_client_that_is_odd_is_reported_and_left_out_if_asked_to(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    data, output = real_inputs(tmp_path), tmp_path / "out.pt"
    spoilt = {name: 1e25 * tensor for name, tensor in digits.client(4).items()}
    odd = save(spoilt, tmp_path / "odd.pt")
    given = ["match", *clients, odd, *MODEL, "--probe-data", data, "--set", "normalize=0,1"]
    outcome = cli.done(*given, "-o", output, "--json")
    assert outcome.json["quality"]["outliers"] == ["odd"]
    assert "client odd answers unlike the others" in outcome.err
    rest = cli.done(*given, "--set", "drop_outliers=true", "-o", output, "--force", "--json")
    assert rest.json["quality"]["outliers"] == []
    assert rest.json["quality"]["dropped"] == ["odd"]
    assert rest.json["clients"] == ["c1", "c2", "c3"]
    assert "client odd was left out" in rest.err
    record = record_of(output)
    assert record["quality"]["dropped"] == ["odd"]
    assert [source["name"] for source in record["sources"]] == ["c1", "c2", "c3"]
    told = cli.done(*given, "--set", "drop_outliers=true", "-o", output, "--force").out
    *_, command = told.splitlines()
    assert shlex.split(command)[:2] == ["fedmerge", "verify"]
    assert cli.done(*shlex.split(command)[1:], "--json").json["ok"]
    assert str(odd) not in told


def test_a_merge_that_is_predicted_worse_than_a_client_is_warned_of(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    units = ("--max-growth", "1", "--set", "merge_units=mean", "--set", "lead=c2")
    weak = (*units, "--set", "client_weight=c1=30")  # c1's last layer on c2's units
    outcome = cli.done("match", *clients, *MODEL, *FEW, *weak, "-o", tmp_path / "a.pt", "--json")
    found = outcome.json["quality"]
    assert found["agreement"]["decisions"] < 0.9 < found["clients"]["c1"]["decisions"]
    assert "the merge is predicted to be worse than client c1" in outcome.err
    apart = ("--set", "match_threshold=1", "--max-growth", "none", "--set", "lead=none")
    good = cli.done("match", *clients, *MODEL, *FEW, *apart, "-o", tmp_path / "b.pt", "--json")
    assert good.json["quality"]["agreement"]["decisions"] == 1
    assert "predicted to be worse" not in good.err


def test_verify_says_which_tensors_it_can_not_recompute(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    fitted, mean = tmp_path / "fitted.pt", tmp_path / "mean.pt"
    cli.done("match", *clients, *MODEL, *FEW, "--set", "merge_units=fit", "-o", fitted)
    cli.done("match", *clients, *MODEL, *FEW, "--set", "merge_units=mean", "-o", mean)
    text = cli.done("verify", fitted, *clients).out
    assert "recomputed from its 3 clients: equal" not in text  # all of its tensors are fitted
    assert "not recomputed: 4 tensors that depend on more than the assignments" in text
    assert "rounds" not in text
    assert "not recomputed" not in cli.done("verify", mean, *clients).out
    assert cli.done("verify", fitted, *clients, "--json").json["fitted"] == 4
    state = load(fitted)
    state["1.weight"][0, 0] += 1
    torch.save(state, fitted)
    assert cli("verify", fitted, *clients).code == 1  # what was fitted is hashed all the same


def test_an_ensemble_is_every_client_side_by_side(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.pt"
    found = cli.done("match", *clients, "--method", "ensemble", "-o", output, "--json").json
    assert found["groups"][0]["width"] == 48
    assert found["groups"][0]["match_rate"] == 0
    expected = torch.stack([digits.logits(digits.client(k)) for k in (1, 2, 3)]).mean(0)
    assert torch.allclose(digits.logits(load(output)), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(digits.logits(digits.client(1)), expected, rtol=0, atol=0.5)
    assert record_of(output)["options"]["method"] == "ensemble"
    assert cli.done("verify", output, *clients, "--json").json["recomputed"] == 3


def loaded(state: dict[str, Tensor]) -> nn.Module:
    model = digits.build().eval()
    model.load_state_dict(state)
    return model


def test_exported_programs_are_run_without_any_code(cli: Cli, tmp_path: Path) -> None:
    files = []
    for number in (1, 2):
        sample = (torch.zeros(2, 1, 8, 8),)
        batch = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(
            loaded(digits.client(number)), sample, dynamic_shapes=batch, strict=False
        )
        files.append(tmp_path / f"c{number}.pt2")
        torch.export.save(program, files[-1])
    output = tmp_path / "out.pt"
    outcome = cli.done("match", *files, *FEW, "-o", output, "--json")
    assert outcome.json["quality"]["samples"] == 4 * 12
    assert "weights alone" not in outcome.err
    assert cli.done("verify", output, *files, "--json").json["ok"]


def test_a_program_runs_the_others_even_if_its_own_client_is_left_out(
    cli: Cli, clients: list[Path], tmp_path: Path
) -> None:
    spoilt = loaded({name: 1e25 * tensor for name, tensor in digits.client(4).items()})
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(spoilt, (torch.rand(4, 1, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "odd.pt2")
    given = ["match", tmp_path / "odd.pt2", *clients, *FEW, "-o", tmp_path / "out.pt"]
    found = cli.done(*given, "--set", "drop_outliers=true", "--json").json
    assert found["quality"]["dropped"] == ["odd"]
    assert found["clients"] == ["c1", "c2", "c3"]
    assert cli.done("verify", tmp_path / "out.pt", *clients, "--json").json["ok"]


def test_a_scripted_model_is_run_and_fitted(cli: Cli, clients: list[Path], tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.save(torch.jit.script(loaded(digits.client(1))), tmp_path / "model.ts")
    units = ("--set", "merge_units=fit", "--max-growth", "1", *FEW)
    given = ("--model", tmp_path / "model.ts", "--input-shape", "2,1,8,8", *units)
    output = tmp_path / "out.pt"
    cli.done("match", *clients, *given, "-o", output)
    assert record_of(output)["fitted"] == ["1.bias", "1.weight", "3.bias", "3.weight"]
    code = tmp_path / "code.pt"
    cli.done("match", *clients, *MODEL, *units, "-o", code)
    same = (torch.allclose(t, load(code)[n], rtol=0, atol=1e-4) for n, t in load(output).items())
    assert all(same)
