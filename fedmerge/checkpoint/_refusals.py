"""Why a pickle was refused, and what its owner can do about it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._failures import damaged, listed, reason_of
from fedmerge.checkpoint._globals import UNRESOLVED, Scan, is_plumbing
from fedmerge.errors import CheckpointError, UnsafeCheckpointError

RESAVE = 'save only the tensors: `torch.save(model.state_dict(), "model.pt")`'

_NEWEST_SAFE_PROTOCOL = 3  # torch's weights-only unpickler knows the opcodes up to here
_LONGEST_NAME = 120  # characters of a global's name that are shown
_NEEDED_CLASS = re.compile(r"allowlisted via `add_safe_globals`,? but got <class '(\w+\.[\w.]+)'>")
_REFUSED_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_DANGEROUS = {  # modules whose code nobody needs to load weights
    *("os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "importlib", "runpy"),
    *("builtins", "pty", "webbrowser", "code", "ctypes", "pickle", UNRESOLVED),
}


def refusal(
    path: Path,
    error: Exception,
    scan: Scan,
    options: ReadOptions,
    is_harmless: Callable[[str], bool] = is_plumbing,
) -> CheckpointError:
    """Return the error that says why torch's weights-only unpickler stopped at a pickle."""
    message = str(error)
    asked = [*scan.globals, *_NEEDED_CLASS.findall(message)]
    refused = [g for g in asked if not is_harmless(g) and g not in options.allow_globals]
    # A name that only torch saw is one that the end of the file cut off.
    if refused := refused or [g for g in _REFUSED_GLOBAL.findall(message) if g in asked]:
        return unsafe(path, refused)
    if scan.protocol > _NEWEST_SAFE_PROTOCOL:
        return CheckpointError(
            f"{path}: saved with pickle protocol {scan.protocol}, "
            "which torch's weights-only unpickler does not read",
            "save it again without `pickle_protocol`",
        )
    # What torch says before this mark is advice to load the file unsafely.
    _, _, reason = message.rpartition("WeightsUnpickler error:")
    return damaged(path, reason_of(error, reason))


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
