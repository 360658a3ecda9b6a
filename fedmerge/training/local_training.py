"""Training of one model on one shard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingCodeError, TrainingError, UsageError
from fedmerge.training.evaluation import call_model, calling_task, evaluate, naming
from fedmerge.training.shards import Inputs, Shard
from fedmerge.training.tasks import LearningTask
from fedmerge.user_code import (
    optional_tensors,
    parameters_of,
    parts_of,
    placed,
    seeded,
    state_of,
    user_code,
)
from fedmerge.values.arrays import Array, DType, IntArray
from fedmerge.values.run_settings import TrainSettings, arguments_of
from fedmerge.values.wording import Progress, silent
from fedmerge.values.work import Arrays, Place

_MOST_NAMES = 5  # in a message


def load_arrays(model: nn.Module, arrays: Arrays) -> frozenset[str]:
    """Copy arrays into the module's parameters and buffers; every one must be given a value.

    Tied tensors may be given by any one of their names. Returns the names of those that torch
    does without when it loads a file, and that have no value here.
    """
    tensors = named_tensors(model)
    if unknown := [name for name in arrays if name not in tensors]:
        raise TrainingError(f"the model has no {_quoted(unknown)}")
    given = {_memory(tensors[name]) for name in arrays}
    missing = [name for name, tensor in tensors.items() if _memory(tensor) not in given]
    optional = optional_tensors(model) if missing else frozenset()
    if needed := [name for name in missing if name not in optional]:
        raise TrainingError(f"there are no values for the model's {_quoted(needed)}")
    for name, array in arrays.items():
        if tensors[name].shape != array.shape:
            found = tuple(tensors[name].shape)
            raise TrainingError(f"the model's '{name}' is {found}, expected {array.shape}")
        tensors[name].copy_(torch.tensor(np.asarray(array)))
    return frozenset(missing)


def read_arrays(model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Array]:
    """Return copies of the module's tensors, tied ones once, without some names.

    Half-precision tensors are widened to float32, which numpy knows.
    """
    tensors = named_tensors(model)
    seen = {_memory(tensors[name]) for name in without if name in tensors}
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if _memory(tensor) in seen:
            continue
        seen.add(_memory(tensor))
        arrays[name] = _as_array(tensor).copy()
    return arrays


def array_dtypes(model: nn.Module) -> dict[str, DType]:
    """Return the types of the arrays that `read_arrays` gives, for all names of tied tensors."""
    return {
        name: _as_array(tensor[:0] if tensor.ndim else tensor).dtype
        for name, tensor in named_tensors(model).items()
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of every tensor of the module's state, by any of its names."""
    firsts: dict[tuple[object, ...], str] = {}
    return {
        name: firsts.setdefault(_memory(tensor), name)
        for name, tensor in named_tensors(model).items()
    }


def _as_array(tensor: torch.Tensor) -> Array:
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    array: Array = wide.cpu().numpy()
    return array


