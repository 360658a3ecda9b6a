"""Links lead somewhere, and commands on pages have the options that they name."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from tests.commands import unknown_in_line
from tests.pages import DOCS

ROOT = DOCS.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]
)
EXAMPLE = "fedmerge widths"  # a command that CONTRIBUTING adds
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
    unknown = [wrong for line in plain for wrong in unknown_in_line(line)]
    assert [wrong for wrong in unknown if wrong != EXAMPLE] == []


def test_every_guide_is_in_the_index() -> None:
    guides = {page.name for page in (DOCS / "how-to").glob("*.md")} - {"index.md"}
    linked = set(_LINK.findall((DOCS / "how-to" / "index.md").read_text(encoding="utf-8")))
    assert guides == linked


_FILE = re.compile(r"`((?:\w+/)*\w+\.py)`")
_DOTTED = re.compile(r"`(fedmerge(?:\.\w+)+)`")
_TREE = re.compile(r"^( *)(\S+?)/?  +\S", re.M)
USERS = {
    *("net.py", "file.py", "client.py", "job.py"),  # of examples
    "fedmerge.workflow",  # said to be gone
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_names_of_ours_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*.py")}
    ends = {path.split("/", k)[-1] for path in known for k in range(path.count("/") + 1)}
    assert set(_FILE.findall(text)) - USERS - ends == set()
    for name in sorted(set(_DOTTED.findall(text)) - USERS):
        assert pkgutil.resolve_name(name) is not None


def test_the_file_tree_of_the_readme_is_that_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    package = readme.split("```\nfedmerge/\n")[1].split("\ntests/")[0]
    named = {name for indent, name in _TREE.findall(package) if len(indent) == 2}
    assert {path.parent.name for path in (ROOT / "fedmerge").glob("*/__init__.py")} <= named
    assert all((ROOT / "fedmerge" / name).exists() for name in named)
