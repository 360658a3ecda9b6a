"""`python -m benchmarks.kills`: kill commands at random moments; what they leave must be whole."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.page_block import replace_blocks
from fedmerge.checkpoint import open_checkpoint, read_record
from fedmerge.errors import CheckpointError
from tests.clusters import family
from tests.end_to_end.retraining import Scene, make_scene
from tests.unit.engines.test_processes import is_alive

HIDDEN = 30, 60_000  # of the nets that are merged: they take some time to be written
SUFFIXES: Mapping[str, tuple[str, ...]] = {  # output → further options
    "g.pt": (),
    "g.safetensors": (),
    "sharded.safetensors": ("--set", "shard_size=3MB"),
}
ENGINES = (("local",), ("processes", "--workers", "2"))
OLD, NEW = ("--method", "average"), ("--max-growth", "1")  # two merges of the same clients
WRITING = 0.05  # seconds that it takes to write an output, or a state
MOST_KILLS = 3  # of one run in rounds, each after it was resumed
FAREWELL = 20.0  # seconds for workers to see that their parent is gone

Files: TypeAlias = dict[str, bytes]
_Model: TypeAlias = tuple[Files, dict[str, Any] | None]


@dataclass
class Campaign:
    """What killed commands left, counted; what must not be is also shown."""

    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def broken(self, what: str, where: str) -> None:
        """Count a broken promise."""
        self.counts[f"BROKEN: {what}"] += 1
        print(f"BROKEN: {what} ({where})", flush=True)

    def kill(self, command: Sequence[str], seconds: float, folder: Path) -> None:
        """Start a command and kill it at any moment, every other time while it writes there."""
        running = _start(command)
        if self.rng.random() < 0.5:
            while running.poll() is None and not (folder.is_dir() and _hidden(folder)):
                time.sleep(0.0005)
            seconds = WRITING
        time.sleep(self.rng.uniform(0, seconds))
        workers = family(running.pid)
        running.kill()
        is_killed = running.wait() == -signal.SIGKILL
        self.counts["killed" if is_killed else "over before"] += 1
        if not _are_gone(workers):
            self.broken("a worker outlives its command", " ".join(command))


def main() -> None:
    """Kill commands, look at what they left, run them to the end, and compare all bytes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--match", type=int, default=50, help="kills of `fedmerge match`")
    parser.add_argument("--retrain", type=int, default=30, help="kills of `fedmerge retrain`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the result into this page")
    asked = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    for name, kills, run in (
        ("match", asked.match, kill_matches),
        ("retrain", asked.retrain, kill_retrainings),
    ):
        campaign = Campaign(random.Random(f"{name} {asked.seed}"))
        with _folder() as folder:
            run(folder, kills, campaign)
        counts[name] = campaign.counts
        print(f"{name}: {dict(sorted(campaign.counts.items()))}", flush=True)
    broken = sum(n for own in counts.values() for what, n in own.items() if "BROKEN" in what)
    command = (
        f"python -m benchmarks.kills --match {asked.match} --retrain {asked.retrain} "
        f"--seed {asked.seed}"
    )
    result = (
        f"{counts['match']['killed']} kills of `match` and {counts['retrain']['killed']} of "
        f"`retrain` (local and processes), half of them while files were written: {broken} broken "
        "promises (outputs whole or absent, the same bytes when the command is run again, no "
        "hidden file and no worker left)."
    )
    print(result)
    if asked.page:
        replace_blocks(asked.page, {"kills": f"`{command}`\n\n{result}"})
    raise SystemExit(1 if broken else 0)


def kill_matches(folder: Path, kills: int, campaign: Campaign) -> None:
    """Kill merges into an empty folder, and such that replace an older output."""
    clients = _write_clients(folder)
    kinds = [_match_kind(folder, clients, output) for output in SUFFIXES]
    while campaign.counts["killed"] < kills:
        kind = campaign.rng.choice(kinds)
        place = folder / "out"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        is_forced = campaign.rng.random() < 0.5
        for name, content in (kind.old if is_forced else {}).items():
            (place / name).write_bytes(content)
        campaign.kill(kind.command(place, force=is_forced), kind.seconds, place)
        _judge(campaign, kind, place, is_forced=is_forced)
        done = _run(kind.command(place, force=True))
        if done or _visible(place) != kind.new or _hidden(place):
            campaign.broken("another end after the command was run again", str(place))


@dataclass(frozen=True)
class _Kind:
    """A merge to one kind of output: what it replaces, what it writes, and how long it takes."""

    command: Callable[..., list[str]]
    opened: str  # the file that is the model: itself, or the index of its shards
    old: Files
    new: Files
    models: Mapping[str, _Model]  # old and new
    seconds: float


