"""Whether an output may be written, decided before any work."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedmerge.checkpoint._record import record_path
from fedmerge.checkpoint._shards import existing_files, index_path
from fedmerge.errors import UsageError

SAFETENSORS = ".safetensors"
OUTPUT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", SAFETENSORS)


def check_output(
    path: str | Path, *, inputs: Sequence[str | Path], force: bool, sharded: bool = False
) -> None:
    """Raise `UsageError` if the output cannot or must not be written."""
    path = Path(path)
    if path.suffix.lower() not in OUTPUT_SUFFIXES:
        raise UsageError(
            f"{path}: cannot write a file of this kind",
            f"let the output end in one of {', '.join(OUTPUT_SUFFIXES)}",
        )
    if sharded and path.suffix.lower() != SAFETENSORS:
        raise UsageError(
            f"{path}: --shard-size writes safetensors only",
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
            raise UsageError(f"{target}: exists already", "overwrite it with --force")


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
