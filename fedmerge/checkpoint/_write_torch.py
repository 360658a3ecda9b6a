"""Write what `torch.load` reads, one tensor in memory at a time.

`torch.save` would need them all at once. The zip holds the same records: the pickled state dict,
in which every tensor names its storage, and one record with the bytes of each storage.
"""

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from fedmerge.checkpoint._model import Digests, Model
from fedmerge.checkpoint._record import readable, record_path
from fedmerge.checkpoint._staging import Staging
from fedmerge.checkpoint._tensors import digest, raw_bytes
from fedmerge.types.clients import TensorInfo

_ROOT = "archive"  # as torch.save names it for a buffer
_VERSION = b"3\n"  # of the format
_PROTOCOL = 2  # the pickle protocol of torch.save
_ALIGNMENT = 64  # bytes, for memory-mapped reading
_LOCAL_HEADER = 30  # bytes before a record's name
_ZIP64_HEADER = 20  # bytes that a large record's sizes take
_LARGE = 1 << 30  # bytes; zip needs such sizes from 4 GiB, the library from 2 GiB
_PADDING = b"FB"  # the extra field in which torch pads
_STORAGES = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "int16": torch.ShortStorage,
    "int8": torch.CharStorage,
    "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage,
}


def write_torch(model: Model, stage: Staging) -> Digests:
    """Write a state dict, and its record beside it."""
    stored = [name for name in model.tensors if name not in model.aliases]
    digests: Digests = {}
    with zipfile.ZipFile(stage.create(model.path), "w") as archive:
        _add(archive, "data.pkl", _pickled(model, stored))
        _add(archive, "byteorder", sys.byteorder.encode())
        for key, name in enumerate(stored):
            tensor = model.tensor(name)
            _add(archive, f"data/{key}", raw_bytes(tensor).data)
            digests[name] = digest(tensor)
        _add(archive, "version", _VERSION)
    digests = {name: digests[model.aliases.get(name, name)] for name in model.tensors}
    if model.record is not None:
        text = readable(model.record(digests))
        stage.create(record_path(model.path)).write(text.encode())
    return digests


def _add(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    """Add a record whose bytes begin at a multiple of the alignment, the same on any system."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 0
    info.file_size = memoryview(content).nbytes
    is_large = info.file_size > _LARGE
    fixed = _LOCAL_HEADER + len(info.filename) + 4 + (_ZIP64_HEADER if is_large else 0)
    assert archive.fp is not None
    padding = -(archive.fp.tell() + fixed) % _ALIGNMENT
    info.extra = _PADDING + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=is_large) as record:
        record.write(content)


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage while the state dict is pickled."""

    kind: type
    key: str
    count: int


class _Tensor:
    """Stands for a tensor: pickled as torch pickles one, but without its values."""

    def __init__(self, info: TensorInfo, key: int) -> None:
        self._info, self._key = info, str(key)

    def __reduce__(self) -> tuple[Any, ...]:
        info = self._info
        strides = torch.empty(info.shape, device="meta").stride()
        hooks: OrderedDict[int, object] = OrderedDict()
        place = (0, info.shape, strides, False, hooks)
        if info.dtype in _STORAGES:
            storage = _Storage(_STORAGES[info.dtype], self._key, info.size)
            return torch._utils._rebuild_tensor_v2, (storage, *place)
        dtype = getattr(torch, info.dtype)
        storage = _Storage(torch.UntypedStorage, self._key, info.size * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *place, dtype)


class _Pickler(pickle.Pickler):
    """A pickler that names storages as torch does."""

    def persistent_id(self, item: object) -> tuple[Any, ...] | None:
        """Return what stands for a storage in the file."""
        if isinstance(item, _Storage):
            return ("storage", item.kind, item.key, "cpu", item.count)
        return None


def _pickled(model: Model, stored: list[str]) -> bytes:
    tensors = {name: _Tensor(model.tensors[name], key) for key, name in enumerate(stored)}
    state = {name: tensors[model.aliases.get(name, name)] for name in model.tensors}
    content = io.BytesIO()
    _Pickler(content, protocol=_PROTOCOL).dump(state)
    return content.getvalue()
