"""Quantised weights, told by the names of what stands beside them."""

from __future__ import annotations

from collections.abc import Collection

from fedmerge.errors import CheckpointError

# The last parts of a library's names, all of which must be there, and the library.
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("bitsandbytes__nf4",), "bitsandbytes, 4 bits"),
    (("bitsandbytes__fp4",), "bitsandbytes, 4 bits"),
    (("absmax", "quant_map"), "bitsandbytes, 4 bits"),
    (("SCB",), "bitsandbytes, 8 bits"),
    (("qweight", "qzeros", "g_idx"), "GPTQ"),
    (("qweight", "qzeros", "scales"), "AWQ"),
    (("weight_packed", "weight_scale"), "compressed-tensors"),
    (("weight_scale_inv",), "8-bit floats"),
    (("W_q", "scale", "zero"), "HQQ"),
)


def check_not_quantised(names: Collection[str], label: str) -> None:
    """Refuse weights that are stored as packed whole numbers with scales beside them."""
    by_end = {name.rpartition(".")[2]: name for name in names}
    for ends, kind in _KINDS:
        if all(end in by_end for end in ends):
            raise CheckpointError(
                f"{label}: quantised weights ({kind}: '{by_end[ends[0]]}'), which can't be merged",
                "merge the models before they are quantised, or save them dequantised (in "
                "transformers: model.dequantize(), then save_pretrained)",
            )
