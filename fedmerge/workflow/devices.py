"""Where matrix products run."""

from fedmerge.errors import UsageError


def choose_device(asked: str) -> str:
    """Return the device to use: as asked, or the best that is there for `auto`."""
    import torch

    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if asked == "auto":
        return available[0]
    if asked.partition(":")[0] not in available:
        raise UsageError(f"--device {asked} is not there", f"here are: {', '.join(available)}")
    return asked
