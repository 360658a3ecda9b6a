"""Names and places in a file system that are not what a command expects."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

from tests.attacks.attack import add, attack
from tests.attacks.building import state_dict, tensor, torch_zip
from tests.attacks.texts import clients

_PICKLE = state_dict(("fc.weight", tensor([2, 2], [2, 1])))
COMMANDS = (
    *("inspect {}", "plan {}", "convert {} -o x.pt", "verify {}", "report {} -o x.html"),
    *("match {} a.safetensors -o x.pt", "match a.safetensors b.safetensors --config {} -o x.pt"),
    *(
        "match a.safetensors b.safetensors --plan {} -o x.pt",
        "partition {} --clients 2 --homogeneous -o shards",
    ),
    "match a.safetensors b.safetensors --class-counts {} -o x.pt",
)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's name may have a hundred letters only
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(before)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _full(path: Path) -> None:
    path.symlink_to("/dev/full")


def _folder(path: Path) -> None:
    path.mkdir()


def _empty(path: Path) -> None:
    path.touch()


for _make in (_pipe, _socket, _loop, _nowhere, _zeros, _full, _folder, _empty):
    for _command in COMMANDS:

        def _build(folder: Path, make=_make, command=_command) -> str:  # type: ignore[no-untyped-def]
            clients(folder)
            name = "odd.npz" if command.startswith("partition") else "odd.json"
            make(folder / name)
            return str(command.format(name))

        add(f"{_command} on what is {_make.__name__.strip('_')}", _build, 1, 2, 3, 4)

for _make in (_pipe, _zeros, _folder, _loop):
    for _name, _command in {
        "g.pt.json": "verify g.pt",
        "g.index.json": "inspect .",
        "c.pt": "inspect .",
        "config.json": "inspect .",
        "model.safetensors": "inspect .",
        "pytorch_model.bin.index.json": "inspect .",
    }.items():

        def _beside(folder: Path, make=_make, name=_name, command=_command) -> str:  # type: ignore[no-untyped-def]
            torch_zip(folder / "g.pt", _PICKLE)
            make(folder / name)
            return str(command)

        add(f"{_name} beside a file is {_make.__name__.strip('_')}", _beside, 0, 1, 2)

NAMES = {
    "escapes": "\x1b[2J\x1b]0;owned\x07.pt",
    "a line": "a\nerror: all is well.pt",
    "a return": "a\rb.pt",
    "text from right to left": "a\u202etp.exe.pt",
    "an option": "--force",
    "a pattern": "[a-z]*?.pt",
    "markup": "[bold]a[blink].pt",
    "markup that ends": "a[/bold].pt",  # in a folder: no name of a file has a slash
    "braces": "{0}{a!r}%s%d.pt",
    "many letters": "n" * 251 + ".pt",
    "too many letters": "n" * 5_000 + ".pt",
    "many digits": "1" * 250 + ".pt",
    "spaces": "   .pt",
    "suffixes": ".pt" * 60,
}
for _name, _file in NAMES.items():

    def _named(folder: Path, file=_file) -> str:  # type: ignore[no-untyped-def]
        if len(file) < 256:
            (folder / file).parent.mkdir(exist_ok=True)
            torch_zip(folder / file, b"\x80\x02N.")
        return f"inspect -- {shlex.quote(file)}"

    add(f"a file named by {_name}", _named, 1)
    if len(_file) < 256:

        def _among(folder: Path, file=_file) -> str:  # type: ignore[no-untyped-def]
            (folder / file).parent.mkdir(exist_ok=True)
            torch_zip(folder / file, b"\x80\x02N.")
            return f"inspect {shlex.quote(str(Path(file).parent))}"

        add(f"a folder with a file named by {_name}", _among, 1)


@attack(1)
def a_file_named_by_no_text(folder: Path) -> str:
    """Name a file by bytes that are no text."""
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.pt")).touch()
    return "inspect ."


@attack(0, 1)
def many_files_of_one_stem(folder: Path) -> str:
    """Give very many files whose clients would have the same name."""
    suffixes = [".pt", ".pth", ".bin", ".ckpt", ".t7"]
    for k in range(3_000):
        ending, left = "", k
        while left or not ending:
            ending, left = ending + suffixes[left % 5], left // 5
        (folder / f"a{ending}").touch()
    return "inspect . --quiet"


@attack(0, 1)
def a_deep_folder(folder: Path) -> str:
    """Nest folders until names are as long as they may be."""
    place = folder
    for _ in range(15):
        place = place / ("d" * 200)
    place.mkdir(parents=True)
    torch_zip(place / "a.pt", _PICKLE)
    return f"inspect {place.relative_to(folder)}/a.pt"
