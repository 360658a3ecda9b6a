"""Tables, saved data sets and pictures: read within bounds, whatever their headers claim."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeAlias

import numpy as np
from msgspec import Struct, field

from fedmerge.checkpoint import LARGEST_INFLATED, MOST_INFLATED, SourceFile, reason_of
from fedmerge.decoding import Name, decode_json, read_text, shortened
from fedmerge.errors import FedmergeError, TrainingError, UsageError
from fedmerge.values.arrays import Array

Arrays: TypeAlias = Mapping[str, Callable[[], Array]]

SAVED = "state.json"  # of a data set that `datasets` saved
_MOST_COLUMNS = 200_000
_LONGEST_LINE = 16_000_000  # characters
_AT_ONCE = 100_000  # values of a table that are texts at the same time
_KINDS = "biufU"  # of numpy's dtypes that are numbers or texts
_WIDTHS = {"INT32": 4, "FLOAT": 4}  # bytes of Parquet's values; others count as eight
_ROWS_AT_ONCE = 16  # a row may be as large as a picture
_MOST_FILES = 10_000  # of a saved data set
_PICTURE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # others may start programs
_PER_PIXEL = 12  # bytes that decoding one takes
_MOST_UNPACKED = 64  # bytes of pixels per byte that is stored, besides the bytes for all


@contextmanager
def _opened(path: Path, what: str) -> Iterator[tuple[SourceFile, IO[bytes]]]:
    """Yield a file that stays the same, and a stream of its bytes; libraries' errors are ours."""
    try:
        file = SourceFile.of(path)
        with file.opened() as handle, os.fdopen(os.dup(handle), "rb") as stream:
            yield file, stream
    except (FedmergeError, MemoryError):
        raise
    except Exception as error:  # decoders of strangers' bytes raise whatever they meet
        raise TrainingError(f"{path}: no {what} that can be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return what is wrong, without the stream in which Pillow found it."""
    return str(getattr(error, "strerror", None) or reason_of(error).partition(" <_io")[0])


# CSV


def open_csv(path: Path) -> Arrays:
    """Return the columns of a table with a header: numbers, or else texts."""
    with _opened(path, "table") as (file, stream):
        most = LARGEST_INFLATED + MOST_INFLATED * file.size
        columns = _csv_columns(path, stream, most, frozenset())
        texts = frozenset(name for name, own in columns.items() if _is_mixed(own))
        if texts:  # numbers at first, texts further on: what was read as numbers is read again
            stream.seek(0)
            columns = _csv_columns(path, stream, most, texts)
        return {name: partial(_in_one, own, f"{path}: '{name}'", most)
                for name, own in columns.items()}  # fmt: skip


def _csv_columns(
    path: Path, stream: IO[bytes], most: int, texts: frozenset[str]
) -> dict[str, list[Array]]:
    """Return each column's blocks of rows."""
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.reader(_lines(lines))
    header = next(rows, [])
    if len(header) > _MOST_COLUMNS:
        raise TrainingError(f"{path}: has more than {_MOST_COLUMNS:,} columns")
    columns: dict[str, list[Array]] = {name: [] for name in header}
    last = {name: place for place, name in enumerate(header)}
    number = 2
    while block := list(islice(rows, max(1, _AT_ONCE // max(1, len(header))))):
        for row in block:
            if len(row) != len(header):
                raise TrainingError(
                    f"{path}: line {number} has {len(row)} values, the header {len(header)}"
                )
            number += 1
        for name, place in last.items():
            own = [row[place] for row in block]
            label = f"{path}: '{name}'"
            columns[name].append(_texts(own, label, most) if name in texts
                                 else _numbers(own, label, most))  # fmt: skip
    lines.detach()
    return columns


def _lines(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE:,} characters")
        yield line


def _numbers(texts: Sequence[str], label: str, most: int) -> Array:
    """Return integers where all texts are such, else floats, else the texts."""
    for dtype in (np.int64, np.float32):
        try:
            return np.array(texts, dtype=dtype)
        except (ValueError, OverflowError):
            continue
    return _texts(texts, label, most)


def _texts(texts: Sequence[str], label: str, most: int) -> Array:
    """Return texts as an array, each of which fills as much as the longest."""
    _check_texts(max(map(len, texts), default=0) * len(texts), label, most)
    return np.array(texts, dtype=np.str_)


def _check_texts(characters: int, label: str, most: int) -> None:
    if 4 * characters > most:
        raise TrainingError(f"{label}: its texts are too long and too many to be compared")


def _is_mixed(blocks: Sequence[Array]) -> bool:
    return len({block.dtype.kind == "U" for block in blocks}) > 1


def _in_one(blocks: Sequence[Array], label: str, most: int) -> Array:
    """Return all rows of a column; integers become floats where a block has such."""
    kinds = {block.dtype.kind for block in blocks}
    if kinds == {"U"}:
        widest = max(block.dtype.itemsize for block in blocks) // 4
        _check_texts(widest * sum(map(len, blocks)), label, most)
    dtype = np.float32 if kinds == {"i", "f"} else None
    return np.concatenate(blocks, dtype=dtype) if blocks else np.empty(0, np.str_)


# Parquet and Arrow


def open_parquet(path: Path) -> Arrays:
    """Return the columns of a Parquet file."""
    parquet = _library("pyarrow.parquet", "parquet files")
    arrow = _library("pyarrow", "parquet files")
    with _opened(path, "table") as (file, stream):
        source = parquet.ParquetFile(stream)
        _check_claims(file, source.metadata)
        batches = source.iter_batches(_ROWS_AT_ONCE if _is_ragged(source) else _AT_ONCE)
        table = arrow.Table.from_batches(_bounded(file, batches), source.schema_arrow)
    return _columns_of(table, path, file.size)


def _is_ragged(source: Any) -> bool:
    """Return whether rows may be of any size."""
    schema = source.schema
    return any(
        column.physical_type == "BYTE_ARRAY" or column.max_repetition_level
        for column in map(schema.column, range(len(schema)))
    )


def _check_claims(file: SourceFile, metadata: Any) -> None:
    """Refuse a table that says itself that it would fill far more than its size."""
    if metadata.num_columns > _MOST_COLUMNS:
        raise TrainingError(f"{file.path}: has more than {_MOST_COLUMNS:,} columns")
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    chunks = [group.column(k) for group in groups for k in range(metadata.num_columns)]
    packed = sum(chunk.total_uncompressed_size for chunk in chunks)
    numbers = sum(chunk.num_values * _WIDTHS.get(chunk.physical_type, 8) for chunk in chunks)
    _check_size(file, max(packed, numbers, metadata.num_rows))


def _check_size(file: SourceFile, size: int) -> None:
    most = LARGEST_INFLATED + MOST_INFLATED * file.size
    if size > most:
        raise TrainingError(
            f"{file.path}: would fill {size:,} bytes, of a file of {file.size:,} at most {most:,} "
            "are read",
            "if you trust it, write its columns as arrays: np.savez(path, x=x, y=y)",
        )


def _bounded(file: SourceFile, batches: Iterable[Any]) -> Iterator[Any]:
    size = 0
    for batch in batches:
        size += 2 * batch.nbytes  # as it is, and as an array
        _check_size(file, size)
        yield batch


class _DataFile(Struct):
    filename: Name


class _State(Struct):
    """What is needed of the state of a saved data set."""

    files: list[_DataFile] = field(name="_data_files")
    chosen: Any = field(name="_indices_data_files", default=None)


def open_saved(folder: Path) -> Arrays:
    """Return the columns of a data set that `datasets` saved to disk."""
    arrow = _library("pyarrow", "data sets that `datasets` saved")
    files = _data_files(folder)
    tables = [_stream_table(arrow, path) for path in files]
    try:
        table = arrow.concat_tables(tables)
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"{folder}: its files don't fit together ({reason_of(error)})"
        ) from error
    return _columns_of(table, folder, sum(path.stat().st_size for path in files))


def _data_files(folder: Path) -> list[Path]:
    """Return the files that a saved data set names, which lie in its folder."""

    def fail(reason: str) -> TrainingError:
        return TrainingError(f"{folder}: is no data set that can be read ({reason})")

    state = decode_json(read_text(folder / SAVED, fail=fail), _State, fail=fail)
    if state.chosen:
        raise TrainingError(
            f"{folder}: its rows are chosen by a list of indices",
            "write them out before you save: dataset.flatten_indices().save_to_disk(…)",
        )
    names = [file.filename for file in state.files]
    outside = [name for name in names if Path(name).name != name or not name.isprintable()]
    if outside:
        raise fail(f"it names a file outside its folder: {shortened(outside[0])!r}")
    if not names or len(set(names)) != len(names) or len(names) > _MOST_FILES:
        raise fail(f"it names {len(names):,} files, expected some, each once")
    return [folder / name for name in names]


def _stream_table(arrow: Any, path: Path) -> Any:
    with _opened(path, "table") as (file, stream):
        reader = arrow.ipc.open_stream(stream)
        return arrow.Table.from_batches(_bounded(file, reader), reader.schema)


def _columns_of(table: Any, path: Path, size: int) -> Arrays:
    """Return an Arrow table's columns: numbers, texts, lists of equal length, or pictures."""
    return {
        name: partial(_arrow_column, table[place], f"{path}: '{shortened(name)}'", size)
        for place, name in enumerate(table.column_names)
    }


def _arrow_column(column: Any, label: str, size: int) -> Array:
    arrow, kind = _library("pyarrow", "tables"), column.type
    most = LARGEST_INFLATED + MOST_INFLATED * size
    if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return read_pictures([row and row["bytes"] for row in column.to_pylist()], label)
    try:
        whole = column.combine_chunks()
        if arrow.types.is_dictionary(kind):
            return _of_categories(whole, label, size, most)
        array = _equal_rows(arrow, whole)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise TrainingError(f"{label} can't be read ({reason_of(error)})") from error
    if array is None or array.dtype.kind not in f"{_KINDS}O":
        raise TrainingError(
            f"{label} has lists of different lengths, or missing values",
            "pad the lists, or read them by a function of your own: file.py:function",
        )
    if array.dtype.kind == "O":
        return _column_of_texts(array, label, most)
    # Small numbers of a table are numbers, no pixels.
    return array.astype(np.int16) if array.dtype == np.uint8 else array


def _of_categories(column: Any, label: str, size: int, most: int) -> Array:
    """Return a column that stores each of its values once."""
    arrow = _library("pyarrow", "tables")
    values = _arrow_column(arrow.chunked_array([column.dictionary]), label, size)
    places = _arrow_column(arrow.chunked_array([column.indices]), label, size)
    if values.dtype.kind == "U":
        _check_texts(values.dtype.itemsize // 4 * len(places), label, most)
    if len(places) and not 0 <= places.min() <= places.max() < len(values):
        raise TrainingError(f"{label} names categories that it does not hold")
    return values[places]


def _equal_rows(arrow: Any, column: Any) -> Array | None:
    """Return a column as an array, lists as further axes; None if something is missing."""
    compute, types = _library("pyarrow.compute", "tables"), arrow.types
    shape, are_lists = [len(column)], (types.is_list, types.is_large_list, types.is_fixed_size_list)
    while any(is_such(column.type) for is_such in are_lists):
        lengths = compute.list_value_length(column).unique().to_pylist()
        if len(lengths) != 1 or lengths == [None]:
            return None
        shape += lengths
        column = column.flatten()
    if column.null_count:
        return None
    array: Array = column.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _column_of_texts(array: Array, label: str, most: int) -> Array:
    texts = array.reshape(-1).tolist()
    if not all(isinstance(text, str) for text in texts):
        raise TrainingError(f"{label} holds neither numbers nor texts")
    return _texts(texts, label, most).reshape(array.shape)


# Pictures


def read_pictures(pictures: Sequence[Path | bytes | None], label: str = "") -> Array:
    """Return pictures as bytes (n, channels, height, width), which must be equally large."""
    found = np.empty((0,), np.uint8)
    stored = 0
    for place, picture in enumerate(pictures):
        name = str(picture) if isinstance(picture, Path) else label
        size, pixels = _pixels(picture, name)
        stored += size
        if not place:
            found, first = _room(len(pictures), pixels.shape, name), name
        if pixels.shape != found.shape[1:]:
            raise TrainingError(
                f"{name}: is {pixels.shape}, expected {found.shape[1:]} as {first}",
                "make all pictures equally large, or read them by a function of your own",
            )
        if (place + 1) * pixels.nbytes > LARGEST_INFLATED // 2 + _MOST_UNPACKED * stored:
            raise TrainingError(f"{name}: far more pixels than its pictures are stored in")
        found[place] = pixels
    return found


def _room(count: int, shape: tuple[int, ...], name: str) -> Array:
    try:
        return np.empty((count, *shape), np.uint8)
    except (MemoryError, ValueError) as error:
        raise TrainingError(f"{name}: {count:,} pictures like it don't fit into memory") from error


def _pixels(picture: Path | bytes | None, name: str) -> tuple[int, Array]:
    """Return how many bytes a picture is stored in, and its pixels (channels, height, width)."""
    if isinstance(picture, Path):
        with _opened(picture, "picture") as (file, stream):
            return file.size, _decoded(stream, file.size, name)
    if not isinstance(picture, bytes):
        raise TrainingError(f"{name}: no picture, but {type(picture).__name__}")
    try:
        return len(picture), _decoded(io.BytesIO(picture), len(picture), name)
    except (FedmergeError, MemoryError):
        raise
    except Exception as error:
        raise TrainingError(f"{name}: no picture that can be read ({_reason(error)})") from error


def _decoded(stream: IO[bytes], size: int, name: str) -> Array:
    image = _library("PIL.Image", "pictures")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is refused or means nothing here
        with image.open(stream, formats=_PICTURE_FORMATS) as picture:
            width, height = picture.size
            if _PER_PIXEL * width * height > LARGEST_INFLATED + MOST_INFLATED * size:
                raise TrainingError(f"{name}: {width:,} × {height:,} pixels in {size:,} bytes")
            kind = "L" if picture.mode in ("1", "L", "I;16") else "RGB"
            pixels = np.asarray(picture.convert(kind))
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _library(name: str, what: str) -> ModuleType:
    """Return a library that only some formats need."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(
            f"{name.partition('.')[0]} is not installed, which reads {what}",
            "pip install 'fedmerge[data]'",
        ) from None
