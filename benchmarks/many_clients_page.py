"""The page of many clients in the docs, written from results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import many_clients_text as text
from benchmarks.many_clients_runs import Measured
from benchmarks.many_clients_sites import Scored

MATCH, RETRAIN, OVER_RAY = "match", "retrain, local", "retrain, ray"
CARRIED = (10_000, 100_000, 1_000_000)  # clients on paper
MEMORY = 16e9  # bytes of a server
DAY = 86_400.0  # seconds
HEADER = 100e6  # bytes, the most that a safetensors file may have
LINK = 125e6  # bytes a second: a gigabit
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

    def reaches(self, limit: float) -> int:
        """Return how many clients take this much, to two digits."""
        clients = self.at + (limit - self.value) / self.slope
        digits = math.floor(math.log10(clients)) - 1
        return int(round(clients / 10**digits) * 10**digits)


def line(runs: Sequence[Measured], of: Callable[[Measured], float]) -> Line:
    """Return the straight line through the last two runs."""
    before, last = runs[-2:]
    slope = (of(last) - of(before)) / (last.clients - before.clients)
    return Line(slope, last.clients, of(last))


def exponent(runs: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    """Return k of clients^k through the last two runs: 1 is linear."""
    before, last = runs[-2:]
    return math.log(of(last) / of(before)) / math.log(last.clients / before.clients)


def write_page(results: Results, docs: Path) -> None:
    """Write `many-clients.md` and its plot."""
    (docs / "many-clients.svg").write_bytes(plot(results))
    (docs / "many-clients.md").write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    """Return the page as Markdown; the same results give the same page."""
    where = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    parts = [text.INTRODUCTION, f"Measured on: {where}.\n", text.COMMANDS]
    parts += _measured(results)
    parts += _carried(results)
    parts += _levels(results)
    return "\n".join(parts)


def _beyond(run: Measured) -> float:
    return run.peak - run.base


def _serving(run: Measured) -> float:
    return run.cpu - run.training


def _measured(results: Results) -> Iterator[str]:
    match, rounds = results.runs(MATCH), results.runs(RETRAIN)
    yield text.MEASURED
    yield _table(
        ("clients", "CPU s", "memory MB", "up MB", "down MB", "record kB", "global width"),
        (
            (
                f"{r.clients:,}", f"{r.cpu:.2f}", _mega(_beyond(r)), _mega(r.up), _mega(r.down),
                f"{r.record / KILO:.0f}", str(r.width),
            )
            for r in match
        ),
    )  # fmt: skip
    yield text.ROUND
    yield _table(
        (
            "clients", "server CPU s", "clients' CPU s", "memory MB", "up MB", "down MB",
            "state MB", "global width",
        ),
        (
            (
                f"{r.clients:,}", f"{_serving(r):.2f}", f"{r.training:.2f}", _mega(_beyond(r)),
                _mega(r.up), _mega(r.down), _mega(r.state), str(r.width),
            )
            for r in rounds
        ),
    )  # fmt: skip
    yield from _over_ray(results.runs(OVER_RAY))
    yield "![CPU seconds and bytes by clients](many-clients.svg)\n"
    yield text.LINEAR.format(
        match=exponent(match, lambda r: r.cpu),
        rounds=exponent(rounds, _serving),
        last=f"{match[-1].clients:,}",
        before=f"{match[-2].clients:,}",
    )
    yield text.FOUND


def _over_ray(runs: Sequence[Measured]) -> Iterator[str]:
    yield text.OVER_RAY
    yield _table(
        ("clients", "server CPU s", "training round s", "memory MB"),
        ((f"{r.clients:,}", f"{r.cpu:.2f}", f"{r.seconds:.1f}", _mega(_beyond(r))) for r in runs),
    )
    each = line(runs, lambda r: r.seconds).slope * KILO
    yield text.EACH_OVER_RAY.format(few=f"{runs[0].clients:,}", each=each)


def _carried(results: Results) -> Iterator[str]:
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
    yield text.FORMULAS
    yield _table(
        ("what", "per client", *(f"{clients:,} clients" for clients in CARRIED)),
        (
            (name, show(own.slope), *(show(own(clients)) for clients in CARRIED))
            for name, (own, show) in lines.items()
        ),
    )
    each = {name: own for name, (own, _) in lines.items()}
    up = each["pass, up"]
    yield text.LIMITS.format(
        record=f"{each['`match`, record'].reaches(HEADER):,}",
        header=f"{each['pass, header of the state'].reaches(HEADER):,}",
        memory=f"{each['`match`, memory beyond the libraries'].reaches(MEMORY):,}",
        held=f"{each['pass, memory beyond the libraries'].reaches(MEMORY):,}",
        day=f"{each['`match`, CPU'].reaches(DAY):,}",
        link=_time(up(CARRIED[-1]) / LINK),
        million=_bytes(up(CARRIED[-1])),
    )


def _levels(results: Results) -> Iterator[str]:
    yield text.LEVELS
    for init in dict.fromkeys(run.scene.init for run in results.sites):
        yield f"### {text.STARTS[init]}\n"
        runs = [run for run in results.sites if run.scene.init == init]
        settings = list(dict.fromkeys(_setting(run) for run in runs))
        methods = list(dict.fromkeys(run.method for run in runs))
        yield _table(
            ("accuracy in %", *settings),
            (
                (m, *(_cell([r.accuracy for r in _of(runs, m, s)]) for s in settings))
                for m in methods
            ),
        )
    yield text.LOST
    yield _table(
        ("points lost by two levels", "mean", "least to most", "runs"),
        ((name, *_spread(lost)) for name, lost in losses(results).items()),
    )
    yield text.SERVERS
    yield _table(
        ("clients, sites", "one level CPU s", "two levels, all servers", "one after another",
         "up to the centre MB: one level", "two levels"),
        _servers(results),
    )  # fmt: skip
    yield text.MEANING


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
    from fedmerge.report.drawing import SERIES, as_file, new_figure, settings

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


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
