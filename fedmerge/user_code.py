"""The one boundary around user code: how it is named, loaded and run, and how it fails."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import itertools
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from fedmerge.errors import (
    FedmergeError,
    ModelCodeError,
    TrainingCodeError,
    TrainingError,
    UsageError,
    UserCodeError,
)
from fedmerge.process import guarded, is_interrupt
from fedmerge.tracebacks import USERS, headline, last_line, whole_traceback

if TYPE_CHECKING:
    from torch import Tensor, nn


_REFERENCE = "_fedmerge_reference"  # the attribute by which objects know how the user named them
_block: ContextVar[user_code | None] = ContextVar("_block", default=None)


class user_code:  # noqa: N801 (a context, like those of contextlib)
    """A block that runs the user's code: what it raises leaves as an error that says `what`.

    `of` is the object whose code it is, which may know how the user named it. Fedmerge's own
    errors pass, and so do interrupts that were heard. What our callbacks raised (`own_code`)
    leaves instead of what became of it. What the code prints goes to stderr, since stdout is for
    results. What it changed about the process is put back.
    """

    def __init__(
        self,
        what: str,
        *,
        of: object = None,
        error: type[UserCodeError] = ModelCodeError,
        hint: str = "",
    ) -> None:
        self._what, self._of, self._error, self._hint = what, of, error, hint
        self._own: list[BaseException] = []
        self._printed = redirect_stdout(sys.stderr)

    def __enter__(self) -> None:
        self._guard = guarded()
        self._guard.__enter__()
        self._printed.__enter__()
        self._token = _block.set(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        reason: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _block.reset(self._token)
        self._printed.__exit__(kind, reason, trace)
        self._guard.__exit__(None, None, None)
        if is_interrupt(reason):
            raise KeyboardInterrupt from None
        if self._own:
            raise self._own[0]
        if reason is not None and not isinstance(reason, FedmergeError):
            problem = f"{self._what}: {last_line(reason)}{named(self._of)}"
            brief = f"{self._what}: {headline(reason)}"
            details = whole_traceback(reason)
            raise self._error(problem, self._hint, details=details, brief=brief) from reason

    def keep(self, error: BaseException) -> None:
        """Keep an error of ours, whatever the code around it makes of it."""
        self._own.append(error)


class StopRun(Exception):  # noqa: N818 (it is no error)
    """Raised in a block of our own: the rest of what the user's code does is of no interest."""


_NOT_OURS = (StopRun, RecursionError, MemoryError)


class own_code:  # noqa: N801
    """A block of our own that the user's code calls: what it raises is no failure of theirs.

    But for stack and memory, of which the code around it may have left too little.
    """

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = _block.get()
        if block is not None and error is not None and not isinstance(error, _NOT_OURS):
            block.keep(error)


def remember(built: Any, reference: str) -> None:
    """Let an object know by which reference the user's code gave it."""
    try:
        vars(built)[_REFERENCE] = reference
    except TypeError:  # it has no attributes of its own
        return


def named(built: Any) -> str:
    """Return how the user named an object, for the end of a message."""
    try:
        return f", in '{vars(built)[_REFERENCE]}'"
    except (TypeError, KeyError):
        return ""


def copied_object(built: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that knows by which reference the user's code gave the original."""
    made = copy.deepcopy(built, memo)
    try:
        remember(made, vars(built)[_REFERENCE])
    except (TypeError, KeyError):
        return made
    return made


def run_model(model: nn.Module, inputs: Sequence[Any], *, hint: str = "") -> Any:
    """Return what a model makes of its inputs."""
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs if hasattr(x, "shape"))
    with user_code(f"the model does not run on inputs of shape {shapes}", of=model, hint=hint):
        return model(*inputs)


def placed(model: nn.Module, *where: Any) -> nn.Module:
    """Return a model on a device, or in a precision."""
    with user_code(f"the model can't be moved to {where[0]}", of=model):
        moved: nn.Module = model.to(*where)
        return moved


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module of a model with its name, each once."""
    with user_code("the model does not say what it consists of", of=model):
        return list(model.named_modules())


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by all of their names."""
    with user_code("the model does not say what its parameters are", of=model):
        return dict(model.named_parameters(remove_duplicate=False))


def state_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict."""
    from torch import Tensor  # the command line is quicker without

    with user_code("the model gives no state dict", of=model):
        state = model.state_dict(keep_vars=keep_vars)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def optional_tensors(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's tensors that a file may lack: the model keeps its own.

    Torch tells which, and so does a model's own way of loading: counters of batch norms, which
    files from before torch 0.4.1 don't have. Floats with axes are never among them.
    """
    own = {n: t for n, t in state_of(model).items() if not (t.is_floating_point() and t.dim())}
    try:
        with user_code("the model does not load a state dict", of=model):
            missing = model.load_state_dict({}, strict=False).missing_keys
    except UserCodeError:
        return frozenset()
    return frozenset(own) - set(missing)


