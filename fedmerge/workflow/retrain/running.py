"""How a run is carried out: nothing here changes its result while nobody fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from fedmerge.engines import (
    Engine,
    LocalEngine,
    ProcessEngine,
    RayEngine,
    Share,
    check_installed,
    default_workers,
    is_address,
)
from fedmerge.engines import RetryPolicy as RetryPolicy  # also ours to hand out
from fedmerge.errors import UsageError
from fedmerge.training import choose_devices
from fedmerge.types.rules import Rule, number, one_of, positive, whole
from fedmerge.workflow.options import option_name

EngineName: TypeAlias = Literal["local", "processes", "ray"]


@dataclass(frozen=True)
class Running:
    """The engine, its places, and what is done about clients that fail."""

    engine: EngineName = "local"
    workers: int | None = None  # of processes; None: one per accelerator, or as the cores allow
    address: str | None = None  # of a Ray cluster; None: one of our own on this machine
    cpus_per_client: float | None = None  # of Ray; None: as many as threads
    gpus_per_client: float = 0  # of Ray
    device: str = "auto"  # or cpu, cuda, mps, or a list like cuda:0,cuda:1
    threads_per_client: int = 1  # changes the last bits of sums
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        values = {**vars(self), **vars(self.policy)}
        for name, (is_valid, expected) in _RULES.items():
            if values[name] is not None and not is_valid(values[name]):
                option = option_name(_OPTION_NAMES.get(name, name))
                raise UsageError(f"{option} is {values[name]!r}, expected {expected}")
        if self.engine == "ray":
            check_installed()

    @property
    def devices(self) -> tuple[str, ...]:
        """Where clients train; matching runs on the first."""
        return choose_devices(self.device)

    def check_enough(self, clients: int) -> None:
        """Refuse a minimum that not even all clients together reach."""
        least = self.policy.min_clients
        if least > clients:
            raise UsageError(f"--min-clients is {least}, but there are {clients} clients")

    def start_engine(self, clients: Sequence[str]) -> Engine:
        """Return the engine that runs these clients' work."""
        return _ENGINES[self.engine](self, clients)


def running_options(given: Mapping[str, Any]) -> Running:
    """Return how a run is carried out from a command line's values; None: not given."""
    asked = {name: value for name, value in given.items() if value is not None}
    own = {f.name: asked[f.name] for f in fields(Running) if f.name in asked}
    names = {f.name: _OPTION_NAMES.get(f.name, f.name) for f in fields(RetryPolicy)}
    policy = {name: asked[option] for name, option in names.items() if option in asked}
    return Running(**own, policy=RetryPolicy(**policy))


def _local(running: Running, clients: Sequence[str]) -> Engine:
    return LocalEngine(clients, device=running.devices[0], threads=running.threads_per_client)


def _processes(running: Running, clients: Sequence[str]) -> Engine:
    threads = running.threads_per_client
    workers = running.workers or default_workers(running.devices, threads)
    return ProcessEngine(clients, workers=workers, devices=running.devices, threads=threads)


def _ray(running: Running, clients: Sequence[str]) -> Engine:
    threads, gpus = running.threads_per_client, running.gpus_per_client
    return RayEngine(
        clients,
        address=running.address,
        share=Share(running.cpus_per_client or threads, gpus),
        device=_device_on_nodes(running),
        threads=threads,
    )


def _device_on_nodes(running: Running) -> str:
    """Return the kind of device that a client uses where Ray places it."""
    if running.device == "auto":
        return "cuda" if running.gpus_per_client else "cpu"
    kind = running.devices[0].partition(":")[0]
    if kind == "cuda" and not running.gpus_per_client:
        raise UsageError(
            f"--device is {running.device}, but --engine ray gives clients no GPUs",
            "ask for them with --gpus-per-client",
        )
    return kind


def _is_gpu_share(value: Any) -> bool:
    return number(0)(value) and (value < 1 or value == int(value))


_ENGINES: Mapping[EngineName, Callable[[Running, Sequence[str]], Engine]] = {
    "local": _local,
    "processes": _processes,
    "ray": _ray,
}


_OPTION_NAMES = {"timeout": "client_timeout"}
_RULES: Mapping[str, Rule] = {
    "engine": one_of(*_ENGINES),
    "workers": (whole(1), "a whole number from 1"),
    "address": (is_address, "HOST:PORT or auto"),
    "cpus_per_client": (positive, "a positive number"),
    "gpus_per_client": (_is_gpu_share, "a fraction of one or a whole number"),
    "threads_per_client": (whole(1), "a whole number from 1"),
    "retries": (whole(0), "a whole number from 0"),
    "min_clients": (whole(1), "a whole number from 1"),
    "timeout": (positive, "a positive number of seconds"),
}
