"""The tables and the plot of the page of many clients, made from results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.many_clients_runs import Measured
from benchmarks.many_clients_sites import Init, Scored
from benchmarks.page_block import replace_blocks, table, told_machine

STARTS: tuple[Init, ...] = ("independent", "shared")  # of the clients' weights
MATCH, RETRAIN, OVER_RAY = "match", "retrain, local", "retrain, ray"
CARRIED = (10_000, 100_000, 1_000_000)  # clients on paper
DAY = 86_400.0  # seconds
KILO = 1000.0
PANEL = 2.6  # inches of height


@dataclass(frozen=True)
class Results:
    """All that was measured, and where."""

    machine: Mapping[str, str]
    scaling: Sequence[Measured]
    sites: Sequence[Scored]

    def runs(self, command: str) -> list[Measured]:
        """Return the runs of a command by clients."""
        found = [run for run in self.scaling if run.command == command]
        return sorted(found, key=lambda run: run.clients)


@dataclass(frozen=True)
class Line:
    """What one more client takes, from the two runs with the most clients."""

    slope: float  # per client
    at: int  # clients
    value: float  # there

    def __call__(self, clients: float) -> float:
        """Return what so many clients would take on the line."""
        return self.value + self.slope * (clients - self.at)


def line(runs: Sequence[Measured], of: Callable[[Measured], float]) -> Line:
    """Return the straight line through the last two runs."""
    before, last = runs[-2:]
    slope = (of(last) - of(before)) / (last.clients - before.clients)
    return Line(slope, last.clients, of(last))


def write_page(results: Results, docs: Path) -> None:
    """Renew the tables of `many-clients.md` and its plot."""
    (docs / "many-clients.svg").write_bytes(plot(results))
    replace_blocks(docs / "many-clients.md", tables(results))


def tables(results: Results) -> dict[str, str]:
    """Return the page's blocks; the same results give the same ones."""
    return {
        "machine": told_machine(results.machine),
        "match": _matched(results),
        "retrain": _retrained(results),
        "ray": _over_ray(results),
        "carried": _carried(results),
        **{f"sites-{start}": _levels(results, start) for start in STARTS},
        "lost": table(
            ("points lost by two levels", "mean", "least to most", "runs"),
            ((name, *_spread(lost)) for name, lost in losses(results).items()),
        ),
        "servers": table(
            ("clients, sites", "one level CPU s", "two levels, all servers", "one after another",
             "up to the centre MB: one level", "two levels"),
            _servers(results),
        ),
    }  # fmt: skip


def _beyond(run: Measured) -> float:
    return run.peak - run.base


def _serving(run: Measured) -> float:
    return run.cpu - run.training


def _matched(results: Results) -> str:
    return table(
        ("clients", "CPU s", "memory MB", "up MB", "down MB", "record kB", "global width"),
        (
            (
                f"{r.clients:,}", f"{r.cpu:.2f}", _mega(_beyond(r)), _mega(r.up), _mega(r.down),
                f"{r.record / KILO:.0f}", str(r.width),
            )
            for r in results.runs(MATCH)
        ),
    )  # fmt: skip


def _retrained(results: Results) -> str:
    return table(
        (
            "clients", "server CPU s", "clients' CPU s", "memory MB", "up MB", "down MB",
            "state MB", "global width",
        ),
        (
            (
                f"{r.clients:,}", f"{_serving(r):.2f}", f"{r.training:.2f}", _mega(_beyond(r)),
                _mega(r.up), _mega(r.down), _mega(r.state), str(r.width),
            )
            for r in results.runs(RETRAIN)
        ),
    )  # fmt: skip


def _over_ray(results: Results) -> str:
    runs = results.runs(OVER_RAY)
    return table(
        ("clients", "server CPU s", "training round s", "memory MB"),
        ((f"{r.clients:,}", f"{r.cpu:.2f}", f"{r.seconds:.1f}", _mega(_beyond(r))) for r in runs),
    )


def _carried(results: Results) -> str:
    """Return what the last two runs give for more clients along a straight line."""
    match, rounds = results.runs(MATCH), results.runs(RETRAIN)
    lines: Mapping[str, tuple[Line, Callable[[float], str]]] = {
        "`match`, CPU": (line(match, lambda r: r.cpu), _time),
        "`match`, memory beyond the libraries": (line(match, _beyond), _bytes),
        "`match`, record": (line(match, lambda r: r.record), _bytes),
        "pass, server's CPU": (line(rounds, _serving), _time),
        "pass, memory beyond the libraries": (line(rounds, _beyond), _bytes),
        "pass, state on disk": (line(rounds, lambda r: r.state), _bytes),
        "pass, header of the state": (line(rounds, lambda r: r.header), _bytes),
        "pass, up": (line(rounds, lambda r: r.up), _bytes),
        "pass, down": (line(rounds, lambda r: r.down), _bytes),
    }
    return table(
        ("what", "per client", *(f"{clients:,} clients" for clients in CARRIED)),
        (
            (name, show(own.slope), *(show(own(clients)) for clients in CARRIED))
            for name, (own, show) in lines.items()
        ),
    )


