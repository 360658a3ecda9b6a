"""The tables and plots of the page of the paper's comparison, made from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.page_block import replace_blocks, table, told_machine
from benchmarks.paper_leads import FEDAVG, FEDMA, Methods, Seeds, leads, megabytes
from benchmarks.paper_plot import Mark, Series, plot
from benchmarks.paper_runs import Outcome, Point
from benchmarks.paper_suites import ENSEMBLE, METHODS, SUITES, Experiment, experiments
from benchmarks.report import machine

Runs = Mapping[Experiment, Outcome]

NAMES = {"fedma": "FedMA", "fedavg": "FedAvg", "fedprox": "FedProx"}
PLACES: Mapping[str, tuple[str, Callable[[Point], float]]] = {  # along the x axes of the plots
    "rounds": ("rounds", lambda point: point.round),
    "bytes": ("megabytes", lambda point: point.megabytes),
}
ROW_NAMES: Mapping[str, str] = {
    "mean": "mean client",
    "best": "best client (chosen on the test data)",
    "average": "element-wise average, one shot",
    "match": "FedMA's matching, one shot",
    "ensemble": "ensemble (mean of logits)",
}
COUNTED = ("part", "sha256", "seed", "on")  # what settings of two runs are not compared by


def write_page(results: Runs, docs: Path) -> None:
    """Renew the tables of `paper.md` and its plots."""
    for name, picture in plots(results).items():
        (docs / f"paper-{name}.svg").write_text(picture, encoding="utf-8")
    replace_blocks(docs / "paper.md", tables(results))


def tables(results: Runs) -> dict[str, str]:
    """Return the page's blocks; the same results give the same ones on one machine."""
    blocks = {"machine": told_machine(machine())}
    for dataset, suite in SUITES.items():
        for part in suite.parts:
            runs = shown(results, dataset, part)
            if not runs:
                text = "Not run here.\n"
            elif part == "epochs":
                text = _epochs(runs, shown(results, dataset, "main"))
            else:
                text = "\n".join(made for made in _section(runs, dataset, part) if made)
            blocks[f"{dataset}-{part}"] = text
    return {**blocks, "trials": _trials(results)}


def plots(results: Runs) -> dict[str, str]:
    """Return the pictures: accuracy by rounds and by bytes of every data set that was run."""
    pictures = {}
    for dataset in SUITES:
        methods = by_method(shown(results, dataset, "main"))
        if not methods:
            continue
        for name, (label, place) in PLACES.items():
            lines = [
                Series(method, _marks(seeds, place), is_level=method == ENSEMBLE)
                for method, seeds in methods.items()
            ]
            pictures[f"{dataset}-{name}"] = plot(
                lines, x_label=label, y_label="test accuracy in % (by the logarithm of the error)"
            )
    return pictures


def shown(results: Runs, dataset: str, part: str) -> dict[Experiment, Outcome]:
    """Return the runs of a part that were made with its settings, on test data."""
    return {
        experiment: outcome
        for experiment, outcome in results.items()
        if (experiment.dataset, experiment.part, experiment.on) == (dataset, part, "test")
        and experiment in experiments(dataset, experiment.sha256, [experiment.seed], parts=[part])
    }


def by_method(runs: Runs) -> Methods:
    """Return all seeds of every method, in the order of methods and seeds."""
    methods: dict[str, list[tuple[Experiment, Outcome]]] = {}
    for experiment, outcome in sorted(runs.items(), key=lambda run: _place(run[0])):
        methods.setdefault(_name(experiment), []).append((experiment, outcome))
    return methods


def _place(experiment: Experiment) -> tuple[int, str, int]:
    return METHODS.index(experiment.method), experiment.init, experiment.seed


def _name(experiment: Experiment) -> str:
    name = NAMES.get(experiment.method)
    return ENSEMBLE if name is None else f"{name}, {experiment.init}"


def _left_out(methods: Methods, dataset: str, part: str) -> str:
    """Return which methods of a part were not run, in words; empty if all were."""
    asked = dict.fromkeys(map(_name, experiments(dataset, "", [0], parts=[part])))
    missing = [name for name in asked if name not in methods]
    return f"Not run here: {'; '.join(missing)}.\n" if missing else ""


def _section(runs: Runs, dataset: str, part: str) -> Iterator[str]:
    methods = by_method(runs)
    yield _methods(methods, SUITES[dataset].layers)
    yield _left_out(methods, dataset, part)
    if FEDMA in methods and FEDAVG in methods:
        judged = dataset == "mnist"
        yield _leads(leads(methods, judged=judged), judged)
    if ENSEMBLE in methods:
        yield _alone(methods[ENSEMBLE])


def _leads(results: Sequence[Result], judged: bool) -> str:
    """Return a table of FedMA's leads, with their bars where they are judged by any."""
    if judged:
        rows = ((r.what, r.shown, r.verdict, r.note) for r in results)
        return table(("what", "measured", "bar", ""), rows)
    return table(("what", "measured", ""), ((r.what, r.shown, r.note) for r in results))


