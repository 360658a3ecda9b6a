"""Options of rounds, and of how they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fedmerge.errors import UsageError
from fedmerge.merging.options import Init, MatchOptions, RetrainMethod
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.option_fields import (
    Rule,
    changed,
    check_names,
    check_options,
    from_one,
    name_of,
    number,
    one_of,
    option,
    positive,
    seed_rule,
    whole,
    words_in,
)
from fedmerge.values.run_settings import RetryPolicy, TrainSettings, default_settings

if TYPE_CHECKING:  # the help of commands comes from here, which has to be quick
    from fedmerge.engines import Engine
    from fedmerge.training import Preparation
    from fedmerge.training.data_formats import Reading

DEFAULT_ROUNDS = 10  # of fedavg and fedprox
MOST_ROUNDS = 100_000  # all of them are laid out before the first
_PARTS = ("training", "preparation", "matching", "probes")  # fields that hold several options
DEFAULT_WEIGHT_RATE = 0.1
PAPER_MU = 1e-3  # the best that the paper found for FedProx


_OF_A_ROUND = ("seed", "proximal")  # settings of training that follow from `seed` and `mu`


@dataclass(frozen=True)
class RetrainOptions:
    """What the user may say about retraining; None leaves the choice to fedmerge.

    Every field changes the result and is kept in the record. The seed is that of `matching`.
    """

    method: RetrainMethod = option(
        "Match layer by layer, or average whole models; in afl, who loses more counts more",
        "fedma",
        values=words_in(RetrainMethod),
    )
    passes: int = option(
        "How often fedma goes through all layers; more than 1 is with communication",
        1,
        values="N",
    )
    rounds: int = option("Rounds of fedavg, fedprox and afl", DEFAULT_ROUNDS, values="N")
    mu: float = option("Proximal weight of fedprox", PAPER_MU, values="X")
    weight_rate: float = option(
        "How fast afl lets clients with high losses count more", DEFAULT_WEIGHT_RATE, values="X"
    )
    init: Init | None = option(
        "How models begin: each by itself, all alike, or each by itself (or from its checkpoint) "
        "and merged once as by `match`, where fedavg, fedprox and afl go on from",
        values=words_in(Init),
        unset="independent; shared for fedavg, fedprox and afl",
    )
    init_epochs: int | None = option(
        "Epochs before the first round, without checkpoints",
        values="N",
        unset="as many as in a round",
    )
    task: str = option(
        "What is learnt; a task of your own has loss and metrics",
        "classification",
        values="classification|language-model|FILE.py:NAME",
    )
    x_key: str | None = option(
        "Samples by their names: several are features of a table, or several inputs",
        values="NAME,NAME,…",
        unset="x; of a table all columns but the targets",
    )
    y_key: str | None = option("Targets by their name", values="NAME", unset="y")
    classes: str | None = option(
        "Names of classes in their order, where targets or folders are named", values="NAME,NAME,…"
    )
    held_out: float = option(
        "Share of its samples that a client only measures global models with", 0.0, values="X"
    )
    no_class_counts: bool = option(
        "Clients tell nobody how many samples of each class they have", False
    )
    training: TrainSettings | None = None  # None: the paper's for the task
    preparation: Preparation = field(default_factory=lambda: _no_preparation())
    matching: MatchOptions = field(default_factory=MatchOptions)
    probes: ProbeOptions = field(default_factory=ProbeOptions)  # of `init=matched`

    def __post_init__(self) -> None:
        check_options(self, _RULES)
        if self.training is None:
            object.__setattr__(self, "training", default_settings(self.task))
        if self.init is None:
            from fedmerge.federated.algorithms import METHODS  # which help does without

            object.__setattr__(self, "init", METHODS[self.method].init)
        if self.init == "matched" and self.method == "fedma":
            raise UsageError(
                "`init=matched` is for methods that average", "fedma matches in every round"
            )
        if self.settings.patience is not None and not self.held_out:
            raise UsageError(
                "`patience` needs samples to judge epochs by", "hold some out: `held_out=0.1`"
            )
        if self.init != "matched" and self.probes != ProbeOptions():
            raise UsageError("`probe_data` is for `init=matched`")

    @property
    def reading(self) -> Reading:
        """Which columns of the clients' data are samples and targets."""
        from fedmerge.training.data_formats import Reading

        return Reading(_names(self.x_key), self.y_key or "", _names(self.classes))

    @property
    def proximal(self) -> float:
        """FedProx's mu, 0 for methods that hold clients to nothing."""
        from fedmerge.federated.algorithms import METHODS

        return self.mu if METHODS[self.method].is_proximal else 0.0

    @property
    def seed(self) -> int:
        """What all randomness follows from."""
        return self.matching.seed

    @property
    def settings(self) -> TrainSettings:
        """How clients train in a round."""
        assert self.training is not None
        return self.training

    def to_json(self) -> dict[str, Any]:
        """Return the options by the names of the command line, without those of the matching."""
        from fedmerge.merging.record_schema import RecordedRounds

        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _PARTS}
        training = asdict(self.settings)
        for of_a_round in _OF_A_ROUND:
            del training[of_a_round]
        prepared = self.preparation
        normalize = ",".join(map(str, (*prepared.mean, *prepared.std))) or None
        images: dict[str, Any] = {"normalize": normalize, "channels_last": prepared.channels_last}
        return asdict(RecordedRounds(**own, **training, **images))