def load_state(model: nn.Module, state: dict[str, Any], *, strict: bool = True) -> None:
    """Load a state dict into a model; a tied tensor needs one of its names only."""
    named = parameters_of(model)
    known = {id(named[name]): value for name, value in state.items() if name in named}
    tied = {name: known[id(own)] for name, own in named.items() if id(own) in known}
    with user_code("the model does not load the tensors", of=model):
        model.load_state_dict({**tied, **state}, strict=strict)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode for a while."""
    before = {module: module.training for _, module in parts_of(model)}
    with user_code("the model can't be put into evaluation mode", of=model):
        model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def logits_of(outputs: Any) -> Tensor:
    """Return the logits among what a model returns: alone, first of a tuple, or by that name."""
    from torch import Tensor

    found = outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        found = outputs["logits"]
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise TrainingError(
            f"the model returns {type(outputs).__name__}, expected logits",
            "write a task of your own for such outputs: `task=file.py:object`",
        )
    return found


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seed torch, numpy and Python for a while, and put their states back.

    Models draw from any of the three: dropout, augmentation, the initialisation itself.
    """
    import numpy as np
    import torch

    python, old = random.getstate(), np.random.get_state()  # noqa: NPY002 (not ours: the user's)
    kind, _, index = device.partition(":")
    with torch.random.fork_rng([int(index or 0)] if kind == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(old)  # noqa: NPY002


def derived_seed(seed: int, *path: str | int) -> int:
    """Return a seed of its own for each path, such as a client's name and a round.

    >>> derived_seed(0, "client-1", 2) == derived_seed(0, "client-1", 2)
    True
    >>> derived_seed(0, "client-1", 2) == derived_seed(0, "client-1", 3)
    False
    """
    text = json.dumps([seed, *path]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little")


def is_reference(text: str) -> bool:
    """Whether a text is `place:name` rather than a path.

    >>> is_reference("my_data.py:load"), is_reference("shards/c1.npz"), is_reference("C:/c1.npz")
    (True, False, False)
    """
    place, separator, name = text.rpartition(":")
    return bool(place) and bool(separator) and name.replace(".", "").isidentifier()


HANDED_OVER = "object"  # the place of references to objects that were given in Python
_handed_over = ModuleType(HANDED_OVER)
_handing_over = threading.Lock()  # clients of one process may do so at the same time


@contextmanager
def handing_over() -> Iterator[Callable[[object], str]]:
    """Give objects of this process references, by which they are found here for a while."""
    names: list[str] = []

    def hand_over(value: object) -> str:
        with _handing_over:
            numbered = map("given_{}".format, itertools.count())
            names.append(next(name for name in numbered if not hasattr(_handed_over, name)))
            setattr(_handed_over, names[-1], value)
        return f"{HANDED_OVER}:{names[-1]}"

    try:
        yield hand_over
    finally:
        for name in names:
            delattr(_handed_over, name)


def is_handed_over(reference: str) -> bool:
    """Whether a reference is of an object of this process, which no other process knows."""
    return reference.partition(":")[0] == HANDED_OVER


def find_object(reference: str, *, what: str) -> object:
    """Return the object that a reference names; this runs the user's code.

    `what` says in messages what the object should be, e.g. "task".
    """
    if not is_reference(reference):
        raise UsageError(
            f"'{reference}' names no {what}", "give package.module:name or file.py:name"
        )
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise UsageError(f"'{place}': there is no such file", f"it should define the {what}")
    with loaded(place, error=TrainingCodeError, hint=f"it should define the {what}") as code:
        found = attribute_of(code, name, error=TrainingCodeError)
    if found is None:
        raise UsageError(f"'{place}' defines no '{name}'", f"it should be the {what}")
    return found


def attribute_of(code: ModuleType, name: str, *, error: type[UserCodeError]) -> object:
    """Return what a dotted name stands for in the user's code, None if there is nothing."""
    found: object = code
    with user_code(f"'{name}' can't be looked up", error=error):
        for part in name.split("."):
            found = getattr(found, part, None)
    return found


@contextmanager
def loaded(place: str, *, error: type[UserCodeError], hint: str) -> Iterator[ModuleType]:
    """Run a file (`.py`) or import a module, and keep its surroundings importable for a while.

    These are the file's folder, or the current one for a module. What fails is an `error`.
    """
    if place == HANDED_OVER:
        yield _handed_over
        return
    path = Path(place).expanduser()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise error(f"'{path}': there is no such file", hint)
    with _importable(path.resolve().parent if is_file else Path.cwd()):
        yield _run_file(path, error) if is_file else _import_module(place, error, hint)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path for a while."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _import_module(name: str, error: type[UserCodeError], hint: str) -> ModuleType:
    with user_code(f"'{name}' cannot be imported", error=error, hint=hint):
        code = importlib.import_module(name)
    USERS.add(str(_home_of(name.partition(".")[0]).resolve()))
    return code


def _home_of(package: str) -> Path:
    """Return the folder of a package that was imported, or the file of a single module."""
    file = Path(sys.modules[package].__file__ or Path.cwd())
    return file.parent if file.name == "__init__.py" else file


def _run_file(path: Path, error: type[UserCodeError]) -> ModuleType:
    USERS.add(str(path.resolve().parent))
    name = f"fedmerge_user_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code  # dataclasses and pickling look their module up
    hint = "the file runs as a module: keep training code under `if __name__ == '__main__'`"
    try:
        with user_code(f"'{path}' cannot be loaded", error=error, hint=hint):
            spec.loader.exec_module(code)
    except FedmergeError:
        del sys.modules[name]
        raise
    return code
