"""Every saving of the search is switched and named in the benchmark."""

from dataclasses import fields

from benchmarks.cases import SWEEPS, Case, run
from benchmarks.shortcuts import ALL_OFF, NAMES, NO_SHORTCUTS, measure, settings, shown, using
from fedmerge.matching.values import Shortcuts


def test_every_saving_has_a_name() -> None:
    assert set(NAMES) == {field.name for field in fields(Shortcuts)}


def test_every_saving_is_turned_off_alone_and_on_alone() -> None:
    found = settings()
    for name in set(NAMES) - {"reduce"}:
        off = {
            f.name for f in fields(Shortcuts) if not getattr(found[f"-{name}"].shortcuts, f.name)
        }
        on = {f.name for f in fields(Shortcuts) if getattr(found[f"+{name}"].shortcuts, f.name)}
        assert (off, on) == ({name}, {name})
    assert found["none"] == ALL_OFF


def test_no_setting_changes_an_assignment() -> None:
    measured = measure("LeNet-5", "independent", 3, rounds=1)
    assert measured["different"] == []
    assert set(measured["seconds"]) == set(settings())
    *_, last = shown("title", measured)
    assert last.is_met
    *_, last = shown("title", {**measured, "different": ["-reuse"]})
    assert not last.is_met


def test_settings_reach_the_search() -> None:
    problem = Case("LeNet-5", "copies", 3).problem()
    with using(NO_SHORTCUTS):
        without = run(problem).matchings
    assert {matching.sweeps for matching in without.values()} == {SWEEPS}
    assert {matching.sweeps for matching in run(problem).matchings.values()} == {1}