def _methods(methods: Methods, layers: int) -> str:
    """Return a table of the accuracies after every pass, with their spread."""
    rounds = sorted({p.round for s in methods.values() for _, o in s for p in o.points})
    chosen = [number for number in rounds if number % layers == 0]
    rows = []
    for name, seeds in methods.items():
        if name == ENSEMBLE:
            continue
        cells = [_cell(_accuracies(seeds, number)) for number in chosen]
        moved = f"{megabytes(seeds, chosen[-1]):.1f}"
        growth = f"{statistics.mean(o.growth for _, o in seeds):.2f}×"
        seconds = f"{statistics.mean(o.seconds for _, o in seeds):.0f}"
        numbers = ", ".join(str(e.seed) for e, _ in seeds)
        rows.append((name, numbers, *cells, moved, growth, seconds))
    heads = [f"round {number}" for number in chosen]
    last = f"MB until round {chosen[-1]}"
    return table(("method", "seeds", *heads, last, "growth", "CPU s"), rows)


def _alone(seeds: Seeds) -> str:
    """Return a table of clients that trained alone, without rounds."""
    kinds = seeds[0][1].others
    rows = [(ROW_NAMES[kind], _cell([o.others[kind] for _, o in seeds])) for kind in kinds]
    epochs = seeds[0][0].epochs * SUITES[seeds[0][0].dataset].layers
    return table((f"clients that trained alone for {epochs} epochs", "accuracy in %"), rows)


def _epochs(runs: Runs, usual: Runs) -> str:
    """Return a table of the accuracies after one pass by local epochs, the usual ones too."""
    seeds = {experiment.seed for experiment in runs}
    tried = {(experiment.method, experiment.init) for experiment in runs}
    values: dict[int, dict[str, str]] = {}
    for experiment, outcome in {**usual, **runs}.items():
        if experiment.seed in seeds and (experiment.method, experiment.init) in tried:
            layers = SUITES[experiment.dataset].layers
            [accuracy] = _accuracies([(experiment, outcome)], layers)
            name = f"{NAMES[experiment.method]}, {experiment.init}"
            values.setdefault(experiment.epochs, {})[name] = f"{accuracy:.1f}"
    names = [f"{NAMES[method]}, {init}" for method, init in sorted(tried, reverse=True)]
    rows = [
        (str(epochs), *(cells.get(name, "not run") for name in names))
        for epochs, cells in sorted(values.items())
    ]
    return table(("local epochs", *names), rows)


def _trials(results: Runs) -> str:
    """Return a table of the runs by which settings were chosen, all seeds of a setting together."""
    settings: dict[tuple[str, str, str], list[tuple[Experiment, Outcome]]] = {}
    for experiment, outcome in results.items():
        if experiment.on == "validation":
            key = (experiment.dataset, _name(experiment), _changes(experiment))
            settings.setdefault(key, []).append((experiment, outcome))
    rows = []
    for (dataset, name, changes), seeds in settings.items():
        layers = SUITES[dataset].layers
        rounds = [p.round for p in seeds[0][1].points]
        chosen = [r for r in rounds if r % layers == 0 or r == rounds[-1]]
        cells = (f"{_cell(_accuracies(seeds, r))} at round {r}" for r in chosen)
        numbers = ", ".join(str(e.seed) for e, _ in seeds)
        moved = f"{megabytes(seeds, chosen[-1]):.1f}"
        rows.append((dataset, name, numbers, changes, "; ".join(cells), moved))
    return table(("data", "method", "seeds", "other than above", "accuracy in %", "MB"), rows)


def _changes(experiment: Experiment) -> str:
    """Return in what a run differs from that of the same method as it is done."""
    values = asdict(experiment)
    usual = min(
        (asdict(e) for e in experiments(experiment.dataset, "", [0], parts=[experiment.part])),
        key=lambda other: sum(values[name] != other[name] for name in other),
    )
    changed = (n for n in values if n not in COUNTED and values[n] != usual[n])
    return ", ".join(f"{name} {_told(values[name])}" for name in changed) or "nothing"


def _told(value: object) -> str:
    return " + ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _marks(seeds: Seeds, place: Callable[[Point], float]) -> tuple[Mark, ...]:
    """Return mean and spread at every round that all seeds have."""
    marks = []
    for point in seeds[0][1].points:
        found = [p for _, o in seeds for p in o.points if p.round == point.round]
        values = [p.accuracy for p in found]
        x = statistics.mean(map(place, found))
        marks.append(Mark(x, statistics.mean(values), min(values), max(values)))
    return tuple(marks)


def _accuracies(seeds: Seeds, number: int) -> list[float]:
    return [p.accuracy for _, o in seeds for p in o.points if p.round == number]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
