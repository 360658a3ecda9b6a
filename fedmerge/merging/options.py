"""Options of a merge: checked, resolved against a plan, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fedmerge.decoding import FLOAT_DTYPES
from fedmerge.errors import UsageError
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.option_fields import (
    Rule,
    changed,
    check_options,
    each,
    from_one,
    number,
    one_of,
    option,
    positive,
    seed_rule,
    whole,
    words_in,
)
from fedmerge.values.run_settings import EVALUATION_BATCH

if TYPE_CHECKING:  # the help of commands comes from here, which has to be quick
    from fedmerge.architecture import ChainOptions
    from fedmerge.checkpoint import ReadOptions
    from fedmerge.training import Preparation
    from fedmerge.values.plans import Plan

Method: TypeAlias = Literal["fedma", "ot", "average", "ensemble"]
Preset: TypeAlias = Literal["paper"]
RetrainMethod: TypeAlias = Literal["fedma", "fedavg", "fedprox", "afl"]
# How models begin; matched: clients that trained apart are merged once, and go on from that.
Init: TypeAlias = Literal["independent", "shared", "matched"]
Units: TypeAlias = Literal["mean", "fit", "fit-in-place"]
Solver: TypeAlias = Literal["auto", "scipy", "lapjv", "lapsolver"]
Effort: TypeAlias = Literal["fast", "normal", "thorough"]

_PROBE_FIELDS = {  # keyword of `match` → field of `ProbeOptions`
    "probe": "source",
    "probe_data": "data",
    "probe_count": "count",
    "probe_mean": "mean",
    "probe_std": "std",
}

NO_LEAD = "none"  # as a client's name: nobody leads
DEFAULT_THRESHOLD = 0.5
DEFAULT_GROWTH = 1.5
DEFAULT_SWEEPS = 20
DEFAULT_REFINE = 3
LEAST_REGULARISATION = 1e-4  # below, couplings are assignments, and scaling them takes long
MOST_SWEEPS = 10_000  # a record may replay them: they must have an end
MOST_PATTERNS = 1000  # of --keep, and characters of each: all are compared with all names
MOST_SCALE = 10.0  # of a mean change: beyond, nothing of the base is left
PAPER_SWEEPS = 5
PAPER_UNIT_CAP = 700  # the paper's code never lets a layer grow beyond this
PAPER_COUNT_CLIP = 10  # the paper's code counts no more members of a unit than this
PAPER_GAMMA = 7.0
PAPER_RECURRENT_GAMMA = 1e-3


@dataclass(frozen=True)
class RecordedOptions:
    """The options of a merge that its record holds: every field changes the result.

    A record is data. What it must never decide is no field here: whom to trust, what to run, where
    to write (`merging.merge_record` names all of that).
    """

    method: Method = option(
        "Match units, transport them softly to the widest client's, average element by element, or "
        "set clients side by side, which is exactly their ensemble",
        "fedma",
        values=words_in(Method),
    )
    preset: Preset | None = option("The settings of the paper's own code", values="paper")
    match_threshold: float | None = option(
        "Units of equal norm merge above this cosine; 1 merges nothing",
        values="T",
        unset=f"{DEFAULT_THRESHOLD:g}; on probes 0.95 or none",
    )
    max_growth: float | Literal["none"] | None = option(
        "Most parameters, as a multiple of those at the widest client's widths; 1 never grows",
        values="X|none",
        unset=f"{DEFAULT_GROWTH:g}; none with sigma or preset",
    )
    max_params: int | None = option("Most parameters, in place of max_growth", values="N")
    merge_units: Units | None = option(
        "Average what matches, or fit every layer to it on the probes; or fit units where they "
        "are, as fine-tunes of one model have them",
        values=words_in(Units),
        unset="the better",
    )
    scale: float | None = option(
        "With a base model: how much of the clients' mean change is added to it",
        values="X",
        unset="1, unless probes tell that it does not work",
    )
    lead: str | None = option(
        "The client that shared units are taken from",
        values="CLIENT|none",
        unset="the better of nobody and the client most alike the ensemble",
    )
    drop_outliers: bool = option(
        "Leave out clients that answer unlike the others, or hold NaN", False
    )
    effort: Effort | None = option(
        "How long the merge is refined on changed probes, without labels, to answer as the "
        "clients' ensemble does: not at all, for some hundred steps, or until it stops helping",
        values=words_in(Effort),
        unset="normal",
    )
    gamma: float | None = option("How readily new units appear", values="X", unset="1")
    sigma: float | None = option(
        "Variance of units around their mean, in place of the threshold; goes with sigma0",
        values="X",
        unset="from the threshold",
    )
    sigma0: float | None = option(
        "Variance of the global units; goes with sigma", values="X", unset="from the threshold"
    )
    regularisation: float | None = option(
        "With method ot: the weight of the couplings' entropy, as a share of the mean cost; the "
        "more, the softer",
        values="X",
        unset="0.01",
    )
    sweeps: int | None = option(
        "Most sweeps over the clients per group", values="N", unset=str(DEFAULT_SWEEPS)
    )
    refine: int | None = option(
        "Most passes after the first that also compare outgoing and recurrent weights; 0 is the "
        "paper's one pass",
        values="N",
        unset=f"{DEFAULT_REFINE}; 0 with preset",
    )
    seed: int = option("Seed of the sweeps' order, and of training", 0, values="N")
    solver: Solver = option("Assignment solver", "auto", values=words_in(Solver))
    tie_breaker: float = option(
        "Weight of outgoing weights in telling equal units apart", 1e-3, values="X"
    )
    client_weight: Mapping[str, float] = option(
        "How much a client counts; repeatable",
        values="CLIENT=X",
        unset="1; its samples in fedavg, fedprox and afl",
        factory=dict,
    )
    class_counts: Mapping[str, Sequence[int | float]] | None = option(
        'Average the last layer by class: {"name": [count per class, …]}',
        values="FILE.json",
        unset="none; in rounds, those of the shards",
    )
    keep: tuple[str, ...] = option(
        "Take these tensors from the first client unmatched; repeatable", (), values="PATTERN"
    )
    dtype: str | None = option(
        "Write all floats as this dtype",
        values="float32|float16|bfloat16|float64",
        unset="as in the clients",
    )
    match_by_order: bool = option("Pair tensors in stored order where names differ", False)
    flatten: int | None = option(
        "Positions per channel, or steps, that a linear layer reads at once",
        values="N",
        unset="a square; 1 step",
    )
    assume_chain: bool = option(
        "Take layers of equal width for a plain chain, without skips", False
    )
    key: str | None = option(
        "Where in the file the state dict is, e.g. nets.G; . is the top level",
        values="DOTTED.PATH",
        unset="the only one",
    )
    weights: Literal["raw", "ema"] | None = option(
        "Take the trained weights or their moving average, where a file has both",
        values="raw|ema",
        unset="raw if there",
    )

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):  # one pattern
            object.__setattr__(self, "keep", (self.keep,))
        check_options(self, _RULES)
        _check_dials(self)

    @property
    def chain(self) -> ChainOptions:
        """What the user knows of the net."""
        from fedmerge.architecture import ChainOptions

        return ChainOptions(self.flatten, self.assume_chain)


@dataclass(frozen=True)
class MatchOptions(RecordedOptions):
    """What the user may say about a merge; None leaves the choice to fedmerge.

    Every field but `allow_global` changes the result and is kept in the merge record.
    """

    allow_global: tuple[str, ...] = option(
        "Let files name this class; only for files that you trust; repeatable",
        (),
        values="PACKAGE.CLASS",
    )

    @property
    def reading(self) -> ReadOptions:
        """How files are read."""
        from fedmerge.checkpoint import ReadOptions

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


def options_to_json(
    options: MatchOptions, dials: Dials, *, has_base: bool = False
) -> dict[str, Any]:
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
    }
    if options.method in _WITHOUT_DIALS:
        chosen |= {"match_threshold": None, "max_growth": None}
    if has_base:
        chosen |= {**dict.fromkeys(MATCHES), "max_growth": 1}
    recorded = {option.name: getattr(options, option.name) for option in fields(RecordedOptions)}
    return {**recorded, **chosen}


def needs_probes(options: MatchOptions) -> tuple[str, ...]:
    """Return the options, as messages name them, that only probes can fulfil."""
    wishes = {
        "merge_units": options.merge_units in ("fit", "fit-in-place"),
        "drop_outliers": options.drop_outliers,
        "effort": options.effort == "thorough",
    }
    return tuple(option_name(name) for name, is_wished in wishes.items() if is_wished)


def leaves_units_open(options: RecordedOptions) -> bool:
    """Return whether the user left it open how units are merged."""
    return options.lead is None and options.merge_units is None


def effort_of(options: RecordedOptions) -> Effort:
    """Return how long a merge is refined: not at all if the user said how units are merged."""
    return options.effort or ("normal" if leaves_units_open(options) else "fast")


def option_name(field_name: str) -> str:
    """Return a field as messages name it; the command line says how it is typed."""
    return f"`{field_name}`"


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _growth(value: float | Literal["none"] | None, default: float | None) -> float | None:
    if value == "none":
        return None
    return default if value is None else float(value)


def _check_dials(options: RecordedOptions) -> None:
    """Refuse dials that exclude each other."""
    if options.max_params is not None and options.max_growth is not None:
        raise UsageError("`max_params` and `max_growth` exclude each other")
    apart = (options.match_threshold, options.max_growth, options.max_params, options.preset)
    if options.method in _WITHOUT_DIALS and any(dial is not None for dial in apart):
        why = _WITHOUT_DIALS[options.method]
        raise UsageError(
            f"`method={options.method}` {why}, so it takes no threshold, size or preset"
        )
    if options.regularisation is not None and options.method != "ot":
        raise UsageError("`regularisation` is for `method=ot`", "leave it out")
    if options.preset == "paper" and options.lead not in (None, NO_LEAD):
        raise UsageError(
            f"`lead={options.lead}` and `preset=paper` exclude each other",
            "the paper averages units of all clients; leave one of the two out",
        )
    if options.preset is None and (options.sigma is None) != (options.sigma0 is None):
        raise UsageError("`sigma` and `sigma0` go together", "give both, or `match_threshold`")
    fixed = options.sigma is not None or options.preset == "paper"
    why = "`preset=paper`" if options.preset else "`sigma` and `sigma0`"
    if fixed and options.match_threshold is not None:
        raise UsageError(f"`match_threshold` and {why} exclude each other")
    if fixed and options.max_growth not in (None, "none", 1):
        raise UsageError(
            f"`max_growth={options.max_growth}` and {why} exclude each other",
            "use `max_growth=1` or none with it",
        )


_WITHOUT_DIALS: Mapping[Method, str] = {
    "ensemble": "merges nothing",
    "ot": "couples all units at the widest client's widths",
}
MATCHES = (  # what a merge of changes, which matches nothing, has no use for
    *("preset", "match_threshold", "max_params", "gamma", "sigma", "sigma0", "sweeps", "refine"),
    *("lead", "class_counts"),
)


def _counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(row, list | tuple) and all(map(number(0), row)) for row in value.values()
    )


def _is_word(value: Any, word: str) -> bool:
    return isinstance(value, str) and value == word


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_PATTERNS


_REPEATED: Rule = (whole(0, MOST_SWEEPS), f"a whole number from 0 to {MOST_SWEEPS:,}")
_RULES: Mapping[str, Rule] = {
    "method": one_of(*get_args(Method)),
    "max_params": (whole(1), "a whole number from 1"),
    "merge_units": one_of(*get_args(Units)),
    "scale": (number(0, MOST_SCALE), f"a number from 0 to {MOST_SCALE:g}"),
    "effort": one_of(*get_args(Effort)),
    "preset": one_of("paper"),
    "match_threshold": (lambda t: positive(t) and t <= 1, "a number above 0 and up to 1"),
    "max_growth": (lambda g: _is_word(g, "none") or number(1)(g), "a number from 1, or none"),
    "gamma": (positive, "a positive number"),
    "sigma": (positive, "a positive variance"),
    "sigma0": (positive, "a positive variance"),
    "regularisation": (
        lambda share: number(LEAST_REGULARISATION, 1)(share),
        f"a number from {LEAST_REGULARISATION:g} to 1",
    ),
    "sweeps": _REPEATED,
    "refine": _REPEATED,
    "seed": seed_rule(),
    "solver": one_of(*get_args(Solver)),
    "tie_breaker": (number(0, 1), "a number from 0 to 1"),
    "client_weight": (
        lambda w: isinstance(w, Mapping) and all(map(positive, w.values())),
        "a positive number per client",
    ),
    "class_counts": (_counts, '{"name": [count per class, …]}, no count negative'),
    "keep": (
        lambda k: each(_is_pattern)(k) and len(k) <= MOST_PATTERNS,
        f"at most {MOST_PATTERNS:,} patterns, each as long",
    ),
    "dtype": one_of(*FLOAT_DTYPES),
    "flatten": (whole(1), "a whole number from 1"),
    "weights": one_of("raw", "ema"),
}


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
        raise UsageError(f"`device={asked}` is not there", f"here are: {', '.join(available)}")
    return asked


@dataclass(frozen=True)
class EvaluationOptions:
    """What the data mean, how samples reach the model, and where that runs."""

    task: str = option(
        "What the data are for; a task of your own has loss and metrics",
        "classification",
        values="classification|language-model|FILE.py:NAME",
    )
    preparation: Preparation = field(default_factory=lambda: _no_preparation())
    batch_size: int = option("Samples at a time; changes no result", EVALUATION_BATCH, values="N")
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_options(self, {"batch_size": from_one()})


def _no_preparation() -> Preparation:
    from fedmerge.training import Preparation

    return Preparation()


def changed_match_options(
    options: MatchOptions | None, probes: ProbeOptions | None, changes: Mapping[str, Any]
) -> tuple[MatchOptions, ProbeOptions]:
    """Return the options of a merge and those of its probes with changes by keyword."""
    of_probes = {_PROBE_FIELDS[name]: v for name, v in changes.items() if name in _PROBE_FIELDS}
    others = {name: value for name, value in changes.items() if name not in _PROBE_FIELDS}
    return (
        changed(options or MatchOptions(), others, also=_PROBE_FIELDS),
        changed(probes or ProbeOptions(), of_probes),
    )
