"""CONTRIBUTING names files and tables that are there, and its examples do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.pages import DOCS, agree

ROOT = DOCS.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "fedmerge"
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```\n", re.M | re.S)
# A command ends where no line after it is indented by four blanks, or closes a loop.
COMMAND = re.compile(r"^\$ (.*\n(?:(?:    |  done).*\n)*)((?:(?!\$ ).*\n)*)", re.M)
PROSE = BLOCKS.sub("", TEXT)
EXAMPLES = {
    title: BLOCKS.findall(part)
    for title, part in re.findall(r"^### (.+?)\n(.*?)(?=^##)", TEXT + "##", re.M | re.S)
    if "```diff" in part
}
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PROSE)))
# "`TABLE` … `file.py`": a name in capitals, and the next file that is named.
TABLES = re.findall(r"`(_?[A-Z][A-Z_]+)`(?:(?!`_?[A-Z][A-Z_]+`).)*?`([a-z_/]+\.py)`", PROSE, re.S)
NETS = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self, hidden=16, outputs=3):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, outputs)


class Number(Net):
    def __init__(self):
        super().__init__(outputs=1)


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.out = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return nn.functional.linear(self.fc1(x).relu(), torch.renorm(self.out.weight, 2, 0, 0.5))
"""


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_it_names_is_there(name: str) -> None:
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


@pytest.mark.parametrize(("table", "file"), TABLES)
def test_every_table_is_in_its_file(table: str, file: str) -> None:
    if (PACKAGE / file).exists():
        assert re.search(rf"^{table}\b", (PACKAGE / file).read_text(encoding="utf-8"), re.M)


def test_the_map_has_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= {name.strip("/") for name in FILES}
    assert len(FILES) > 20
    assert len(TABLES) > 5


def edited(text: str, lines: list[str]) -> str:
    """Return a file with the lines of a `diff` block put in: after the line before, or for it."""
    place = 0
    for line in lines:
        kind, content = line[:1], line[1:] + "\n"
        if kind == "+":
            text = text[:place] + content + text[place:]
            place += len(content)
        else:
            found = [m.start() for m in re.finditer(re.escape(content), "\n" + text)]
            own = [k for k in found if ("\n" + text)[k - 1] == "\n"]
            assert len(own) == 1, f"{len(own)} lines are {line!r}"
            place = own[0] - 1
            if kind == "-":
                text = text[:place] + text[place + len(content) :]
            else:
                place += len(content)
    return text


def edits(diff: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the files that a `diff` block changes, and its lines for each."""
    for name, lines in re.findall(r"^# (\S+)\n((?:[ +-].*\n|\+\n)*)", diff, re.M):
        yield name, lines.splitlines()


def extend(blocks: list[tuple[str, str]], folder: Path) -> None:
    """Put the files and rows of an example into a copy of the package."""
    shutil.copytree(PACKAGE, folder / "fedmerge")
    for kind, content in blocks:
        if kind == "python":
            name, source = re.findall(r"# (\S+)\n(.*)", content, re.S)[0]
            assert not (folder / name).exists()
            (folder / name).write_text(source, encoding="utf-8")
        if kind == "diff":
            for name, lines in edits(content):
                before = (folder / name).read_text(encoding="utf-8")
                (folder / name).write_text(edited(before, lines), encoding="utf-8")


def make_clients(folder: Path) -> None:
    """Write what the commands of the examples are about."""
    (folder / "net.py").write_text(NETS)
    space: dict[str, type[nn.Module]] = {}
    exec(NETS, space)
    rng = np.random.default_rng(0)
    (folder / "shards").mkdir()
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        state = space["Net"]().state_dict()
        torch.save(state, folder / f"{name}.pt")
        np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in state.items()})
        x, y = rng.normal(size=(40, 8)).astype(np.float32), rng.integers(0, 3, 40)
        np.savez(folder / "shards" / f"{name}.npz", x=x, y=y)
    np.savez(folder / "numbers.npz", x=x, y=x[:, :1])
    torch.save(space["Number"]().state_dict(), folder / "n.pt")
    torch.save(space["Limited"]().state_dict(), folder / "limited.pt")


def ran(command: str, folder: Path, package: Path) -> tuple[str, str]:
    """Return what a command prints that uses the package of a folder, and what it says."""
    program = 'fedmerge() { "$PYTHON" -m fedmerge "$@"; }\n'
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", program + command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.stderr


def test_there_is_an_example_for_everything_that_is_added() -> None:
    assert list(EXAMPLES) == [
        *("A merge method", "A source of probes", "An engine", "A task", "A container"),
        *("An op of model code", "A command"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_a_file_and_a_row_and_does_what_it_says(title: str, tmp_path: Path) -> None:
    blocks = EXAMPLES[title]
    assert [kind for kind, _ in blocks] == ["python", "diff", "console"]
    package, work = tmp_path / "package", tmp_path / "work"
    package.mkdir()
    work.mkdir()
    make_clients(work)
    extend(blocks, package)
    for command, shown in COMMAND.findall(blocks[2][1]):
        found, said = ran(command, work, package)
        assert agree(shown, found), f"{found}{said}"


@pytest.mark.slow
def test_an_example_does_nothing_without_its_row(tmp_path: Path) -> None:
    make_clients(tmp_path)
    found, said = ran("fedmerge match a.pt b.pt --method first", tmp_path, ROOT)
    assert found == ""
    assert "--method is 'first', expected fedma, ot, average or ensemble" in said


def test_a_row_that_has_no_place_is_noticed() -> None:
    assert edited("a\nb\n", [" a", "+c", "-b"]) == "a\nc\n"
    with pytest.raises(AssertionError, match="0 lines are ' d'"):
        edited("a\nb\n", [" d", "+c"])
