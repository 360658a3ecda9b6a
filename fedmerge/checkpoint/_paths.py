"""Which files the arguments of a command mean, and what their clients are called."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from fedmerge.checkpoint._failures import unreadable
from fedmerge.checkpoint._record import has_record
from fedmerge.checkpoint._sharded import weight_map
from fedmerge.checkpoint._shards import INDEX
from fedmerge.errors import CheckpointError

MODEL_SUFFIXES = (
    *(".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".t7", ".tar"),
    *(".pt2", ".ts", ".torchscript"),
)

_MODEL_FILES = (  # what Hugging Face libraries call a model's file, the best first
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.bin",
)


def expand_paths(arguments: Sequence[str | Path]) -> list[Path]:
    """Return the checkpoints that files, folders and globs stand for, in natural order each."""
    try:
        return [path for argument in arguments for path in _expand(argument)]
    except OSError as error:
        raise unreadable(error.filename or "a path", error) from error


def merged_files(arguments: Sequence[str | Path]) -> list[Path]:
    """Return the files in folders that stand for no client, since they were merged here."""
    folders = [path for path in map(Path, arguments) if path.is_dir() and not model_file(path)]
    files = [path for folder in folders for path in folder.iterdir() if has_record(path)]
    return sorted((p for p in files if p.suffix.lower() in MODEL_SUFFIXES), key=_natural)


def client_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths' stems, made different by -2, -3, … where they repeat.

    >>> client_names([Path("a/model.pt"), Path("b/model.pt"), Path("model-2.pt")])
    ['model', 'model-3', 'model-2']
    """
    stems = [_stem(path) for path in paths]
    reserved, taken, counts = set(stems), set[str](), dict[str, int]()
    names: list[str] = []
    for stem in stems:
        name, count = stem, counts.get(stem, 1)
        while name in taken or (count > 1 and name in reserved):
            count += 1
            name = f"{stem}-{count}"
        counts[stem] = count
        taken.add(name)
        names.append(name)
    return names


def model_file(folder: Path) -> Path | None:
    """Return the index or model file of a Hugging Face folder, None for other folders.

    A merged model's index among clients makes no such folder.
    """
    known = [folder / (name + INDEX) for name in _MODEL_FILES]
    others = sorted(folder.glob(f"*{INDEX}"))
    files = [folder / name for name in _MODEL_FILES if (folder / "config.json").exists()]
    found = [path for path in [*known, *others, *files] if path.is_file()]
    if found and found[0].name.endswith(INDEX) and _clients_in(folder):
        found = [path for path in found if not has_record(path)]
    return found[0] if found else None


def _expand(argument: str | Path) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        return [path] if model_file(path) else _files_in(path)
    if path.exists():
        return [path]
    if not glob.has_magic(str(argument)):
        raise CheckpointError(f"{argument}: no such file")
    found = glob.glob(str(argument), recursive=True)  # noqa: PTH207 (absolute patterns too)
    matches = sorted(map(Path, found), key=_natural)
    if not matches:
        raise CheckpointError(f"{argument}: no file matches this pattern")
    return [path for match in matches for path in _expand(match)]


def _files_in(folder: Path) -> list[Path]:
    files = _clients_in(folder)
    if not files:
        raise CheckpointError(
            f"{folder}: a folder without checkpoint files",
            f"they end in {', '.join(MODEL_SUFFIXES)}",
        )
    return sorted(files, key=_natural)


def _clients_in(folder: Path) -> list[Path]:
    """Return the checkpoint files of a folder but for shards and what was merged here before."""
    shards = {shard for index in folder.glob(f"*{INDEX}") for shard in _shards_of(index)}
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in MODEL_SUFFIXES
        and not path.name.startswith(".")
        and path.name not in shards
        and not has_record(path)
    ]


def _shards_of(index: Path) -> set[str]:
    try:
        return set(weight_map(index).values())
    except (CheckpointError, OSError):
        return set()


def _natural(path: Path) -> list[tuple[int, str, int]]:
    """Order c2 before c10."""
    parts = re.findall(r"(\d+)|(\D+)", str(path))
    return [(0, "", int(number)) if number else (1, text, 0) for number, text in parts]


def _stem(path: Path) -> str:
    if path.is_dir():
        return path.resolve().name
    stem = path.name.removesuffix(INDEX)
    while Path(stem).suffix.lower() in MODEL_SUFFIXES:
        stem = Path(stem).stem
    return stem if stem != path.name else path.stem
