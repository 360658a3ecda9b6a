"""Quantised files are named as such when they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedmerge.checkpoint import open_checkpoint
from fedmerge.errors import CheckpointError

PLAIN = {"norm.weight": torch.ones(4), "fc.weight": torch.zeros(4, 4, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        (("fc.weight.absmax", "fc.weight.quant_map"), "bitsandbytes, 4 bits"),
        (("fc.weight.quant_state.bitsandbytes__nf4",), "bitsandbytes, 4 bits"),
        (("fc.SCB",), "bitsandbytes, 8 bits"),
        (("fc.qweight", "fc.qzeros", "fc.scales", "fc.g_idx"), "GPTQ"),
        (("fc.qweight", "fc.qzeros", "fc.scales"), "AWQ"),
        (("fc.weight_packed", "fc.weight_scale"), "compressed-tensors"),
        (("fc.W_q", "fc.scale", "fc.zero"), "HQQ"),
    ],
)
def test_quantised_weights_are_refused_by_their_librarys_name(
    beside: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    whole = PLAIN | {name: torch.ones(2) for name in beside}
    save_file(whole, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"quantised weights \({kind}"):
        open_checkpoint(tmp_path / "a.safetensors")
    save_file({k: v for k, v in whole.items() if k != beside[-1]}, tmp_path / "a.safetensors")
    if kind != "GPTQ":  # without its last tensor it is AWQ's
        open_checkpoint(tmp_path / "a.safetensors")


def test_gguf_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(64))
    with pytest.raises(CheckpointError, match=r"a GGUF/GGML file, quantised for llama\.cpp"):
        open_checkpoint(tmp_path / "a.gguf")
