"""Which files a path means, what they are by their first bytes, and where the merge record is."""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedmerge.checkpoint.adapter_files import ADAPTER_CONFIG, ADAPTER_FILES
from fedmerge.checkpoint.files import (
    ReadOptions,
    SourceFile,
    damaged,
    read_directory,
    unreadable,
)
from fedmerge.checkpoint.foreign_files import HEAD, STATE_DICT, refuse_foreign, text_kind
from fedmerge.checkpoint.legacy_torch_files import is_torch_pickle
from fedmerge.checkpoint.safetensors_files import LARGEST_HEADER, read_safetensors
from fedmerge.checkpoint.shard_indices import weight_map
from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import CheckpointError, UsageError

Kind: TypeAlias = Literal[
    "zip", "legacy", "safetensors", "index", "pickle", "exported program", "TorchScript"
]

_ARCHIVES: tuple[tuple[str, Kind], ...] = (  # pattern of a record's name, what such a zip is
    (r"[^/]+/constants\.pkl", "TorchScript"),
    (r"([^/]+/)?(archive_format|serialized_exported_program\.json)", "exported program"),
)


def kind_of(path: Path) -> Kind:
    """Return which reader a file needs; raise what it is if none."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {_no_file(path)}")
        return _kind(SourceFile.of(path))
    except OSError as error:
        raise unreadable(path, error) from error


def _no_file(path: Path) -> str:
    if not path.exists():
        return "no such file"
    return "a folder, not a checkpoint" if path.is_dir() else "not a regular file"


def _kind(file: SourceFile) -> Kind:
    path, head = file.path, file.whole.read(0, min(HEAD, file.size))
    if not head:
        raise CheckpointError(f"{path}: an empty file", "copy or download it again")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(file)
    if _is_safetensors(head):
        return "safetensors"
    refuse_foreign(path, head)
    return _pickle_kind(file, head) or text_kind(path, head)


def _zip_kind(file: SourceFile) -> Kind:
    names = [entry.name for entry in read_directory(file.whole)]
    for pattern, kind in _ARCHIVES:
        if any(re.fullmatch(pattern, name) for name in names):
            return kind
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointError(f"{file.path}: a numpy archive (.npz), not a checkpoint", STATE_DICT)
    return "zip"


def _is_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= LARGEST_HEADER


def _pickle_kind(file: SourceFile, head: bytes) -> Kind | None:
    is_torch = is_torch_pickle(file)
    if is_torch:
        return "legacy"
    # Protocols 0 and 1 have no mark of their own, so only a whole pickle counts as one.
    return "pickle" if is_torch is not None or re.match(rb"\x80[\x02-\x05]", head) else None


RECORD_KEY = "fedmerge"  # of the safetensors metadata


def record_path(path: str | Path) -> Path:
    """Return where the record of a file that is not safetensors lies.

    >>> record_path("global.pt").name
    'global.pt.json'
    """
    path = Path(path)
    return path.with_name(path.name + ".json")


def read_record(path: str | Path) -> dict[str, Any]:
    """Return the merge record of a merged file, or of the model in a folder."""
    path = Path(path)
    try:
        path = (model_file(path) or path) if path.is_dir() else path
        return _PLACES.get(kind_of(path), _beside)(path)
    except OSError as error:
        raise unreadable(path, error) from error


def has_record(path: Path) -> bool:
    """Return whether a file is a merged model: its record is inside or beside it."""
    try:
        return RECORD_KEY in read_record(path)
    except CheckpointError:
        return False


def _inside(path: Path) -> dict[str, Any]:
    text = read_safetensors(SourceFile.of(path), ReadOptions()).metadata.get(RECORD_KEY)
    if text is None:
        raise _missing(path, f"no '{RECORD_KEY}' in its metadata")
    return _parsed(path, text)


def _in_index(path: Path) -> dict[str, Any]:
    metadata = _parsed(path, read_text(path, fail=_unreadable(path))).get("metadata")
    record = metadata.get(RECORD_KEY) if isinstance(metadata, dict) else None
    if record is None:
        raise _missing(path, f"no '{RECORD_KEY}' in its metadata")
    if not isinstance(record, dict):
        raise damaged(path, "its merge record is no JSON object")
    return record


def _beside(path: Path) -> dict[str, Any]:
    place = record_path(path)
    if not place.exists():
        raise _missing(path, f"no {place.name} beside it")
    return _parsed(place, read_text(place, fail=_unreadable(place)))


def _parsed(path: Path, text: str | bytes) -> dict[str, Any]:
    return decode_json(
        text,
        dict[str, Any],
        fail=lambda reason: damaged(path, f"its merge record is no JSON object: {reason}"),
    )


def _unreadable(path: Path) -> Fail:
    return lambda reason: CheckpointError(f"{path}: cannot be read ({reason})")


def _missing(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: has no merge record ({why})", "only files that fedmerge wrote have one"
    )


_PLACES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "safetensors": _inside,
    "index": _in_index,
}


INDEX = ".index.json"


def index_path(path: Path) -> Path:
    """Return where the index of a sharded output lies.

    >>> index_path(Path("global.safetensors")).name
    'global.safetensors.index.json'
    """
    return path.with_name(path.name + INDEX)


def written_path(path: str | Path, *, sharded: bool) -> Path:
    """Return the file to open in order to read an output: itself, or the index of its shards."""
    return index_path(Path(path)) if sharded else Path(path)


def existing_files(path: Path) -> list[Path]:
    """Return what is there of an output by this name: one file, an index, shards of any number.

    Also shards that a killed run left parked.
    """
    name = re.escape(path.stem) + r"-[0-9]{5,}-of-[0-9]{5,}" + re.escape(path.suffix)
    shard = re.compile(rf"{name}|\.fedmerge-{name}\.old")
    found = sorted(p for p in path.parent.iterdir() if shard.fullmatch(p.name))
    return [p for p in (path, index_path(path), *found) if p.exists() or p.is_symlink()]


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
    """Return the index or model file of a Hugging Face folder, or an adapter's; None for others.

    A merged model's index among clients makes no such folder.
    """
    known = [folder / (name + INDEX) for name in _MODEL_FILES]
    others = sorted(folder.glob(f"*{INDEX}"))
    files = [folder / name for name in _MODEL_FILES if (folder / "config.json").exists()]
    adapter = adapter_file(folder)
    found = [path for path in [*known, *others, *files] if path.is_file()]
    found += [] if adapter is None else [adapter]
    if found and found[0].name.endswith(INDEX) and _clients_in(folder):
        found = [path for path in found if not has_record(path)]
    return found[0] if found else None


def adapter_file(folder: Path) -> Path | None:
    """Return the file with an adapter's factors, None if a folder is no adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    found = [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]
    return found[0] if found else None


