"""Costs, processes and verdicts."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.measure import Cost, Result, free_memory, in_child, run_python, timed
from benchmarks.processes import imports_torch, save_pt
from benchmarks.report import PACKAGES, Report, machine, merged, read_report
from tests.unit.benchmarks.test_tables import REPORT


def test_a_verdict_says_the_bar_and_whether_it_is_met() -> None:
    assert Result("x", 2.0, "×", bar=2.0).verdict == "≤ 2: met"
    assert Result("x", 2.1, "×", bar=2.0).verdict == "≤ 2: MISSED"
    assert Result("x", 49.0, "×", bar=50, at_least=True).verdict == "≥ 50: MISSED"
    assert Result("x", 49.0, "×").verdict == ""
    assert Result("x", 49.0, "×").is_met


def test_the_least_of_wall_and_cpu_counts() -> None:
    assert Cost(1, 4).least(Cost(2, 3)) == Cost(1, 3)
    runs: list[int] = []
    result, cost = timed(lambda: runs.append(1) or len(runs), repeats=3)  # type: ignore[func-returns-value]
    assert (result, len(runs)) == (3, 3)
    assert cost.wall >= 0


def test_a_process_is_charged_for_its_memory_and_its_time() -> None:
    size = 100_000_000
    base = run_python(["-c", "pass"])
    large = run_python(["-c", f"x = b'1' * {size}"])
    assert 0.9 * size < large.peak - base.peak < 1.2 * size
    busy = run_python(["-c", "import time\nwhile time.process_time() < 0.3: pass"])
    assert busy.cost.cpu >= 0.3
    assert busy.cost.wall >= 0.3


def test_a_failing_process_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        run_python(["-c", "raise SystemExit(3)"])


def test_a_child_is_limited_to_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    getenv: Any = os.getenv
    limited: Any = in_child(getenv, threads=1, key="OMP_NUM_THREADS")
    free: Any = in_child(getenv, threads=None, key="OMP_NUM_THREADS")
    assert (limited, free) == ("1", None)


def test_free_memory_is_some_of_the_machine() -> None:
    assert 1e7 < free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_the_check_for_torch_can_fail(tmp_path: Path) -> None:
    assert not imports_torch("--help")
    assert imports_torch("inspect", save_pt(tmp_path, 1)[0])


def test_a_report_survives_json() -> None:
    again = read_report(json.loads(json.dumps(REPORT.to_json())))
    assert again == REPORT


def test_fresh_suites_replace_kept_ones_of_the_same_machine() -> None:
    fresh = Report(REPORT.machine, ("2030-01-05",), {"startup": [Result("quick", 0.1, "s")]})
    both = merged(REPORT, fresh)
    assert both.suites == {**REPORT.suites, **fresh.suites}
    assert both.dates == ("2030-01-02", "2030-01-05")
    with pytest.raises(SystemExit, match="other machine or versions"):
        merged(REPORT, Report({"cores": "4"}, ("2030-01-05",), {}))


def test_the_machine_stays_unnamed() -> None:
    described = machine()
    assert set(described) == {"cores", "processor", "system", "Python", *PACKAGES}
    assert described["cores"] == str(os.cpu_count())
    assert platform.node() not in described.values()


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    command.main()


def test_kept_results_are_put_into_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, written = tmp_path / "kept.json", tmp_path / "page.md"
    kept.write_text(json.dumps(REPORT.to_json()), encoding="utf-8")
    blocks = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("machine", "results"))
    written.write_text(f"# Words\n{blocks}", encoding="utf-8")
    run_command(monkeypatch, "--read", str(kept), "--page", str(written))
    text = written.read_text(encoding="utf-8")
    assert text.startswith("# Words\n")
    assert "| slow | 2 × | ≤ 1.5: MISSED |  |" in text
    with pytest.raises(SystemExit, match="1 bars missed"):
        run_command(monkeypatch, "--read", str(kept), "--strict")


def test_suites_are_listed_and_unknown_ones_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(monkeypatch, "--list")
    assert "memory-slow    Peak memory, 400 MB files (--all)\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run_command(monkeypatch, "matchng")
    assert "no suite called matchng; see --list" in capsys.readouterr().err
