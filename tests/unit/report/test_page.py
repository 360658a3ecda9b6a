"""The page: whole, quiet, and deaf to what names contain."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fedmerge.errors import UsageError
from fedmerge.report import MOST_BARS, Score, drawing, render, render_plan, table_rows
from tests.reports import CONV1, FC1, HOSTILE, PLAN, REPORT, SCORES


class Elements(HTMLParser):
    """Collects every start tag with its attributes, and which were left open."""

    VOID = frozenset({"meta", "img", "br", "link", "path", "use", "rect", "circle"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page() -> str:
    return render(REPORT)


def test_the_same_report_gives_the_same_bytes(page: str) -> None:
    assert render(REPORT) == page


def test_every_section_is_there_and_every_element_is_closed(page: str) -> None:
    elements = Elements(page)
    assert elements.open == []
    sections = [found["id"] for found in elements.named("section")]
    expected = "warnings quality rounds frontier plan groups features sources notes"
    assert sections == expected.split()


def test_sections_without_values_are_left_out() -> None:
    bare = replace(
        REPORT, scores=(), frontier=(), rounds=None, features=(), warnings=(), notes=(), groups=()
    )
    sections = [found["id"] for found in Elements(render(bare)).named("section")]
    assert sections == ["plan", "sources"]


def test_names_from_files_never_become_elements(page: str) -> None:
    elements = Elements(page)
    assert len(elements.named("script")) == 1
    assert "<script>document" not in page
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in page
    assert "\x00" not in page


def test_an_unescaped_name_would_be_noticed(page: str) -> None:
    assert len(Elements(page.replace("<main>", f"<main>{HOSTILE}")).named("script")) == 2


def test_nothing_is_loaded_and_only_the_pages_own_script_may_run(page: str) -> None:
    elements = Elements(page)
    policy = next(m["content"] for m in elements.named("meta") if "http-equiv" in m)
    assert policy is not None
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    addresses = [a[k] or "" for _, a in elements.found for k in ("src", "href") if k in a]
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert not elements.named("link")


def test_pictures_on_one_page_share_no_names(page: str) -> None:
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(names)


def test_pictures_take_their_colours_from_the_page(page: str) -> None:
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--series-0)" in svgs
    assert not re.findall(r"#[0-9a-f]{6}\b", svgs)


def test_every_picture_says_what_it_is(page: str) -> None:
    for found in Elements(page).named("svg"):
        assert found["role"] == "img"
        assert found["aria-label"]
    assert all(found["alt"] for found in Elements(page).named("img"))


def test_the_table_counts_units_by_owners(page: str) -> None:
    table = page[page.index('id="groups"') :]
    row = re.search(r"<tr><td>conv1</td>.*?</tr>", table, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row[0])
    assert cells == ["conv1", "4", "6", "50.0 %", "0.250", "4", "2"]


@pytest.mark.parametrize(
    ("clients", "first"), [(MOST_BARS, "client"), (MOST_BARS + 1, "merge")], ids=["few", "many"]
)
def test_many_clients_stand_behind_what_they_are_compared_with(clients: int, first: str) -> None:
    rows = [Score("client", f"c{number}", 0.5) for number in range(clients)]
    many = replace(SCORES, rows=(*rows, Score("average", "average", 0.4), Score("merge", "m", 0.9)))
    shown = table_rows(many)
    assert shown[0].kind == first
    assert sorted(map(str, shown)) == sorted(map(str, many.rows))


def test_a_client_without_a_file_has_no_size() -> None:
    source = replace(REPORT.sources[0], file="", size=0)
    table = render(replace(REPORT, sources=(source,))).split('id="sources"')[1]
    assert "none: trained in the run" in table
    assert '<td class="n" data-sort="0">' not in table
    assert "none: trained in the run" not in render(REPORT)


def test_best_and_worst_matches_stand_with_their_costs(page: str) -> None:
    rows = re.findall(r"<tr><td>(best|worst)</td>.*?</tr>", page)
    assert len(rows) == len(CONV1.matches)
    assert ">0.100<" in page
    assert ">0.600<" in page
    assert FC1.unknown in page


def test_a_plan_is_drawn_as_svg_and_png() -> None:
    assert b"conv1" in render_plan(PLAN, "svg")
    assert render_plan(PLAN, "png").startswith(b"\x89PNG")


def test_without_a_library_to_draw_with_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match="need matplotlib and jinja2"):
        drawing.check_drawing()
