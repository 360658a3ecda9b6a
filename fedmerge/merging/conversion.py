"""`convert`: write what was understood of a file as a plain state dict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedmerge.checkpoint import (
    Checkpoint,
    ReadOptions,
    check_output,
    open_checkpoint,
    parse_size,
    write_model,
)
from fedmerge.decoding import FLOAT_DTYPES
from fedmerge.values.clients import TensorInfo
from fedmerge.values.option_fields import check_value, checked, one_of


@checked
def convert(
    path: str | Path,
    output: str | Path,
    reading: ReadOptions | None = None,
    *,
    dtype: str | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
) -> Checkpoint:
    """Write a checkpoint's tensors under their plain names; return what was read.

    With `shard_size` (bytes, or text such as "2GB"), to safetensors shards and their index.
    """
    if dtype is not None:
        check_value("dtype", dtype, one_of(*FLOAT_DTYPES))
    path, output = Path(path), Path(output)
    most = parse_size(shard_size)
    check_output(output, inputs=[path], force=force, sharded=most is not None)
    checkpoint = open_checkpoint(path, reading or ReadOptions())
    own_names = {checkpoint.output_name(name): name for name in checkpoint.tensors}

    def converted(info: TensorInfo) -> TensorInfo:
        return replace(info, dtype=dtype) if dtype and info.is_float else info

    write_model(
        output,
        {written: converted(checkpoint.tensors[name]) for written, name in own_names.items()},
        lambda written: checkpoint.read(own_names[written]),
        aliases={
            checkpoint.output_name(alias): checkpoint.output_name(name)
            for alias, name in checkpoint.aliases.items()
        },
        force=force,
        shard_size=most,
    )
    return checkpoint
