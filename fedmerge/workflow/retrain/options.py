"""The options of retraining: what the user says that changes the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fedmerge.errors import UsageError
from fedmerge.training import Preparation as Preparation  # also ours to hand out
from fedmerge.training import TrainSettings as TrainSettings
from fedmerge.training import default_settings, parse_normalize
from fedmerge.types.rules import Rule, number, one_of, whole
from fedmerge.workflow.options import MatchOptions, option_name
from fedmerge.workflow.record_file import Init, RecordedRounds, RetrainMethod

DEFAULT_ROUNDS = 10  # of fedavg and fedprox
_PARTS = ("training", "preparation", "matching")  # fields that hold several options
PAPER_MU = 1e-3  # the best that the paper found for FedProx


@dataclass(frozen=True)
class RetrainOptions:
    """What the user may say about retraining; None leaves the choice to fedmerge.

    Every field changes the result and is kept in the record. The seed is that of `matching`.
    """

    method: RetrainMethod = "fedma"
    passes: int = 1  # of fedma: how often every layer is matched
    rounds: int = DEFAULT_ROUNDS  # of fedavg and fedprox
    mu: float = PAPER_MU  # of fedprox
    init: Init | None = None  # None: independent for fedma, else shared
    init_epochs: int | None = None  # None: as many as in a round
    task: str = "classification"
    training: TrainSettings | None = None  # None: the paper's for the task
    preparation: Preparation = field(default_factory=Preparation)
    matching: MatchOptions = field(default_factory=MatchOptions)

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise UsageError(f"{option_name(name)} is {value!r}, expected {expected}")
        if self.training is None:
            object.__setattr__(self, "training", default_settings(self.task))
        if self.init is None:
            object.__setattr__(self, "init", "independent" if self.is_matched else "shared")

    @property
    def is_matched(self) -> bool:
        """Whether units are matched, not averaged at the same place."""
        return self.method == "fedma"

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
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _PARTS}
        training = asdict(self.settings)
        for of_a_round in ("seed", "proximal"):  # follow from --seed and --mu
            del training[of_a_round]
        prepared = self.preparation
        normalize = ",".join(map(str, (*prepared.mean, *prepared.std))) or None
        images: dict[str, Any] = {"normalize": normalize, "channels_last": prepared.channels_last}
        return asdict(RecordedRounds(**own, **training, **images))


def retrain_options(given: Mapping[str, Any], matching: MatchOptions) -> RetrainOptions:
    """Return what `to_json` was made of, or what a command line gives; None is not given."""
    asked = {name: value for name, value in given.items() if value is not None}
    own = {f.name: asked[f.name] for f in fields(RetrainOptions) if f.name in asked}
    trained = {f.name: asked[f.name] for f in fields(TrainSettings) if f.name in asked}
    trained.pop("seed", None)
    defaults = default_settings(own.get("task", "classification"))
    mean, std = parse_normalize(asked["normalize"]) if "normalize" in asked else ((), ())
    return RetrainOptions(
        **own,
        training=replace(defaults, **trained),
        preparation=Preparation(mean, std, asked.get("channels_last", False)),
        matching=matching,
    )


_FROM_ONE: Rule = (whole(1), "a whole number from 1")
_RULES: Mapping[str, Rule] = {
    "method": one_of("fedma", "fedavg", "fedprox"),
    "passes": _FROM_ONE,
    "rounds": _FROM_ONE,
    "mu": (number(0), "a number from 0"),
    "init": one_of("independent", "shared"),
    "init_epochs": _FROM_ONE,
}