def _match_kind(folder: Path, clients: Sequence[str], output: str) -> _Kind:
    opened = output if not SUFFIXES[output] else f"{output}.index.json"

    def command(place: Path, *, force: bool, more: Sequence[str] = NEW) -> list[str]:
        words = ["match", *clients, "-o", str(place / output), "--set", "threads=1", "-q"]
        return [*words, *SUFFIXES[output], *more, *(["--force"] if force else [])]

    files, models, seconds = {}, {}, 0.0
    for name, way in (("old", OLD), ("new", NEW)):
        place = folder / f"{name}-{output}"
        place.mkdir()
        began = time.monotonic()
        assert not _run(command(place, force=False, more=way))
        seconds = time.monotonic() - began
        files[name], models[name] = _visible(place), _model(place / opened)
    assert models["old"] != models["new"]
    return _Kind(command, opened, files["old"], files["new"], models, 1.02 * seconds)


def _model(path: Path) -> _Model:
    """Return the tensors of an output, and its record if it has one."""
    found = open_checkpoint(path)
    tensors = {name: found.read(name).tobytes() for name in found.tensors}
    try:
        return tensors, read_record(path)
    except CheckpointError:
        return tensors, None


def _judge(campaign: Campaign, kind: _Kind, place: Path, *, is_forced: bool) -> None:
    """Count what a killed merge left: the old model or the new one, and a record of no other."""
    if not (place / kind.opened).exists():
        ahead = _visible(place)  # a record or shards, which get their names before the model
        is_right = not is_forced and ahead.items() <= kind.new.items()
        campaign.counts["left nothing"] += 1
        campaign.counts["of these with a part that is named first"] += bool(ahead)
        if not is_right:
            campaign.broken("no model, or a part of one", f"{sorted(ahead)} in {place}")
        return
    tensors, record = _model(place / kind.opened)
    owners = [name for name, (own, _) in kind.models.items() if own == tensors]
    if not owners or (owners == ["old"] and not is_forced):
        campaign.broken("a part of an output", str(place))
        return
    campaign.counts[f"left the {owners[0]} model"] += 1
    if record is None and is_forced:
        campaign.counts["of these without a record"] += 1  # between two renames
    elif record != kind.models[owners[0]][1]:
        campaign.broken("no record, or that of another model", str(place))


def kill_retrainings(folder: Path, kills: int, campaign: Campaign) -> None:
    """Kill runs in rounds, resume them, kill some of them again, and compare their ends."""
    scene = make_scene(folder)
    began = time.monotonic()
    assert not _run(_retrain(scene, "whole.pt", ENGINES[0]))
    seconds = 1.5 * (time.monotonic() - began)
    whole = _outputs(scene, "whole.pt")
    number = 0
    while campaign.counts["killed"] < kills:
        number += 1
        output, engine = f"killed-{number}.pt", ENGINES[number % len(ENGINES)]
        command = _retrain(scene, output, engine)
        for _ in range(campaign.rng.randint(1, MOST_KILLS)):
            if campaign.counts["killed"] == kills:
                break
            campaign.kill(command, seconds, scene.folder / f"{output}.work")
            command = _retrain(scene, output, engine, "--resume")
            left = _outputs(scene, output)
            if left and left != whole and list(left) != [".json"]:
                campaign.broken("a part of an output", output)
        done = _run(command)
        if done or _outputs(scene, output) != whole:
            campaign.broken("another end after the command was resumed", output)
        if _hidden(scene.folder) or _hidden(scene.folder / f"{output}.work"):
            campaign.broken("hidden files", output)


def _retrain(scene: Scene, output: str, engine: Sequence[str], *more: str) -> list[str]:
    words = ("--passes", "2", "--engine", *engine, "-q", *more)
    return scene.command(output, *words)


def _outputs(scene: Scene, name: str) -> Files:
    """Return model and record by the ends of their names, as far as they are there."""
    paths = {end: scene.folder / f"{name}{end}" for end in ("", ".json")}
    return {end: path.read_bytes() for end, path in paths.items() if path.exists()}


def _write_clients(folder: Path) -> list[str]:
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = {"fc1.weight": torch.randn(HIDDEN), "fc2.weight": torch.randn(3, HIDDEN[0])}
        paths.append(str(folder / f"client-{seed}.pt"))
        torch.save(state, paths[-1])
    return paths


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _run(command: Sequence[str]) -> int:
    """Run a command to its end and return its code."""
    return _start(command).wait()


def _are_gone(processes: Sequence[int]) -> bool:
    """Return whether processes are over, after a while at most."""
    until = time.monotonic() + FAREWELL
    while time.monotonic() < until:
        if not any(map(is_alive, processes)):
            return True
        time.sleep(0.05)
    return False


def _visible(folder: Path) -> Files:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name[0] != "."}


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fedmerge-kills-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
