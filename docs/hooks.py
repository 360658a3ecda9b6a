"""What the site's generator and its theme do otherwise than we want."""

from typing import Any

# The theme's script for dark mode switches two style sheets of a library that is not in use.
_SHEETS = '<link id="hljs-light" disabled><link id="hljs-dark" disabled>'


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Return a page whose tables have plain bars in code: GitHub needs `a\|b`, Markdown `a|b`."""
    lines = markdown.split("\n")
    return "\n".join(line.replace("\\|", "|") if line.startswith("|") else line for line in lines)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Return the page of options with tables that are stacked on phones: see style.css."""
    has_options = page.file.src_uri == "reference/cli.md"
    return html.replace("<table>", '<table class="stacked">') if has_options else html


def on_post_page(output: str, **_: Any) -> str:
    """Return a page on which the theme's scripts find what they look for."""
    return output.replace("</head>", f"{_SHEETS}</head>", 1)
