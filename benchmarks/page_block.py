"""Results inside a page that is otherwise written by hand."""

from __future__ import annotations

import re
from pathlib import Path


def replace_block(page: Path, name: str, text: str) -> None:
    """Put text between the page's marks `<!-- name -->` and `<!-- /name -->`."""
    content = page.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not block.search(content):
        raise ValueError(f"{page} has no block '{name}'")
    page.write_text(block.sub(lambda found: f"{found[1]}{text}\n{found[2]}", content), "utf-8")
