"""The floor of an average of files: what anybody would write with the safetensors library."""

import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def main() -> None:
    """Average files, the last argument is the output."""
    *files, output = sys.argv[1:]
    opened = [safe_open(file, "pt") for file in files]
    averaged = {}
    for name in opened[0].keys():  # type: ignore[no-untyped-call] # noqa: SIM118 (no mapping)
        tensors = [file.get_tensor(name) for file in opened]  # type: ignore[no-untyped-call]
        mean = torch.stack([tensor.float() for tensor in tensors]).mean(0)
        averaged[name] = mean.to(tensors[0].dtype)
    save_file(averaged, output, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