def named_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the module's state, sharing its memory."""
    return state_of(model)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is equal for two names of one tensor only."""
    if not tensor.numel():
        return (id(tensor),)  # it has no memory to tell it by
    return (tensor.data_ptr(), tensor.shape, tensor.stride())


def _quoted(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


_DIVERGED_HINT = "lower `learning_rate`, or limit the gradient with `clip_norm`"


@dataclass(frozen=True)
class Trained:
    """What training gave."""

    arrays: Arrays  # every tensor that was not frozen
    losses: tuple[float, ...]  # mean over the batches of each epoch, without the proximal term
    samples: int
    seconds: float


def train_model(
    model: nn.Module,
    shard: Shard,
    task: LearningTask,
    settings: TrainSettings,
    *,
    frozen: Collection[str] = (),
    place: Place = Place(),  # noqa: B008 (a frozen value)
    held: Shard | None = None,
    progress: Progress = silent,
) -> Trained:
    """Train the module in place, with the tensors named in `frozen` left as they are.

    A module that keeps statistics, such as a batch norm, and has a frozen tensor is used as in
    evaluation. On CPU, the same module, shard, settings and threads give the same bits. Rate,
    epochs and decay are the settings' own: `TrainSettings.at` gives those of a stage. With
    `patience`, `held` tells which epoch's model is kept.
    """
    began = time.monotonic()
    placed(model, place.device)
    with limited_threads(place.threads), seeded(settings.seed, place.device), naming(shard):
        with _freezing(model, frozen) as trainable:
            training = _Training(model, shard, task, settings, trainable, place.device, held)
            losses = training.run(progress)
        arrays = read_arrays(model, without=frozen)
        _check_weights(named_tensors(model))
    return Trained(arrays, losses, len(shard), time.monotonic() - began)


class _Training:
    """The loop over epochs and batches, with what it keeps between them."""

    def __init__(
        self,
        model: nn.Module,
        shard: Shard,
        task: LearningTask,
        settings: TrainSettings,
        trainable: Sequence[nn.Parameter],
        device: str,
        held: Shard | None,
    ) -> None:
        self._model, self._shard, self._task, self._settings = model, shard, task, settings
        self._trainable, self._device = trainable, device
        anchored = trainable if settings.proximal else ()
        self._start = [parameter.detach().clone() for parameter in anchored]
        self._held = held
        self._optimizer = make_optimizer(trainable, settings)
        self._scheduler = make_scheduler(self._optimizer, settings)
        self._precision: Precision = choose_precision(device, mixed=settings.mixed_precision)
        self._scaler = self._precision.scaler()
        self._shuffler = torch.Generator().manual_seed(settings.seed)

    def run(self, progress: Progress) -> tuple[float, ...]:
        """Train all epochs and return the mean loss of each."""
        means: list[float] = []
        best = _Best(self._model, self._settings.patience)
        for epoch in range(self._settings.epochs):
            if epoch and self._shard.draw is not None:
                self._shard = self._shard.draw()
            batches = _batches(len(self._shard), self._settings.batch_size, self._shuffler)
            losses = []
            for number, rows in enumerate(batches):
                place = number % self._settings.accumulate
                size = min(self._settings.accumulate, len(batches) - number + place)
                losses.append(self._gradients(rows, size, is_first=not place))
                if place + 1 == size:
                    self._step()
                done = epoch * len(batches) + number + 1
                progress("training", done, self._settings.epochs * len(batches))
            # Looked at once per epoch: reading a number makes an accelerator wait.
            means.append(float(torch.stack(losses).cpu().double().mean()))
            if not math.isfinite(means[-1]):
                raise TrainingError(
                    f"the loss became NaN or infinite in epoch {epoch + 1}", _DIVERGED_HINT
                )
            if self._scheduler is not None:
                with _own_arguments("scheduler"):
                    self._scheduler.step()
            if best.has_enough(self._held_loss):
                break
        best.restore()
        return tuple(means)

    def _held_loss(self) -> float:
        assert self._held is not None
        return evaluate(self._model, self._held, self._task, device=self._device).loss

    def _gradients(self, rows: IntArray, size: int, *, is_first: bool) -> torch.Tensor:
        """Add a batch's gradients, one of `size` that make a step, and return its loss."""
        x, y = self._shard.batch(rows, self._device)
        if is_first:
            self._optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss = self._loss(x, y)
        _check_loss(loss)
        scaled = self._scaler.scale((loss + self._proximal_term()) / size)
        with user_code("the model can't be trained", of=self._model, error=TrainingCodeError):
            torch.autograd.backward(scaled)
        return loss.detach()

    def _loss(self, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        """Return a batch's loss: the task's, or what its own step of training makes of it."""
        own_step = getattr(self._task, "train_step", None)
        if own_step is not None:
            with calling_task(self._task):
                loss: torch.Tensor = own_step(self._model, x, y)
            return loss
        outputs = call_model(self._model, x)
        with calling_task(self._task):
            return self._task.loss(outputs, y)

    def _step(self) -> None:
        """Let the optimizer take a step."""
        with user_code("the model can't be trained", of=self._model, error=TrainingCodeError):
            if self._settings.clip_norm is not None:
                self._scaler.unscale_(self._optimizer)
                nn.utils.clip_grad_norm_(self._trainable, self._settings.clip_norm)
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _proximal_term(self) -> torch.Tensor | float:
        """Return FedProx's mu/2 ‖w - w_start‖² over the trained parameters."""
        if not self._settings.proximal:
            return 0.0
        pairs = zip(self._trainable, self._start, strict=True)
        distance = torch.stack([(now - start).square().sum() for now, start in pairs]).sum()
        return self._settings.proximal / 2 * distance


class _Best:
    """The best model of the epochs so far, where somebody is patient enough to look for it."""

    def __init__(self, model: nn.Module, patience: int | None) -> None:
        self._model, self._patience = model, patience
        self._loss, self._since = math.inf, 0
        self._kept: dict[str, torch.Tensor] = {}

    def has_enough(self, measure: Callable[[], float]) -> bool:
        """Take note of the model as it is now; return whether it has not improved for long."""
        if self._patience is None:
            return False
        loss = measure()
        if loss < self._loss:
            self._loss, self._since = loss, 0
            self._kept = {n: t.detach().clone() for n, t in named_tensors(self._model).items()}
            return False
        self._since += 1
        return self._since >= self._patience

    def restore(self) -> None:
        """Give the model the weights that were best."""
        tensors = named_tensors(self._model)
        for name, kept in self._kept.items():
            tensors[name].copy_(kept)


def make_optimizer(
    parameters: Sequence[nn.Parameter], settings: TrainSettings
) -> torch.optim.Optimizer:
    """Return the optimizer that settings name, with those of their values that it takes."""
    known = _classes(torch.optim, torch.optim.Optimizer)
    made = _found(settings.optimizer, known, "optimizer")
    takes = signature(made).parameters
    usual: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if made is torch.optim.SGD:
        usual["momentum"] = settings.momentum
    own = {name: value for name, value in usual.items() if name in takes}
    with _own_arguments("optimizer"):
        arguments = {**own, **arguments_of(settings.optimizer_args)}
        optimizer: torch.optim.Optimizer = made(parameters, **arguments)
    return optimizer


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainSettings) -> Any:
    """Return the scheduler that settings name, None if they name none."""
    if settings.scheduler is None:
        return None
    schedulers = torch.optim.lr_scheduler
    made = _found(settings.scheduler, _classes(schedulers, schedulers.LRScheduler), "scheduler")
    with _own_arguments("scheduler"):
        return made(optimizer, **arguments_of(settings.scheduler_args))