def retrain_options(given: Mapping[str, Any], matching: MatchOptions) -> RetrainOptions:
    """Return what `to_json` was made of, or what a command line gives; None is not given."""
    from fedmerge.training import Preparation, parse_normalize

    asked = {name: value for name, value in given.items() if value is not None}
    own = {f.name: asked[f.name] for f in fields(RetrainOptions) if f.name in asked}
    trained = {f.name: asked[f.name] for f in fields(TrainSettings) if f.name in asked}
    trained.pop("seed", None)
    defaults = default_settings(own.get("task", "classification"))
    mean, std = parse_normalize(asked["normalize"]) if "normalize" in asked else ((), ())
    preparation = Preparation(mean, std, asked.get("channels_last", False))
    data = asked.get("probe_data")
    return RetrainOptions(
        **own,
        training=replace(defaults, **trained),
        preparation=preparation,
        matching=matching,
        probes=ProbeOptions() if data is None else ProbeOptions(data=data, preparation=preparation),
    )


def _no_preparation() -> Preparation:
    from fedmerge.training import Preparation

    return Preparation()


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


_SOME: Rule = (whole(1, MOST_ROUNDS), f"a whole number from 1 to {MOST_ROUNDS:,}")
_RULES: Mapping[str, Rule] = {
    "method": one_of(*get_args(RetrainMethod)),
    "passes": _SOME,
    "rounds": _SOME,
    "mu": (number(0), "a number from 0"),
    "weight_rate": (number(0), "a number from 0"),
    "init": one_of(*get_args(Init)),
    "init_epochs": from_one(),
    "held_out": (lambda share: number(0, 1)(share) and share < 1, "a number from 0 to below 1"),
}


EngineName: TypeAlias = Literal["local", "processes", "ray"]


@dataclass(frozen=True)
class Running:
    """The engine, its places, and what is done about clients that fail."""

    engine: EngineName = option(
        "Train clients one by one here, in processes, or over a Ray cluster",
        "local",
        values=words_in(EngineName),
    )
    workers: int | None = option(
        "Processes", values="N", unset="one per GPU, else as the cores allow"
    )
    address: str | None = option(
        "The Ray cluster; auto is the one that Ray finds",
        values="HOST:PORT|auto",
        unset="one of its own here",
    )
    cpus_per_client: float | None = option(
        "CPUs of one client on Ray", values="X", unset="as threads_per_client"
    )
    gpus_per_client: float = option("GPUs of one client on Ray", 0, values="X", unset="0")
    device: str = option(
        "Where clients train; matching runs on the first",
        "auto",
        values="auto|cpu|cuda|mps|cuda:0,cuda:1",
    )
    threads_per_client: int = option(
        "CPU threads of one client; they change the last bits of sums", 1, values="N"
    )
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        check_options(self, _RUNNING_RULES)
        if self.engine == "ray":
            from fedmerge.engines import check_installed

            check_installed()

    @property
    def devices(self) -> tuple[str, ...]:
        """Where clients train; matching runs on the first."""
        from fedmerge.training import choose_devices

        return choose_devices(self.device)

    def check_enough(self, clients: int) -> None:
        """Refuse a minimum that not even all clients together reach."""
        least = self.policy.min_clients
        if least > clients:
            raise UsageError(f"`min_clients` is {least}, but there are {clients} clients")

    def start_engine(self, clients: Sequence[str]) -> Engine:
        """Return the engine that runs these clients' work."""
        return _ENGINES[self.engine](self, clients)


def running_options(given: Mapping[str, Any]) -> Running:
    """Return how a run is carried out from a command line's values; None: not given."""
    asked = {name: value for name, value in given.items() if value is not None}
    own = {f.name: asked[f.name] for f in fields(Running) if f.name in asked}
    names = {f.name: name_of(f) for f in fields(RetryPolicy)}
    policy = {name: asked[option] for name, option in names.items() if option in asked}
    return Running(**own, policy=RetryPolicy(**policy))


