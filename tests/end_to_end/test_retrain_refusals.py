"""What can't work is refused before the first round, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmerge.federated import STATE_FILE
from tests.end_to_end.helpers import Cli, listing, record_of
from tests.end_to_end.retraining import Scene, make_scene

TASK = """
from torch.nn import functional


class Own:
    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        raise KeyError("no such metric")
"""


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_scene(tmp_path)


def refused_at_once(scene: Scene, cli: Cli, *more: object, code: int, says: list[str]) -> None:
    """Run a command that must be refused with nothing trained and nothing written."""
    before = listing(scene.folder)
    outcome = cli.refused(*scene.command("g.pt", *more, clients=[]), code=code, says=says)
    assert "round 1" not in outcome.err
    after = listing(scene.folder)
    assert {n: b for n, b in after.items() if "__pycache__" not in n} == before


def rewrite(path: Path, **columns: np.ndarray) -> None:
    """Replace some columns of a shard."""
    with np.load(path) as shard:
        np.savez(path, **{**shard, **columns})


def test_evaluation_data_that_do_not_fit_the_model_are_refused(scene: Scene, cli: Cli) -> None:
    rewrite(scene.data, x=np.zeros((30, 7), np.float32))
    says = ["test.npz: the model fails on samples of shape", "hint: samples reach the model"]
    refused_at_once(scene, cli, "--data", scene.data, code=1, says=says)
    rewrite(scene.data, x=np.zeros((30, 4), np.float32), y=np.arange(30) % 4)
    says = ["test.npz: y has the class 3, but the model has 3 outputs"]
    refused_at_once(scene, cli, "--data", scene.data, code=1, says=says)


def test_a_task_that_fails_is_named_before_any_training(scene: Scene, cli: Cli) -> None:
    (scene.folder / "task.py").write_text(TASK)
    task = ("--task", f"{scene.folder / 'task.py'}:Own")
    says = ["test.npz: the task fails: KeyError: 'no such metric'"]
    refused_at_once(scene, cli, *task, "--data", scene.data, code=1, says=says)
    cli.done(*scene.command("g.pt", *task, clients=[]))  # nothing is measured without data


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"y": np.full(30, 9)}, "b.npz: y has the class 9, but the model has 3 outputs"),
        ({"y": np.zeros((30, 4), int)}, "language-model: (n, steps, tokens) for y (n, steps)"),
        ({"y": np.zeros(30, np.float32)}, "b.npz: y holds float32, expected class numbers"),
        ({"x": np.zeros((30, 5), np.float32)}, "b.npz: the model fails on samples of shape (4, 5)"),
    ],
)
def test_a_shard_that_does_not_fit_the_model_is_refused(
    columns: dict[str, np.ndarray], says: str, scene: Scene, cli: Cli
) -> None:
    rewrite(scene.folder / "shards" / "b.npz", **columns)
    refused_at_once(scene, cli, code=1, says=[says])


def test_a_class_that_comes_late_in_a_shard_is_found(scene: Scene, cli: Cli) -> None:
    late = np.zeros(30, int)
    late[20] = 3
    rewrite(scene.folder / "shards" / "c.npz", y=late)
    refused_at_once(scene, cli, code=1, says=["c.npz: y has the class 3"])


def test_more_clients_than_there_are_cannot_be_required(scene: Scene, cli: Cli) -> None:
    says = ["--set min_clients is 4, but there are 3 clients"]
    refused_at_once(scene, cli, "--set", "min_clients=4", code=2, says=says)
    refused_at_once(scene, cli, "--set", "min_clients=4", "--dry-run", code=2, says=says)
    cli.done(*scene.command("g.pt", "--set", "min_clients=3", clients=[]))


def test_what_all_clients_fail_at_is_one_line_and_does_not_block_the_name(
    scene: Scene, cli: Cli
) -> None:
    wrong = ("--learning-rate", 1e25, "--retries", 0)
    outcome = cli(*scene.command("g.pt", *wrong, clients=[]))
    assert outcome.code == 1
    error, hint = outcome.err.splitlines()[-2:]
    assert error.startswith("error: all 3 clients failed; a (app): ")
    assert error.count("NaN") == 1
    assert hint == "hint: lower --learning-rate, or limit the gradient with --set clip_norm"
    cli.done(*scene.command("g.pt", clients=[]))
    says = ["g.pt.work: is not empty", "--resume", f"rm -r {scene.folder / 'g.pt.work'}"]
    place = ("--work-dir", scene.folder / "g.pt.work")  # of another output
    cli.refused(*scene.command("h.pt", *place, "--force", clients=[]), code=2, says=says)


def test_force_clears_the_work_dir_of_the_same_output_and_no_other(scene: Scene, cli: Cli) -> None:
    cli.done(*scene.command("g.pt"))
    first = (scene.folder / "g.pt").read_bytes()
    again = cli.done(*scene.command("g.pt", "--force", "--seed", 1))
    assert "resumed" not in again.err
    assert (scene.folder / "g.pt").read_bytes() != first
    says = ["g.pt.work: is not empty"]
    other = scene.command("h.pt", "--force", "--work-dir", scene.folder / "g.pt.work")
    cli.refused(*other, code=2, says=says)
    (scene.folder / "g.pt.work" / "note.txt").write_text("mine")
    cli.refused(*scene.command("g.pt", "--force"), code=2, says=says)
    kept = (scene.folder / "g.pt.work" / STATE_FILE).read_bytes()
    (scene.folder / "g.pt.work" / "note.txt").unlink()
    cli.refused(*scene.command("g.pt", "--force", "--epochs", 0), code=2, says=["--epochs is 0"])
    assert (scene.folder / "g.pt.work" / STATE_FILE).read_bytes() == kept


def test_a_run_without_a_round_is_taken_over_by_resume_too(scene: Scene, cli: Cli) -> None:
    wrong = ("--learning-rate", 1e25, "--retries", 0)
    assert cli(*scene.command("g.pt", *wrong, clients=[])).code == 1
    cli.done(*scene.command("g.pt", "--resume", clients=[]))


def test_options_are_checked_before_the_work_dir(scene: Scene, cli: Cli) -> None:
    (scene.folder / "g.pt.work").mkdir()
    (scene.folder / "g.pt.work" / "note.txt").write_text("mine")
    cli.refused(*scene.command("g.pt"), code=2, says=["g.pt.work: is not empty"])
    cli.refused(*scene.command("g.pt", "--epochs", 0), code=2, says=["--epochs is 0"])
    cli.refused(*scene.command("g.pt", "--normalize", "1"), code=2, says=["--normalize is '1'"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--method", "fedavg", "--passes", 2), "--passes is for --method fedma only"),
        (("--method", "fedprox", "--max-growth", 1), "--max-growth is for --method fedma only"),
        (("--rounds", 2), "--rounds is for --method fedavg, fedprox and afl only"),
        (("--method", "fedavg", "--set", "mu=1"), "--set mu is for --method fedprox only"),
        (("--workers", 2), "--workers is for --engine processes only"),
        (
            ("--optimizer", "adam", "--set", "momentum=0.5"),
            "--set momentum is for --optimizer sgd only",
        ),
        (("--key", "net"), "--key is for checkpoints only"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused(
    more: tuple[object, ...], says: str, scene: Scene, cli: Cli
) -> None:
    refused_at_once(scene, cli, *more, code=2, says=[says])


def test_an_option_of_fresh_clients_is_refused_beside_checkpoints(scene: Scene, cli: Cli) -> None:
    says = ["--set init is for clients that start without checkpoints only"]
    cli.refused(*scene.command("g.pt", "--set", "init=shared"), code=2, says=says)
    says = ["--set probe_data is for --set init=matched only"]
    probes = ("--set", f"probe_data={scene.data}")
    cli.refused(*scene.command("g.pt", *probes), code=2, says=says)
    says = ["--set init=matched is for methods that average"]
    cli.refused(*scene.command("g.pt", "--set", "init=matched"), code=2, says=says)
    cli.done(*scene.command("g.pt", "--set", "init=shared", clients=[]))


def test_a_configuration_is_checked_and_a_record_is_not(scene: Scene, cli: Cli) -> None:
    config = scene.folder / "run.yaml"
    config.write_text("method: fedavg\npasses: 2\n")
    says = ["--passes is for --method fedma only"]
    refused_at_once(scene, cli, "--config", config, code=2, says=says)
    cli.done(*scene.command("g.pt"))
    record = ("--config", scene.folder / "g.pt.json")  # which names passes, rounds and mu
    cli.done(*scene.command("again.pt", *record))
    cli.done(*scene.command("mean.pt", *record, "--method", "fedavg", "--rounds", 2))
    assert len(record_of(scene.folder / "mean.pt")["retrain"]["rounds"]) == 2


def test_normalisation_of_floats_is_noted(scene: Scene, cli: Cli) -> None:
    note = "note: --normalize is for bytes: "
    done = cli.done(*scene.command("g.pt", "--normalize", "0.5,0.5"))
    assert f"{note}a holds float32, taken as it is" in done.err
    assert note not in cli.done(*scene.command("h.pt")).err


def test_files_merged_into_the_clients_folder_are_named(scene: Scene, cli: Cli) -> None:
    folder = scene.folder / "sites"
    folder.mkdir()
    for path in scene.clients:
        path.rename(folder / path.name)
    merged = folder / "merged.pt"
    assert "is no client" not in cli.done("match", folder, "-o", merged).err
    note = f"note: {merged} is no client: it was merged here and has a record"
    words = ("--model", scene.model, "--data", scene.data)
    for command in (("compare", folder, *words), ("eval", folder, *words)):
        assert note in cli.done(*command).err
    assert note in cli.done(*scene.command("g.pt", clients=[folder])).err
    assert note in cli.done("match", folder, "-o", scene.folder / "again.pt").err


def test_a_merged_file_does_not_tell_again_how_it_was_planned(scene: Scene, cli: Cli) -> None:
    merged = scene.folder / "merged.pt"
    told = cli.done("match", *scene.clients, "--model", scene.model, "-o", merged).err
    assert "the model was run on random inputs of shape" in told
    told = cli.done(*scene.command("g.pt", clients=[merged])).err
    assert "the model was run on random inputs of shape" not in told


def test_other_evaluation_data_are_no_resume(scene: Scene, cli: Cli) -> None:
    cli.done(*scene.command("g.pt", "--data", scene.data))
    rewrite(scene.data, x=np.ones((30, 4), np.float32))
    says = ["holds another run: --data is another one"]
    cli.refused(*scene.command("g.pt", "--data", scene.data, "--resume"), code=2, says=says)
    says = ["holds another run: --data is not given"]
    cli.refused(*scene.command("g.pt", "--resume"), code=2, says=says)


@pytest.mark.parametrize("name", [STATE_FILE, "run.json"])
def test_a_damaged_state_says_how_to_start_again(name: str, scene: Scene, cli: Cli) -> None:
    cli.done(*scene.command("g.pt"))
    place = scene.folder / "g.pt.work"
    (place / name).write_bytes((place / name).read_bytes()[:50])
    says = [name, f"hint: start again: remove it (rm -r {place})"]
    cli.refused(*scene.command("g.pt", "--resume"), code=1, says=says)