def _levels(results: Results, start: str) -> str:
    """Return the accuracies in one level and in two, of clients that begin in one way."""
    runs = [run for run in results.sites if run.scene.init == start]
    settings = list(dict.fromkeys(_setting(run) for run in runs))
    methods = list(dict.fromkeys(run.method for run in runs))
    return table(
        ("accuracy in %", *settings),
        ((m, *(_cell([r.accuracy for r in _of(runs, m, s)]) for s in settings)) for m in methods),
    )


def losses(results: Results) -> dict[str, list[float]]:
    """Return the accuracy of one level less that of two, of every scene, by method and start."""
    found: dict[str, list[float]] = {}
    scores = {(run.scene, run.method): run.accuracy for run in results.sites}
    for (scene, method), accuracy in scores.items():
        other = scores.get((scene, method.replace("two levels", "one level")))
        if method.startswith("two levels") and other is not None:
            name = (
                f"{method.removeprefix('two levels').lstrip(', ') or method}, {scene.init} starts"
            )
            found.setdefault(name, []).append(other - accuracy)
    return found


def _servers(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield what the servers do at growth 1.5 without rounds, from independent starts."""
    runs = [run for run in results.sites if run.scene.init == "independent"]
    for clients, sites in dict.fromkeys((r.scene.clients, r.scene.sites) for r in runs):
        own = [r for r in runs if r.scene.clients == clients]
        one = [r for r in own if r.method == "one level, 1.5×"]
        two = [r for r in own if r.method == "two levels, 1.5×"]
        yield (
            f"{clients}, {sites}",
            f"{statistics.mean(r.cpu for r in one):.2f}",
            f"{statistics.mean(r.cpu for r in two):.2f}",
            f"{statistics.mean(r.longest for r in two):.2f}",
            _mega(statistics.mean(r.up for r in one)),
            _mega(statistics.mean(r.up for r in two)),
        )


def plot(results: Results) -> bytes:
    """Return the curves as SVG, both axes logarithmic."""
    from fedmerge.report import SERIES, as_file, new_figure, settings

    match, rounds = results.runs(MATCH), results.runs(RETRAIN)
    with settings("many-clients"):
        figure = new_figure(2 * PANEL)
        panels: Sequence[tuple[str, Mapping[str, tuple[Sequence[Measured], Callable[..., float]]]]]
        panels = (
            ("CPU seconds", {
                "match": (match, lambda r: r.cpu),
                "pass, server": (rounds, _serving),
                "pass, clients": (rounds, lambda r: r.training),
            }),
            ("megabytes", {
                "up": (rounds, lambda r: r.up / 1e6),
                "state on disk": (rounds, lambda r: r.state / 1e6),
                "memory of match": (match, lambda r: _beyond(r) / 1e6),
            }),
        )  # fmt: skip
        for number, (label, curves) in enumerate(panels, start=1):
            axes = figure.add_subplot(2, 1, number)
            for colour, (name, (runs, of)) in zip(SERIES, curves.items(), strict=False):
                x, y = [r.clients for r in runs], [of(r) for r in runs]
                axes.plot(x, y, marker="o", color=colour, label=name)
            axes.set(xscale="log", yscale="log", xlabel="clients", ylabel=label)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda value, place: f"{value:,g}")
            axes.legend(loc="upper left")
        return as_file(figure, "svg")


def _setting(run: Scored) -> str:
    scene = run.scene
    return f"{scene.clients} clients, {scene.sites} sites, {scene.split}"


def _of(runs: Iterable[Scored], method: str, setting: str) -> list[Scored]:
    return [run for run in runs if run.method == method and _setting(run) == setting]


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _spread(values: Sequence[float]) -> tuple[str, str, str]:
    mean, least, most = map(_points, (statistics.mean(values), min(values), max(values)))
    return mean, f"{least} to {most}", str(len(values))


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # there is no -0.0


def _mega(size: float) -> str:
    return f"{size / 1e6:.2f}"


def _bytes(size: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(size, 1)) // 3), len(units) - 1)
    return f"{size / KILO**power:.3g} {units[power]}"


def _time(seconds: float) -> str:
    for unit, length in (("days", DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * KILO:.3g} ms"