def adapter_folder(path: Path) -> Path | None:
    """Return the adapter that a folder is, or that a file with factors belongs to."""
    folder = path.parent if path.name in ADAPTER_FILES else path
    return folder if adapter_file(folder) is not None else None


def _expand(argument: str | Path) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        return [path] if model_file(path) else _files_in(path)
    if path.exists():
        return [adapter_folder(path) or path]
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
        whole = path.resolve()
        cached = whole.parent.parent.name.split("--")  # models--OWNER--NAME/snapshots/COMMIT
        is_cached = whole.parent.name == "snapshots" and cached[0] == "models"
        return cached[-1] if is_cached else whole.name
    stem = path.name.removesuffix(INDEX)
    while Path(stem).suffix.lower() in MODEL_SUFFIXES:
        stem = Path(stem).stem
    return stem if stem != path.name else path.stem


SAFETENSORS = ".safetensors"


PROGRAM = ".pt2"


OUTPUT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", SAFETENSORS)


def check_output(
    path: str | Path,
    *,
    inputs: Sequence[str | Path],
    force: bool,
    sharded: bool = False,
    is_program: bool = False,
) -> None:
    """Raise `UsageError` if the output cannot or must not be written.

    `is_program`: it is the ending of an exported program, which may be written.
    """
    path = Path(path)
    if path.suffix.lower() == PROGRAM and not is_program:
        raise UsageError(
            f"{path}: only an ensemble (`method=ensemble`) is written as a program",
            f"let the output end in one of {', '.join(OUTPUT_SUFFIXES)}; `fedmerge export` makes "
            "a program of such a file",
        )
    if path.suffix.lower() not in (*OUTPUT_SUFFIXES, PROGRAM):
        raise UsageError(
            f"{path}: cannot write a file of this kind",
            f"let the output end in one of {', '.join(OUTPUT_SUFFIXES)}",
        )
    if sharded and path.suffix.lower() != SAFETENSORS:
        raise UsageError(
            f"{path}: `shard_size` writes safetensors only",
            f"let the output end in {SAFETENSORS}",
        )
    targets = _shard_files(path) if sharded else output_files(path)
    check_targets(targets, inputs=inputs, force=force)


def check_targets(targets: Sequence[Path], *, inputs: Sequence[str | Path], force: bool) -> None:
    """Raise `UsageError` if any of the files of one folder cannot or must not be written."""
    try:
        _check_targets(targets, inputs, force)
    except OSError as error:  # a name that is too long, say
        raise UsageError(f"{targets[0]}: cannot be written ({error.strerror or error})") from None


def _check_targets(targets: Sequence[Path], inputs: Sequence[str | Path], force: bool) -> None:
    path = targets[0]
    if not path.parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist", f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: its folder may not be written to")
    _refuse_inputs(targets, _files_of(inputs))
    for target in targets:
        if target.is_dir():
            raise UsageError(f"{target}: is a folder, not a file to write")
        if not force and (target.exists() or target.is_symlink()):
            raise UsageError(f"{target}: exists already", "overwrite it with `force`")


def output_files(path: Path) -> list[Path]:
    """Return the files that writing a model to `path` creates."""
    return [path] if path.suffix.lower() == SAFETENSORS else [path, record_path(path)]


def _shard_files(path: Path) -> list[Path]:
    """Return the index, and what is there of an output that it would replace."""
    found = existing_files(path) if path.parent.is_dir() else []
    return list(dict.fromkeys([index_path(path), *found]))


def _refuse_inputs(targets: Sequence[Path], inputs: Iterable[Path]) -> None:
    present = [target for target in targets if target.exists()]
    for source in inputs if present else ():
        for target in present:
            if target.samefile(source):
                raise UsageError(
                    f"{target}: the output is also an input ({source})",
                    "inputs are never overwritten; choose another name",
                )


def _files_of(inputs: Sequence[str | Path]) -> Iterator[Path]:
    """Yield the inputs' files, all files of the folder where an input may be spread over it."""
    for source in map(Path, inputs):
        spread = source.is_dir() or source.suffix == ".json"
        folder = source if source.is_dir() else source.parent
        for path in folder.rglob("*") if spread else [source]:
            if path.is_file():
                yield path