_NOT_HERE = ("lbfgs", "reducelronplateau")  # they need a closure, or a number at every step


def _classes(module: Any, base: type) -> dict[str, Any]:
    """Return the classes of a module that can be named, by their names in small letters."""
    found = {name.lower(): made for name, made in vars(module).items() if isinstance(made, type)}
    return {
        name: made
        for name, made in found.items()
        if issubclass(made, base) and made is not base and name not in _NOT_HERE
    }


def _found(name: str, known: Mapping[str, Any], what: str) -> Any:
    if name.lower() not in known:
        names = sorted(made.__name__ for made in set(known.values()))
        raise UsageError(f"`{what}` is '{name}', which is none of torch's", ", ".join(names))
    return known[name.lower()]


@contextmanager
def _own_arguments(what: str) -> Iterator[None]:
    """Take what torch refuses of arguments for what is wrong with the options."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"`{what}` can't be made of its arguments: {error}") from error


@contextmanager
def _freezing(model: nn.Module, frozen: Collection[str]) -> Iterator[list[nn.Parameter]]:
    """Put the module into training mode but for its frozen parts, and yield what is trained."""
    if unknown := set(frozen) - set(named_tensors(model)):
        raise TrainingError(f"the model has no '{min(unknown)}' to freeze")
    parameters = parameters_of(model)
    wanted = {parameter: parameter.requires_grad for parameter in parameters.values()}
    modes = {module: module.training for _, module in parts_of(model)}
    with user_code("the model can't be put into training mode", of=model, error=TrainingCodeError):
        model.train()
        for module in _keepers_of_frozen(model, frozen):
            module.eval()
    for name in set(frozen) & set(parameters):
        parameters[name].requires_grad_(False)
    trainable = [parameter for parameter in wanted if parameter.requires_grad]
    try:
        if not trainable:
            raise TrainingError("every parameter is frozen: there is nothing to train")
        yield trainable
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, requires_grad in wanted.items():
            parameter.requires_grad_(requires_grad)
        for module, mode in modes.items():
            module.training = mode


def _keepers_of_frozen(model: nn.Module, frozen: Collection[str]) -> Iterator[nn.Module]:
    """Yield the modules that keep statistics in buffers and have a frozen tensor of their own."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = [name for name, _ in module.named_buffers(recurse=False)]
        names = [*buffers, *(name for name, _ in module.named_parameters(recurse=False))]
        if buffers and any(f"{prefix}.{name}".lstrip(".") in frozen for name in names):
            yield module


