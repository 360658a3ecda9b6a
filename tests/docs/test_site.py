"""The documentation as a site: built without a warning, complete, and readable offline."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedmerge
from tests.pages import DOCS

pytestmark = pytest.mark.slow

ROOT = DOCS.parent
NAMES = dir(fedmerge)
EVERY_PAGE = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
# What a browser loads by itself; a link that somebody may click is no such thing.
_LOADED = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="((?:https?:)?//[^"]+)"')


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs `pip install '.[docs]'`")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert built == {name.replace(".md", ".html") for name in EVERY_PAGE}
    assert (site / "how-to" / "fedmerge-ci.yml").read_bytes() == (
        DOCS / "how-to" / "fedmerge-ci.yml"
    ).read_bytes()


def test_every_public_name_has_its_docstring_on_the_page(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    text = _words(html.unescape(re.sub(r"<[^>]+>", "", page)))
    for name in NAMES:
        assert f'id="fedmerge.{name}"' in page
        sentence = (getattr(fedmerge, name).__doc__ or "").split("\n\n")[0]
        assert _words(sentence.replace("`", "")) in text


def _words(text: str) -> str:
    return " ".join(text.split())


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loaded = {
        address
        for page in site.rglob("*.html")
        for address in _LOADED.findall(page.read_text(encoding="utf-8"))
    }
    assert loaded == set()
    assert _LOADED.findall('<script src="https://cdn.example/x.js">') == [
        "https://cdn.example/x.js"
    ]


def test_the_themes_scripts_find_what_they_look_for(site: Path) -> None:
    script = (site / "js" / "darkmode.js").read_text(encoding="utf-8")
    sought = set(re.findall(r"getElementById\('(hljs-\w+)'\)", script))
    assert sought == {"hljs-light", "hljs-dark"}  # without them it stops before it is done
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # which is the theme's own
        text = page.read_text(encoding="utf-8")
        ids = re.findall(r'\bid="([^"]*)"', text)
        assert sought <= set(ids), page.name
        assert [name for name in ids if name[:1].isdigit()] == [], page.name  # are no selectors


def test_tables_of_options_alone_are_stacked_on_phones(site: Path) -> None:
    cli, files = (
        (site / "reference" / name).read_text(encoding="utf-8")
        for name in ("cli.html", "files.html")
    )
    assert cli.count('<table class="stacked">') > 4
    assert "<table>" not in cli
    assert "<table>" in files
    assert "stacked" not in files


@pytest.mark.parametrize(
    ("mistake", "says"),
    [("[gone](gone.md)", "gone.md"), ("::: fedmerge.gone", "fedmerge.gone")],
)
def test_a_mistake_on_a_page_stops_the_build(
    mistake: str, says: str, site: Path, tmp_path: Path
) -> None:
    assert site.exists()  # without the mistake it is built
    for name in ("docs", "fedmerge"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{mistake}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert says in done.stderr


def leaves(nav: Any) -> Iterator[str]:
    """Yield the files that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(part)


def test_the_navigation_names_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = list(leaves(config["nav"]))
    assert sorted(named) == sorted(EVERY_PAGE)


def test_every_public_name_is_documented_once() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: fedmerge\.(\w+)$", text, re.M)) == NAMES
