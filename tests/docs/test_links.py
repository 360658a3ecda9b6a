"""Links lead somewhere, and commands on pages have the options that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import unknown_in_line
from tests.pages import DOCS

ROOT = DOCS.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
_COMMAND = re.compile(r"^(?:\$ )?(fedmerge .*)$", re.M)
_SHELL = re.compile(r"^```(?:console|sh)\n(.*?)^```$", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that are not there."""
    wrong = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A *fine* head's\n\n```\n# no head\n```\n")
    page.write_text("[a](other.md) [b](other.md#a-fine-heads) [c](other.md#no-head) [d](gone.md)")
    assert broken_links(page) == ["other.md#no-head", "gone.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_has_the_options_that_it_is_given(page: Path) -> None:
    shells = _SHELL.findall(page.read_text(encoding="utf-8"))
    lines = [line for shell in shells for line in _COMMAND.findall(shell.replace("\\\n", " "))]
    plain = [re.split(r"[|;>]|&&", line)[0] for line in lines]
    assert [wrong for line in plain for wrong in unknown_in_line(line)] == []


def test_every_guide_is_in_the_index() -> None:
    guides = {page.name for page in (DOCS / "how-to").glob("*.md")} - {"index.md"}
    linked = set(_LINK.findall((DOCS / "how-to" / "index.md").read_text(encoding="utf-8")))
    assert guides == linked