def _batches(samples: int, size: int, shuffler: torch.Generator) -> list[IntArray]:
    """Return all rows in random order in batches; a single last one joins the batch before.

    Batch norms cannot train on one sample.
    """
    order: IntArray = torch.randperm(samples, generator=shuffler).numpy()
    starts = [start for start in range(0, samples, size) if samples - start > 1 or not start]
    ends = [*starts[1:], samples]
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def _check_loss(loss: object) -> None:
    """Refuse a loss of the user's own task that nothing can be learnt from."""
    if not isinstance(loss, torch.Tensor):
        raise TrainingError(f"the task's loss is a {type(loss).__name__}, expected a scalar tensor")
    if loss.ndim or not loss.requires_grad:
        found = "no scalar" if loss.ndim else "independent of all that is trained"
        raise TrainingError(f"the task's loss is {found}: {tuple(loss.shape)}")


def _check_weights(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TrainingError(f"'{name}' has become NaN or infinite", _DIVERGED_HINT)


def choose_devices(asked: str) -> tuple[str, ...]:
    """Return the devices that `auto`, `cpu`, `cuda`, `mps` or a list like `cuda:0,cuda:1` mean.

    `auto` and `cuda` mean every GPU there is.
    """
    there = available_devices()
    if asked == "auto":
        best = there[0].partition(":")[0]
        return tuple(device for device in there if device.partition(":")[0] == best)
    chosen: list[str] = []
    for name in asked.split(","):
        found = [d for d in there if name in (d, d.partition(":")[0])]
        if not found:
            raise UsageError(f"`device={name}` is not there", f"here are: {', '.join(there)}")
        chosen += found
    return tuple(dict.fromkeys(chosen))


def available_devices() -> tuple[str, ...]:
    """Return all devices of this machine, the fastest kind first."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apple = ("mps",) if torch.backends.mps.is_available() else ()
    return (*(f"cuda:{number}" for number in range(gpus)), *apple, "cpu")


@dataclass(frozen=True)
class Precision:
    """The numbers that products are computed in; weights stay in float32."""

    device_type: str
    dtype: torch.dtype | None  # None: as they are

    def __call__(self) -> AbstractContextManager[object]:
        """Return the context in which the model is called."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether small gradients would vanish in these numbers."""
        return self.dtype == torch.float16

    def scaler(self) -> torch.amp.GradScaler:
        """Return what keeps small gradients from vanishing; it does nothing where none would."""
        return torch.amp.GradScaler(self.device_type, enabled=self.is_scaled)


def choose_precision(device: str, *, mixed: bool) -> Precision:
    """Return mixed precision where it is wanted and the device gains from it, else full."""
    kind = device.partition(":")[0]
    if not mixed or kind != "cuda":
        return Precision(kind, None)
    return Precision(kind, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for a while: sums depend on how they are cut into parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
