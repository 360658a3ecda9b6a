"""The options of a merge: what the user says, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from fedmerge.checkpoint import ReadOptions
from fedmerge.errors import UsageError
from fedmerge.graph import ChainOptions
from fedmerge.types.clients import FLOAT_DTYPES
from fedmerge.types.plans import Plan
from fedmerge.types.rules import Rule, number, one_of, positive, whole

Method: TypeAlias = Literal["fedma", "average", "ensemble"]
Preset: TypeAlias = Literal["paper"]
Solver: TypeAlias = Literal["auto", "scipy", "lapjv", "lapsolver"]

NO_LEAD = "none"  # as a client's name: nobody leads
CORRECTING = ("norm", "moments")  # where moments are not known, norms are
DEFAULT_THRESHOLD = 0.5
DEFAULT_GROWTH = 1.5
DEFAULT_SWEEPS = 20
DEFAULT_REFINE = 3
DEFAULT_DISTILL_STEPS = 500
PAPER_SWEEPS = 5
PAPER_UNIT_CAP = 700  # the paper's code never lets a layer grow beyond this
PAPER_COUNT_CLIP = 10  # the paper's code counts no more members of a unit than this
PAPER_GAMMA = 7.0
PAPER_RECURRENT_GAMMA = 1e-3


@dataclass(frozen=True)
class RecordedOptions:
    """The options of a merge that its record holds: every field changes the result.

    A record is data. What it must never decide is no field here: whom to trust, what to run, where
    to write (`workflow.replay` names all of that).
    """

    method: Method = "fedma"
    preset: Preset | None = None
    match_threshold: float | None = None
    max_growth: float | Literal["none"] | None = None
    max_params: int | None = None
    signature: Literal["weights", "activations", "both"] | None = None
    merge_units: Literal["mean", "fit"] | None = None
    correct: Literal["none", "norm", "moments"] | None = None
    batch_norm: Literal["mean", "reestimate"] | None = None
    lead: str | None = None  # a client, or "none"
    symmetries: bool = True  # signs of units and bases of embeddings are made alike, with probes
    drop_outliers: bool = False
    distill: bool = False
    distill_steps: int | None = None
    gamma: float | None = None
    sigma: float | None = None
    sigma0: float | None = None
    sweeps: int | None = None
    refine: int | None = None
    seed: int = 0
    solver: Solver = "auto"
    tie_breaker: float = 1e-3
    client_weight: Mapping[str, float] = field(default_factory=dict)
    class_counts: Mapping[str, Sequence[int | float]] | None = None
    keep: tuple[str, ...] = ()
    dtype: str | None = None
    match_by_order: bool = False
    flatten: int | None = None
    assume_chain: bool = False
    key: str | None = None
    weights: Literal["raw", "ema"] | None = None

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise UsageError(f"{option_name(name)} is {value!r}, expected {expected}")
        _check_dials(self)

    @property
    def distillation(self) -> int:
        """How many steps the merge is fitted to the clients' ensemble."""
        return int(self.distill) * int(_or(self.distill_steps, DEFAULT_DISTILL_STEPS))

    @property
    def chain(self) -> ChainOptions:
        """What the user knows of the net."""
        return ChainOptions(self.flatten, self.assume_chain)


@dataclass(frozen=True)
class MatchOptions(RecordedOptions):
    """What the user may say about a merge; None leaves the choice to fedmerge.

    Every field but `allow_global` changes the result and is kept in the merge record.
    """

    allow_global: tuple[str, ...] = ()  # "package.Class" that files may name

    @property
    def reading(self) -> ReadOptions:
        """How files are read."""
        return ReadOptions(self.key, self.weights, self.allow_global)


@dataclass(frozen=True)
class Dials:
    """The numbers that the matching runs with: a threshold or two fixed variances."""

    gamma: float
    threshold: float | None
    sigma: float | None
    sigma0: float | None
    max_growth: float | None  # None: no limit
    sweeps: int
    refine: int
    popularity_weight: float = 2.0
    popularity_clip: int | None = None
    unit_cap: int | None = None
    posterior_mean: bool = False


def dials_for(options: MatchOptions, plan: Plan) -> Dials:
    """Return the dials that the options and the preset mean for a plan."""
    if options.preset == "paper":
        default_gamma = PAPER_RECURRENT_GAMMA if plan.is_recurrent else PAPER_GAMMA
        return Dials(
            gamma=_or(options.gamma, default_gamma),
            threshold=None,
            sigma=_or(options.sigma, 1.0),
            sigma0=_or(options.sigma0, 1.0),
            max_growth=_growth(options.max_growth, None),
            sweeps=_or(options.sweeps, PAPER_SWEEPS),
            refine=_or(options.refine, 0),
            popularity_weight=1.0,
            popularity_clip=PAPER_COUNT_CLIP,
            unit_cap=PAPER_UNIT_CAP,
            posterior_mean=True,
        )
    fixed = options.sigma is not None
    if options.method == "ensemble":  # nothing is matched, whatever it costs
        options = replace(options, method="fedma", match_threshold=1.0, max_growth="none")
    return Dials(
        gamma=_or(options.gamma, 1.0),
        threshold=None if fixed else _or(options.match_threshold, DEFAULT_THRESHOLD),
        sigma=options.sigma,
        sigma0=options.sigma0,
        max_growth=_growth(options.max_growth, None if fixed else DEFAULT_GROWTH),
        sweeps=_or(options.sweeps, DEFAULT_SWEEPS),
        refine=_or(options.refine, DEFAULT_REFINE),
    )


