"""What `benchmarks.oneshot` may run: every merge as a value, its clients, and the bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from fedmerge.training import Preparation

Measure: TypeAlias = Literal["accuracy", "bits"]  # in %; per character, the fewer the better
Source: TypeAlias = Literal["none", "default", "data"]  # of probes: weights alone, or without data

UNLABELLED = 1000  # inputs, where there are any
HOMOGENEOUS = 1e6  # Dirichlet's parameter at which all clients have the same share of a class
MODELS, PAPER_MODELS = "benchmarks.oneshot_models", "benchmarks.paper_models"
CHARACTERS = 100  # of a sequence of the strangers' language models
ALONE = "alone"  # nothing is matched: clients, their element-wise average and their ensemble


@dataclass(frozen=True)
class Family:
    """Real checkpoints of one network, and the data that they were trained for."""

    model: str
    dataset: str
    preparation: Preparation | None = None  # None: characters
    arguments: Mapping[str, bool] = field(default_factory=dict)
    growth: float = 2.0
    files: str = ""  # how their names begin; as the family's if empty

    @property
    def measure(self) -> Measure:
        """What they are compared by."""
        return "accuracy" if self.preparation else "bits"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of two samples."""
        if self.preparation is None:
            return (2, CHARACTERS)
        return (2, 3, 32, 32) if self.preparation.channels_last else (2, 1, 28, 28)


@dataclass(frozen=True)
class Recipe:
    """How clients are trained that no file has."""

    model: str
    dataset: str
    clients: int
    samples: int  # of all clients together; characters of each role, of texts
    dirichlet: float
    start: str  # of the weights: he or torch
    epochs: int
    learning_rate: float
    batch_size: int
    clip_norm: float | None = None
    hidden: int = 0  # of the LSTM
    on: str = "test"  # or validation: training data that no client has
    is_shared: bool = False  # all clients begin with the same weights

    @property
    def factory(self) -> str:
        """Where the network's code is: the paper's networks have names alone."""
        return self.model if ":" in self.model else f"{PAPER_MODELS}:{self.model}"

    @property
    def is_language_model(self) -> bool:
        """Whether clients are trained on texts."""
        return bool(self.hidden)


@dataclass(frozen=True)
class Merging:
    """One merge, with all that its result depends on but the files."""

    case: str  # a family, or a row of CASES
    method: str  # alone, or a row of METHODS
    probes: Source
    seed: int  # of clients that are trained, and of probes
    growth: float | None = None  # at most; None: the method has no limit
    sha256: str = ""  # of the data, and of the checkpoints that nobody trains here


GREY = Preparation((0.0,), (1.0,))
COLOUR = replace(GREY, channels_last=True)

