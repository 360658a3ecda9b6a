"""Run the blocks of a page of documentation in order, and compare what they print with the page.

`python` blocks run in one session, `console` blocks in a shell beside it, all in one folder. What a
`python` block prints stands in a `text` block right after it, what a command prints under it.
`python -m tests.pages PAGE…` runs pages and lists what differs; with `--write` it corrects them.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
TOLERANCE = 0.05  # other processors round otherwise, so that trained nets differ a little
TEN = 10  # from here on whole numbers may be one off: a unit more or less is rounding, too
COLUMNS = "100"  # as wide as the pages
LONGEST = 600  # seconds that one command may take

_RUN = ("python", "console")
_SHOWN = ("text", "sh", "json", "yaml", "toml", "")  # read, not run
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.M | re.S)
_AFTER = re.compile(r"^<!-- after: (.+?) -->$", re.M)
_NUMBER = re.compile(r"(?<![\w.\-\[×])\d[\d,]*(?:\.\d+)?")  # not in names, indices and shapes
_TIME = re.compile(r"\d+(?:\.\d+)? ?(?:s|min|h)\b")


@dataclass(frozen=True)
class Block:
    """Code of a page, the lines that it is said to print, and where the two stand in the page."""

    kind: str
    code: str
    shown: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Ran:
    """A block and what it printed."""

    block: Block
    found: str

    @property
    def differs(self) -> str:
        """What is not as the page shows it, or nothing."""
        if agree(self.block.shown, self.found):
            return ""
        first, *more = self.block.code.splitlines()
        return "\n".join([f"{first} …" if more else first, *_diff(self.block.shown, self.found)])


def agree(shown: str, found: str) -> bool:
    """Return whether two outputs say the same: equal words, any times, nearly equal numbers."""
    pages_lines, printed = shown.splitlines(), found.splitlines()
    return len(pages_lines) == len(printed) and all(map(_same_line, pages_lines, printed))


def _same_line(shown: str, found: str) -> bool:
    numbers = [_NUMBER.findall(_TIME.sub("TIME", line)) for line in (shown, found)]
    return _words(shown) == _words(found) and all(map(_close, *numbers))


def _words(line: str) -> str:
    """Return a line with names in the place of its times and numbers."""
    return " ".join(_NUMBER.sub("NUMBER", _TIME.sub("TIME", line)).split())


def _diff(shown: str, found: str) -> Iterator[str]:
    """Yield the lines that the page has alone, and those that were printed instead."""
    pages_lines, printed = shown.splitlines(), found.splitlines()
    words = [[_words(line) for line in lines] for lines in (pages_lines, printed)]
    for kind, i, j, k, m in difflib.SequenceMatcher(None, words[0], words[1]).get_opcodes():
        old, new = pages_lines[i:j], printed[k:m]
        if kind == "equal":  # but for numbers
            far = [pair for pair in zip(old, new, strict=True) if not _same_line(*pair)]
            old, new = [pair[0] for pair in far], [pair[1] for pair in far]
        yield from (f"- {line}" for line in old)
        yield from (f"+ {line}" for line in new)


def _close(shown: str, found: str) -> bool:
    """Return whether two numbers are nearly equal; whole numbers below ten must be equal."""
    one, other = (float(number.replace(",", "")) for number in (shown, found))
    slack = TOLERANCE * (1 if "." in shown and one <= 1 else one)
    if "." not in shown and one >= TEN:
        slack = max(slack, 1)
    return abs(one - other) <= slack


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page that run; every other kind of block must be a known one."""
    fences = list(_FENCE.finditer(text))
    for k, fence in enumerate(fences):
        kind, body = fence[1], fence[2]
        assert kind in (*_RUN, *_SHOWN), f"a block of unknown kind: {kind}"
        if kind == "console":
            yield from _commands(body, fence.start(2))
        if kind == "python":
            after = fences[k + 1] if k + 1 < len(fences) else None
            is_output = after is not None and after[1] == "text"
            if after is not None and is_output and not text[fence.end() : after.start()].strip():
                yield Block(kind, body, after[2], after.span(2))
            else:
                yield Block(kind, body, "", (fence.end(), fence.end()))


def _commands(body: str, start: int) -> Iterator[Block]:
    """Yield the commands of a console block, each with the lines up to the next."""
    for part in re.finditer(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", body, re.M):
        yield Block("console", part[1], part[2], (start + part.start(2), start + part.end(2)))


def run_page(text: str, folder: Path) -> list[Ran]:
    """Run all blocks of a page in a folder, in order."""
    space: dict[str, object] = {"__name__": "__main__"}
    with _inside(folder):
        return [
            Ran(block, _printed(block.code, space) if block.kind == "python" else _shell(block))
            for block in blocks(text)
        ]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder and import from it, and leave no trace of either."""
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def _printed(code: str, space: dict[str, object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<page>", "exec"), space)
    return out.getvalue()


def _shell(block: Block) -> str:
    """Run a command as a user does; one that fails must say so on the page (`; echo $?`)."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", block.code],
        env={**os.environ, "PATH": path, "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LONGEST,
    )
    assert done.returncode == 0, f"{block.code}{done.stdout}exit code {done.returncode}"
    return done.stdout


def with_needed(page: Path) -> str:
    """Return a page's text after those of the pages that it says it comes after."""
    text = page.read_text(encoding="utf-8")
    needed = [page.parent / name for found in _AFTER.findall(text) for name in found.split(", ")]
    return "".join([*map(with_needed, needed), text])


def differences(ran: Sequence[Ran]) -> list[str]:
    """Return what is not as the page shows it."""
    return [one.differs for one in ran if one.differs]


def corrected(text: str, ran: Sequence[Ran], start: int = 0) -> str:
    """Return a page, from `start` on, with what its blocks printed where that differs."""
    for one in reversed(ran):
        first, end = one.block.span
        if one.found != one.block.shown and first >= start:
            is_shown = one.block.kind == "console" or text[:first].endswith("```text\n")
            assert is_shown, f"printed, but no text block follows:\n{one.block.code}"
            text = text[:first] + one.found + text[end:]
    return text[start:]


def check(page: Path, *, write: bool) -> list[str]:
    """Run a page after those that it needs, in a folder of its own; return what differs."""
    text, own = with_needed(page), page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        ran = run_page(text, Path(folder))
    if write:
        page.write_text(corrected(text, ran, len(text) - len(own)), encoding="utf-8")
    return differences(ran)


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:] if name != "--write"]
    found = {page: check(page, write="--write" in sys.argv) for page in pages}
    for page, differing in found.items():
        print(f"{page}: {len(differing)} blocks differ", *differing, sep="\n")
    sys.exit(any(found.values()))