def options_to_json(options: MatchOptions, dials: Dials) -> dict[str, Any]:
    """Return the options as the merge record keeps them, with the values that were chosen."""
    chosen: dict[str, Any] = {
        "match_threshold": dials.threshold,
        "max_growth": "none" if dials.max_growth is None else dials.max_growth,
        "gamma": dials.gamma,
        "sigma": dials.sigma,
        "sigma0": dials.sigma0,
        "sweeps": dials.sweeps,
        "refine": dials.refine,
        "max_params": None,  # it is a growth by now
        "distill_steps": options.distillation if options.distill else None,
        "correct": _or(options.correct, "none"),
        "batch_norm": _or(options.batch_norm, "mean"),
    }
    if options.method == "ensemble":
        chosen |= {"match_threshold": None, "max_growth": None}
    recorded = {option.name: getattr(options, option.name) for option in fields(RecordedOptions)}
    return {**recorded, **chosen}


def needs_probes(options: MatchOptions) -> tuple[str, ...]:
    """Return the options, as the command line calls them, that only probes can fulfil."""
    wishes = {
        "signature": options.signature in ("activations", "both"),
        "merge_units": options.merge_units == "fit",
        "correct": options.correct == "moments",
        "batch_norm": options.batch_norm == "reestimate",
        "drop_outliers": options.drop_outliers,
        "distill": options.distill,
    }
    return tuple(option_name(name) for name, is_wished in wishes.items() if is_wished)


def without_clients(options: MatchOptions, names: Collection[str]) -> MatchOptions:
    """Return the options of a merge that leaves some clients out."""
    if options.lead in names:
        raise UsageError(f"--lead names '{options.lead}', which --drop-outliers leaves out")
    weights, counts = options.client_weight, options.class_counts
    return replace(
        options,
        client_weight={name: w for name, w in weights.items() if name not in names},
        class_counts=counts and {name: c for name, c in counts.items() if name not in names},
    )


def option_name(field_name: str) -> str:
    """Return a field as the command line calls it."""
    return "--" + field_name.replace("_", "-")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _growth(value: float | Literal["none"] | None, default: float | None) -> float | None:
    if value == "none":
        return None
    return default if value is None else float(value)


def _check_dials(options: RecordedOptions) -> None:
    """Refuse dials that exclude each other."""
    if options.max_params is not None and options.max_growth is not None:
        raise UsageError("--max-params and --max-growth exclude each other")
    apart = (options.match_threshold, options.max_growth, options.max_params, options.preset)
    if options.method == "ensemble" and any(dial is not None for dial in apart):
        raise UsageError(
            "--method ensemble merges nothing, so it takes no threshold, size or preset"
        )
    if options.method == "ensemble" and options.correct in CORRECTING:
        raise UsageError("--method ensemble merges nothing, so there is nothing to --correct")
    if options.preset == "paper" and options.lead not in (None, NO_LEAD):
        raise UsageError(
            f"--lead {options.lead} and --preset paper exclude each other",
            "the paper averages units of all clients; leave one of the two out",
        )
    if options.distill_steps is not None and not options.distill:
        raise UsageError("--distill-steps is for --distill")
    if options.preset is None and (options.sigma is None) != (options.sigma0 is None):
        raise UsageError("--sigma and --sigma0 go together", "give both, or --match-threshold")
    fixed = options.sigma is not None or options.preset == "paper"
    why = "--preset paper" if options.preset else "--sigma and --sigma0"
    if fixed and options.match_threshold is not None:
        raise UsageError(f"--match-threshold and {why} exclude each other")
    if fixed and options.max_growth not in (None, "none", 1):
        raise UsageError(
            f"--max-growth {options.max_growth} and {why} exclude each other",
            "use --max-growth 1 or none with it",
        )


def _counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(row, list | tuple) and all(map(number(0), row)) for row in value.values()
    )


_RULES: Mapping[str, Rule] = {
    "method": one_of("fedma", "average", "ensemble"),
    "max_params": (whole(1), "a whole number from 1"),
    "signature": one_of("weights", "activations", "both"),
    "merge_units": one_of("mean", "fit"),
    "correct": one_of("none", "norm", "moments"),
    "batch_norm": one_of("mean", "reestimate"),
    "distill_steps": (whole(0), "a whole number from 0"),
    "preset": one_of("paper"),
    "match_threshold": (lambda t: positive(t) and t <= 1, "a number above 0 and up to 1"),
    "max_growth": (lambda g: g == "none" or number(1)(g), "a number from 1, or none"),
    "gamma": (positive, "a positive number"),
    "sigma": (positive, "a positive variance"),
    "sigma0": (positive, "a positive variance"),
    "sweeps": (whole(0), "a whole number from 0"),
    "refine": (whole(0), "a whole number from 0"),
    "seed": (whole(0), "a whole number from 0"),
    "solver": one_of("auto", "scipy", "lapjv", "lapsolver"),
    "tie_breaker": (number(0, 1), "a number from 0 to 1"),
    "client_weight": (
        lambda w: isinstance(w, Mapping) and all(map(positive, w.values())),
        "a positive number per client",
    ),
    "class_counts": (_counts, '{"name": [count per class, …]}, no count negative'),
    "dtype": one_of(*FLOAT_DTYPES),
    "flatten": (whole(1), "a whole number from 1"),
    "weights": one_of("raw", "ema"),
}