RESNET20 = Family(
    f"{MODELS}:ResNet20",
    "cifar10",
    replace(COLOUR, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
)
SMALL_RESNET20 = "cifar_resnet20, 1×"
FAMILIES: Mapping[str, Family] = {
    "mlp_784_50_10": Family(f"{MODELS}:Perceptron", "mnist", GREY),
    "mnist_cnn_bn": Family(f"{MODELS}:NormedCnn", "mnist", GREY),
    "mnist_cnn_20_50_500": Family(
        f"{PAPER_MODELS}:LeNet", "mnist", Preparation((0.1307,), (0.3081,))
    ),
    "cifar_net": Family(f"{MODELS}:CifarNet", "cifar10", replace(COLOUR, mean=(0.5,), std=(0.5,))),
    "mnist_transformer": Family(
        f"{MODELS}:PatchTransformer", "mnist", Preparation((0.1307,), (0.3081,)), growth=1.0
    ),
    "cifar_resnet20": RESNET20,
    SMALL_RESNET20: replace(RESNET20, growth=1.0, files="cifar_resnet20"),
    "mnist_lstm_2x128": Family(f"{MODELS}:RowLSTM", "mnist", GREY),
    "mnist_bilstm_2x128": Family(f"{MODELS}:RowLSTM", "mnist", GREY, {"bidirectional": True}),
    "charrnn_gru_2x100": Family(f"{MODELS}:CharGRU", "shakespeare"),
    "cifar_resnet8_bn": Family(f"{MODELS}:CifarResNet", "cifar10", COLOUR),
}

LENET = Recipe("lenet", "mnist", 4, 10_000, 0.5, "he", 10, 0.01, 32)
SPLITS: Mapping[str, float] = {"Dir(0.5)": 0.5, "homogeneous": HOMOGENEOUS}
STARTS: Mapping[str, str] = {"He": "he", "PyTorch": "torch"}
EACH = 2500  # images of a client, in the mean: clients are about as good as those of the bars
CLIENTS = (4, 2, 8)
DEVELOPMENT_SEEDS = 10  # from here on: their clients are none of those that are tested

CASES: Mapping[str, Recipe] = {
    **{
        f"LeNet, {clients} clients, {split}, {start}": replace(
            LENET,
            clients=clients,
            samples=EACH * clients,
            dirichlet=SPLITS[split],
            start=STARTS[start],
        )
        for clients in CLIENTS
        for split in SPLITS
        for start in STARTS
    },
    "character LSTM, 4 roles": Recipe(
        "char_lstm", "shakespeare", 4, 25_000, 0.5, "torch", 15, 0.8, 10, 5.0, 256
    ),
    **{
        f"VGG-9 half, 2 clients, {split}": Recipe(
            "vgg9_half", "cifar10", 2, 16_000, dirichlet, "he", 8, 0.01, 32
        )
        for split, dirichlet in SPLITS.items()
    },
}
LENET_BAR, LSTM = "LeNet, 4 clients, Dir(0.5), He", "character LSTM, 4 roles"
VGGS = tuple(case for case in CASES if case.startswith("VGG"))

DEVELOPMENT: Mapping[str, Recipe] = {  # defaults were chosen by these, on training data
    name: replace(recipe, on="validation")
    for name, recipe in {
        "CIFAR net": Recipe(
            f"{MODELS}:CifarNet", "cifar10", 3, 9000, HOMOGENEOUS, "torch", 15, 0.01, 32
        ),
        "CNN with batch norm": Recipe(
            f"{MODELS}:NormedCnn", "mnist", 3, 6000, 0.5, "torch", 4, 0.02, 32
        ),
        "LSTM over rows": Recipe(
            f"{MODELS}:RowLSTM", "mnist", 3, 12_000, HOMOGENEOUS, "torch", 5, 0.1, 32, 5.0
        ),
        "character LSTM": Recipe(
            "char_lstm", "shakespeare", 3, 25_000, 0.5, "torch", 15, 0.8, 10, 5.0, 96
        ),
    }.items()
}
SHARED: Mapping[str, Recipe] = {
    f"{name}, shared": replace(recipe, on="test", is_shared=True)
    for name, recipe in {
        LENET_BAR: CASES[LENET_BAR],
        "CNN with batch norm, 3 clients, Dir(0.5)": DEVELOPMENT["CNN with batch norm"],
        "CIFAR net, 3 clients, homogeneous": DEVELOPMENT["CIFAR net"],
    }.items()
}
RECIPES: Mapping[str, Recipe] = {**CASES, **SHARED, **DEVELOPMENT}

PARTS: Mapping[str, Sequence[str]] = {  # in the order in which they are run
    "families": tuple(FAMILIES),
    "lenet": (LENET_BAR,),
    "lstm": (LSTM,),
    "vgg": VGGS,
    "lenet-others": tuple(c for c in CASES if c.startswith("LeNet") and c != LENET_BAR),
    "shared": tuple(SHARED),
    "choices": tuple(DEVELOPMENT),
}
GROWTH = 1.5  # of clients that are trained here

PAPER, FILES, FAST, OURS = "paper", "files", "ours, --effort fast", "ours"
UNREFINED, PLAIN = "files, --refine 0", "plain distillation"
STEPS = 500  # of plain distillation, the rival that has the same inputs
METHODS: Mapping[str, Mapping[str, Any]] = {  # name → what is asked for besides the growth
    PAPER: {"preset": "paper"},
    UNREFINED: {"refine": 0},
    FILES: {},
    OURS: {},
    FAST: {"effort": "fast"},
    PLAIN: {},
}
CHOICES: Mapping[str, Mapping[str, Any]] = {  # other choices than the defaults, one by one
    "--set match_threshold=0.7": {"match_threshold": 0.7},
    "--set match_threshold=0.99": {"match_threshold": 0.99},
    "--lead none": {"lead": "none"},
    "--lead none --merge-units fit": {"lead": "none", "merge_units": "fit"},
    "--lead none --merge-units mean": {"lead": "none", "merge_units": "mean"},
}


OF: TypeAlias = Literal["", "pull", "gain", "over the best client", "over plain distillation"]


@dataclass(frozen=True)
class Bar:
    """What a mean over seeds has to reach."""

    case: str
    probes: Source
    value: float
    of: OF = ""  # accuracy in %, pull, gain, or points of accuracy more than another's


_MANY_LENETS = "LeNet, 8 clients, Dir(0.5), He"
BARS: tuple[Bar, ...] = (
    Bar("cifar_resnet20", "data", 0.5, "over the best client"),
    Bar("cifar_resnet20", "data", 0.5, "pull"),
    Bar("cifar_resnet20", "default", -1.0, "over the best client"),
    Bar("cifar_resnet20", "default", 0.25, "pull"),
    Bar(SMALL_RESNET20, "data", 0.0, "over the best client"),
    Bar(SMALL_RESNET20, "data", 0.25, "pull"),
    Bar(SMALL_RESNET20, "default", -2.0, "over the best client"),
    Bar(SMALL_RESNET20, "default", 0.1, "pull"),
    Bar("mnist_transformer", "data", 0.0, "over the best client"),
    Bar("mnist_transformer", "data", 0.5, "pull"),
    Bar("mnist_transformer", "default", 0.2, "pull"),
    Bar("cifar_net", "data", 0.0, "over the best client"),
    Bar("cifar_net", "data", 0.5, "over plain distillation"),
    Bar("cifar_net", "default", 55.0),
    Bar("charrnn_gru_2x100", "data", 0.0, "over the best client"),
    Bar(LENET_BAR, "data", 95.5),
    Bar(LENET_BAR, "default", 94.5),
    Bar(_MANY_LENETS, "data", 95.5),
    Bar(_MANY_LENETS, "default", 94.5),
    Bar(LSTM, "default", 44.5),
    Bar(VGGS[0], "data", 0.5, "gain"),
    Bar(VGGS[0], "default", 0.0, "gain"),
)


def measure_of(case: str) -> Measure:
    """Return what models of a case are compared by."""
    return FAMILIES[case].measure if case in FAMILIES else "accuracy"


def options_of(method: str) -> Mapping[str, Any]:
    """Return what a method asks for besides the growth."""
    return METHODS[method] if method in METHODS else CHOICES[method]


def mergings(
    parts: Sequence[str] = (),
    cases: Sequence[str] = (),
    methods: Sequence[str] = (),
    *,
    seeds: Sequence[int] = (0, 1, 2),
) -> Iterator[Merging]:
    """Yield the merges of these parts, cases and methods, all of them if none are named.

    Strangers' clients are the same with every seed, so what takes no probes is run once.
    """
    for part, members in PARTS.items():
        chosen = [case for case in members if not cases or case in cases]
        for case in chosen if not parts or part in parts else ():
            growth = FAMILIES[case].growth if case in FAMILIES else GROWTH
            for seed in seeds:
                is_new = case in RECIPES or seed == seeds[0]
                found = (
                    _choices(case, seed + DEVELOPMENT_SEEDS, GROWTH)
                    if case in DEVELOPMENT
                    else _of_seed(case, seed, growth, without_probes=is_new)
                )
                for merging in found:
                    if not methods or merging.method in methods:
                        yield merging


def _choices(case: str, seed: int, growth: float) -> Iterator[Merging]:
    """Yield the defaults and all other choices, on real inputs or generated texts."""
    yield Merging(case, ALONE, "none", seed)
    for method in (UNREFINED, FILES):
        yield Merging(case, method, "none", seed, growth)
    probes: Source = "default" if DEVELOPMENT[case].is_language_model else "data"
    for method in (OURS, *CHOICES):
        yield Merging(case, method, probes, seed, growth)


def _of_seed(case: str, seed: int, growth: float, *, without_probes: bool) -> Iterator[Merging]:
    if without_probes:
        yield Merging(case, ALONE, "none", seed)
        yield Merging(case, PAPER, "none", seed)
        yield Merging(case, UNREFINED, "none", seed, growth)
        yield Merging(case, FILES, "none", seed, growth)
    sources: tuple[Source, ...] = ("default",) if case == LSTM else ("default", "data")
    for probes in sources:
        yield Merging(case, OURS, probes, seed, growth)
    if "data" in sources:
        yield Merging(case, FAST, "data", seed, growth)
        yield Merging(case, PLAIN, "data", seed)
