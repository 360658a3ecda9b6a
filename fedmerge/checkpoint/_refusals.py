"""Why a pickle was refused, and what its owner can do about it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedmerge.checkpoint._failures import damaged, listed, reason_of
from fedmerge.checkpoint._machine import UNRESOLVED
from fedmerge.checkpoint._pickle import PickleError, Unpickled
from fedmerge.errors import UnsafeCheckpointError

RESAVE = 'save only the tensors: `torch.save(model.state_dict(), "model.pt")`'

_LONGEST_NAME = 120  # characters of a global's name that are shown
_DANGEROUS = {  # modules whose code nobody needs to load weights
    *("os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "importlib", "runpy"),
    *("builtins", "pty", "webbrowser", "code", "ctypes", "pickle", "copyreg", UNRESOLVED),
}


def admitting(names: Sequence[str]) -> Callable[[str], bool]:
    """Return which names stand for inert objects, since the user admits them.

    Nobody needs those of modules that can do anything: what asks for them is no checkpoint.
    """
    admitted = {name for name in names if name.split(".")[0] not in _DANGEROUS}
    return admitted.__contains__


def understood(path: Path, read: Callable[[], Unpickled]) -> Unpickled:
    """Return what a pickle holds; refuse one that asks for code, or is damaged."""
    try:
        found = read()
    except PickleError as error:
        if error.asked:  # whatever else is wrong with it
            raise unsafe(path, error.asked) from error
        raise damaged(path, reason_of(error)) from error
    if found.asked:
        raise unsafe(path, found.asked)
    return found


def unsafe(path: Path, globals_: Sequence[str]) -> UnsafeCheckpointError:
    """Return the error of a file that asks for code."""
    asked = [ascii(name)[1:-1][:_LONGEST_NAME] for name in globals_]
    names = listed(asked, most=10)
    if any(name.startswith("torch.nn.modules.") for name in asked):
        return UnsafeCheckpointError(
            f"{path}: a pickled module, not a state dict; it asks for the code of {names}",
            f"load it where you trust it and {RESAVE}",
        )
    if any(name.split(".")[0] in _DANGEROUS for name in asked):
        hint = "do not load this file: such code can do anything to this machine"
    else:
        admit = " ".join(f"--allow-global {name}" for name in asked[:5])
        hint = f"where you trust it, {RESAVE}; or admit what you know to be harmless: {admit}"
    return UnsafeCheckpointError(
        f"{path}: refused, it asks for code that nobody allowed: {names}", hint
    )