def _local(running: Running, clients: Sequence[str]) -> Engine:
    from fedmerge.engines import LocalEngine

    return LocalEngine(clients, device=running.devices[0], threads=running.threads_per_client)


def _processes(running: Running, clients: Sequence[str]) -> Engine:
    from fedmerge.engines import ProcessEngine, default_workers

    threads = running.threads_per_client
    workers = running.workers or default_workers(running.devices, threads)
    return ProcessEngine(clients, workers=workers, devices=running.devices, threads=threads)


def _ray(running: Running, clients: Sequence[str]) -> Engine:
    from fedmerge.engines import RayEngine, Share

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
            f"`device` is {running.device}, but `engine=ray` gives clients no GPUs",
            "ask for them with `gpus_per_client`",
        )
    return kind


def _is_address(value: Any) -> bool:
    from fedmerge.engines import is_address

    return isinstance(value, str) and is_address(value)


def _is_gpu_share(value: Any) -> bool:
    return number(0)(value) and (value < 1 or value == int(value))


_ENGINES: Mapping[EngineName, Callable[[Running, Sequence[str]], Engine]] = {
    "local": _local,
    "processes": _processes,
    "ray": _ray,
}


_RUNNING_RULES: Mapping[str, Rule] = {
    "engine": one_of(*_ENGINES),
    "workers": from_one(),
    "address": (_is_address, "HOST:PORT or auto"),
    "cpus_per_client": (positive, "a positive number"),
    "gpus_per_client": (_is_gpu_share, "a fraction of one or a whole number"),
    "threads_per_client": from_one(),
}


@dataclass(frozen=True)
class PartitionOptions:
    """How a data set is split: evenly, skewed by Dir(dirichlet), or by a column's values."""

    clients: int | None = option("How many shards, unless a column names them", values="N")
    dirichlet: float | None = option(
        "Skewed: every class by shares from Dir(ALPHA); 0.5 in the paper", values="ALPHA"
    )
    homogeneous: bool = option("Evenly: every client gets as many of each class", False)
    by: str | None = option(
        "Naturally: one client per value of this further array", values="COLUMN"
    )
    min_samples: int = option(
        "Fewest samples of a client; of a column's values, those with fewer are left out",
        1,
        values="N",
    )
    seed: int = option("Seed of the split", 0, values="N")

    def __post_init__(self) -> None:
        check_options(self, _PARTITION_RULES)
        ways = [self.dirichlet is not None, self.homogeneous, self.by is not None]
        if sum(ways) != 1:
            raise UsageError(
                f"{sum(ways)} ways to split are given, expected one",
                "choose `dirichlet=ALPHA`, `homogeneous` or `by=COLUMN`",
            )
        if (self.clients is None) == (self.by is None):
            raise UsageError(
                "`clients` is needed, unless `by=COLUMN` names them"
                if self.by is None
                else "`clients` and `by` exclude each other: the column's values are the clients"
            )


_PARTITION_RULES: Mapping[str, Rule] = {
    "clients": (whole(2), "a whole number from 2"),
    "dirichlet": (positive, "a positive number"),
    "min_samples": from_one(),
    "seed": seed_rule(),
}


def changed_retrain_options(
    options: RetrainOptions | None, running: Running | None, changes: Mapping[str, Any]
) -> tuple[RetrainOptions, Running]:
    """Return options with changes by keyword: of rounds, of training, of matching, of running."""
    options, running = options or RetrainOptions(), running or Running()
    kinds = (RetrainOptions, TrainSettings, Running, MatchOptions)
    names_by_kind = [{field.name for field in fields(kind)} for kind in kinds]
    names_by_kind[1] -= set(_OF_A_ROUND)  # `seed` is that of the matching
    check_names(RetrainOptions, changes, also=set().union(*names_by_kind))
    taken: set[str] = set()
    parts: list[dict[str, Any]] = []
    for names in names_by_kind:  # a name that two kinds have is the first one's
        parts.append({name: v for name, v in changes.items() if name in names - taken})
        taken |= names
    of_rounds, of_training, of_running, of_matching = parts
    options = replace(options, **of_rounds)
    if of_training:
        options = replace(options, training=replace(options.settings, **of_training))
    if of_matching:
        options = replace(options, matching=replace(options.matching, **of_matching))
    return options, replace(running, **of_running)


def changed_partition_options(
    options: PartitionOptions | None, changes: Mapping[str, Any]
) -> PartitionOptions:
    """Return how data are split; without options, all of it is said by keyword."""
    if options is not None:
        return changed(options, changes)
    check_names(PartitionOptions, changes)
    if "clients" not in changes and "by" not in changes:
        raise UsageError("`clients` is missing: how many shards there are to be")
    return PartitionOptions(**changes)
