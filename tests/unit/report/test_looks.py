"""Colours that can be read, lanes that don't cross, charts that show their values."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fedmerge.report import (
    TEMPLATES,
    Edge,
    Reference,
    Score,
    Stage,
    assign_lanes,
    charts,
    draw_plan,
    drawing,
    plan_remarks,
)
from tests.reports import CONV1, FC1, FRONTIER, PLAN, ROUNDS, SCORES

READABLE = 4.5  # contrast of text, WCAG AA


def themes() -> dict[str, dict[str, str]]:
    """Return the colours that the page names, in light and in dark mode."""
    css = (Path(TEMPLATES) / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = [dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), found, strict=True))


def luminance(colour: str) -> float:
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_and_series_can_be_read_on_paper_and_cards(theme: str) -> None:
    colours = themes()[theme]
    inks = [name for name in colours if name not in ("--paper", "--card", "--grid")]
    for name in inks:
        for ground in ("--paper", "--card"):
            assert contrast(colours[name], colours[ground]) >= READABLE, (theme, name, ground)


def test_paper_is_white_in_print_and_dark_in_dark_mode() -> None:
    assert themes()["print"] == themes()["light"]
    assert luminance(themes()["dark"]["--paper"]) < 0.02


def test_every_variable_of_the_pictures_is_a_colour_of_the_page() -> None:
    names = {value.removeprefix("var(").removesuffix(")") for value in drawing.VARIABLES.values()}
    for colours in themes().values():
        assert names <= set(colours)


def test_edges_that_overlap_get_lanes_of_their_own() -> None:
    edges = [Edge(0, 3, ()), Edge(3, 0, ()), Edge(1, 3, ()), Edge(4, 6, ()), Edge(0, 6, ())]
    lanes = assign_lanes(edges)
    assert sorted(lane.edge.start for lane in lanes) == [0, 0, 1, 3, 4]
    for one, other in combinations(lanes, 2):
        spans = [sorted((lane.edge.start, lane.edge.end)) for lane in (one, other)]
        overlap = spans[0][1] >= spans[1][0] and spans[1][1] >= spans[0][0]
        assert not (overlap and one.number == other.number)
    assert {lane.edge: lane.number for lane in lanes}[Edge(4, 6, ())] == 0


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def drawn(draw: object, *values: object, **settings: object) -> list[str]:
    assert callable(draw)
    with drawing.settings("test"):
        return texts(drawing.inline(draw(*values, **settings), "a label"))


def test_a_plan_tells_widths_before_and_after() -> None:
    found = drawn(draw_plan, PLAN)
    assert {"input", "conv1", "4 → 6", "8, 7 → 9", "output"} <= set(found)


def test_a_plan_before_a_merge_has_no_widths_after_it() -> None:
    stages = tuple(replace(stage, width=None) for stage in PLAN.stages)
    found = drawn(draw_plan, replace(PLAN, stages=stages))
    assert not [text for text in found if "→" in text or text == "merged"]


def test_a_plan_that_stands_alone_has_a_title_and_tells_its_signs() -> None:
    words = {"Sequential: 2 groups of hidden units", "A diamond can't grow."}
    assert words <= set(drawn(draw_plan, PLAN, is_alone=True))
    assert not words & set(drawn(draw_plan, PLAN))


@pytest.mark.parametrize(
    ("edge", "sign"), [(Edge(1, 1, ()), "A loop"), (Edge(1, 0, ()), "Dashed lines")]
)
def test_only_signs_that_are_drawn_are_explained(edge: Edge, sign: str) -> None:
    plain = replace(PLAN, stages=tuple(replace(stage, why_fixed="") for stage in PLAN.stages))
    assert plan_remarks(plain) == []
    [remark] = plan_remarks(replace(plain, edges=(*plain.edges, edge)))
    assert remark.startswith(sign)


def test_a_plan_of_many_groups_grows_in_height_only() -> None:
    stages = tuple(Stage(f"layer{k}.weight", (8,), 9) for k in range(40))
    with drawing.settings("test"):
        width, height = draw_plan(replace(PLAN, stages=stages, edges=())).get_size_inches()
    assert width == pytest.approx(drawing.WIDTH)
    assert height > 40 * 0.4


def test_scores_show_every_number_that_is_known() -> None:
    found = drawn(charts.draw_scores, SCORES)
    assert {"25.0 %", "50.0 %", "75.0 %", "ensemble", "the merge"} <= set(found)
    assert "element-wise average" not in found


def test_a_reference_is_a_line_with_its_name() -> None:
    name = "the ensemble, by definition"
    referred = replace(SCORES, reference=Reference(name, 1.0))
    assert name in drawn(charts.draw_scores, referred)
    assert name not in drawn(charts.draw_scores, SCORES)
    with drawing.settings("test"):
        [line] = charts.draw_scores(referred).axes[0].get_lines()
        assert charts.draw_scores(SCORES).axes[0].get_lines() == []
    assert np.asarray(line.get_xdata()).tolist() == [1.0, 1.0]


def test_numbers_of_shares_stand_behind_the_whole_where_no_line_crosses_them() -> None:
    with drawing.settings("test"):
        axes = charts.draw_scores(SCORES).axes[0]
    labels = [text for text in axes.texts if text.get_text().endswith("%")]
    assert [text.get_text() for text in labels] == ["25.0 %", "50.0 %", "75.0 %"]
    starts = [text.get_window_extent().x0 for text in labels]
    assert min(starts) > axes.transData.transform((1.0, 0.0))[0]


def test_a_key_is_read_line_by_line() -> None:
    names = ["fedma", "a name of half of a line", "fedavg", "fedprox"]
    curves = [replace(ROUNDS.curves[1], name=name) for name in names]
    found = drawn(charts.draw_curves, curves, None, by_bytes=False, label="loss")
    key = [text for text in found if text in names]
    assert charts.key_columns(names) == 2
    assert key == [names[0], names[2], names[1], names[3]]  # matplotlib fills columns first
    assert drawn(charts.draw_sharing, [replace(CONV1, owners=(1, 1, 1, 1))], 4)[-4:] == [
        *("1 client", "2 clients", "3 clients", "4 clients"),
    ]


def test_of_many_clients_the_highest_and_lowest_are_drawn() -> None:
    many = [Score("client", f"c{k}", k / 100) for k in range(40)]
    others, half = SCORES.rows[1:], charts.MOST_BARS // 2
    assert charts.few_rows([*many, *others]) == [*many[:half], *many[40 - half :], *others]
    assert charts.few_rows(many[: charts.MOST_BARS]) == many[: charts.MOST_BARS]


def test_costs_stand_against_the_threshold() -> None:
    assert "threshold 0.5 (cosine 0.5)" in drawn(charts.draw_costs, CONV1)
    strict = replace(CONV1, threshold=0.95)
    assert "threshold 0.05 (cosine 0.95)" in drawn(charts.draw_costs, strict)
    assert not [
        t for t in drawn(charts.draw_costs, replace(CONV1, threshold=None)) if "thresh" in t
    ]


def test_sharing_names_numbers_of_owners() -> None:
    assert {"1 client", "2 clients"} <= set(drawn(charts.draw_sharing, [CONV1, FC1], 2))


def test_every_number_of_owners_has_a_shade_of_its_own() -> None:
    group = replace(CONV1, owners=(1,) * 40)
    with drawing.settings("test"):
        axes = charts.draw_sharing([group], 40).axes[0]
    shades = [bar.get_alpha() or 0.0 for bar in axes.patches]
    assert len(shades) == 7
    assert sorted(set(shades)) == shades
    assert shades[-1] == pytest.approx(1)


def test_curves_name_runs_and_take_rounds_or_megabytes() -> None:
    by_round = drawn(charts.draw_curves, ROUNDS.curves, None, by_bytes=False, label="loss")
    by_bytes = drawn(charts.draw_curves, ROUNDS.curves, None, by_bytes=True, label="loss")
    assert "round" in by_round
    assert "MB exchanged, up and down" in by_bytes
    assert "fedavg" in by_round


def test_a_run_without_the_metric_is_not_named() -> None:
    found = drawn(charts.draw_curves, ROUNDS.curves, "accuracy", by_bytes=False, label="accuracy")
    assert "fedavg" not in found


def test_only_the_groups_that_changed_most_are_drawn() -> None:
    steady = {f"g{k}": (5, 5) for k in range(charts.MOST_WIDTHS)}
    rounds = replace(ROUNDS, widths={**steady, "moved": (5, 9)})
    assert charts.shown_widths(rounds)[-1] == "moved"
    assert len(charts.shown_widths(rounds)) == charts.MOST_WIDTHS


def test_the_frontier_names_all_kinds() -> None:
    said = set(drawn(charts.draw_frontier, FRONTIER))
    assert {"clients", "merges", "ensemble"} <= said
    assert "this file" not in said


def test_the_frontier_marks_the_size_of_the_file() -> None:
    marked = [replace(point, is_own=point.kind == "merge") for point in FRONTIER]
    assert "this file" in drawn(charts.draw_frontier, marked)
