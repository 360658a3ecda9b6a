"""Pages do what they say: their blocks run, and print what the pages show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import DOCS, Block, Ran, agree, blocks, corrected, differences, run_page

ROOT = DOCS.parent
CHECKED = (
    "README.md",
    "docs/tutorial.md",
    "docs/reference/api.md",
    "docs/how-to/new-op.md",
    "docs/how-to/fold-ensemble.md",
)  # `make docs-check` runs the others: they train for minutes, or name what rounding decides


@pytest.mark.slow
@pytest.mark.parametrize("page", CHECKED)
def test_every_block_of_a_page_runs_and_prints_what_the_page_shows(page: str) -> None:
    command = [sys.executable, "-m", "tests.pages", str(ROOT / page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.stdout != f"{ROOT / page}: 0 blocks differ\n":  # an assertion would print it all twice
        pytest.fail(done.stdout or done.stderr, pytrace=False)
    assert done.returncode == 0


def page_of(*parts: str) -> str:
    return "\n".join(parts)


PYTHON = "```python\nprint(6 * 7, 'units')\n```\n"
CONSOLE = "```console\n$ echo 'two units'\ntwo units\n$ echo three\nthree\n```\n"


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    text = page_of(
        "```python\nfrom pathlib import Path\nPath('a').write_text('1')\n```\n",
        "```console\n$ cat a && echo\n1\n$ echo 2 > a\n```\n",
        "```python\nprint(Path('a').read_text().strip())\n```\n",
        "```text\n2\n```\n",
    )
    assert differences(run_page(text, tmp_path)) == []


@pytest.mark.parametrize(
    "text",
    [
        PYTHON,  # prints, but the page shows nothing
        page_of(PYTHON, "```text\n42 groups\n```\n"),
        page_of(PYTHON, "```text\n62 units\n```\n"),
        page_of(PYTHON, "```text\n42 units\nand more\n```\n"),
        page_of(PYTHON, "The output is elsewhere.\n", "```text\n42 units\n```\n"),
        CONSOLE.replace("three\n```", "four\n```"),
        CONSOLE.replace("$ echo three\nthree\n", "$ echo three\n"),
    ],
)
def test_a_block_that_prints_anything_else_differs(text: str, tmp_path: Path) -> None:
    assert len(differences(run_page(text, tmp_path))) == 1


def test_of_a_block_that_differs_only_the_lines_that_do_are_told() -> None:
    shown = "read 2 files\nwidth 64\naccuracy 94.9 %\ndone in 3.2 s\n"
    found = "read 2 files\nwidth 99\naccuracy 94.8 %\na warning\ndone in 4 s\n"
    (told,) = differences(
        [Ran(Block("console", "fedmerge match \\\n  a.pt\n", shown, (0, 0)), found)]
    )
    assert told == "fedmerge match \\ …\n- width 64\n+ width 99\n+ a warning"


def test_the_same_pages_without_the_mistake_do_not_differ(tmp_path: Path) -> None:
    right = page_of(PYTHON, "```text\n42 units\n```\n", CONSOLE)
    assert differences(run_page(right, tmp_path)) == []


def test_a_command_that_fails_unannounced_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 3"):
        run_page("```console\n$ exit 3\n```\n", tmp_path)
    shown = "```console\n$ (exit 3); echo code $?\ncode 3\n```\n"
    assert differences(run_page(shown, tmp_path)) == []


def test_a_python_block_that_raises_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run_page("```python\n1 / 0\n```\n", tmp_path)


def test_a_block_of_an_unknown_kind_is_not_skipped_in_silence() -> None:
    with pytest.raises(AssertionError, match="unknown kind: pyhton"):
        list(blocks("```pyhton\n1\n```\n"))


@pytest.mark.parametrize(
    ("shown", "found", "same"),
    [
        ("done in 3.2 s", "done in 41 s", True),
        ("accuracy  94.9 %", "accuracy   94.0 %", True),
        ("accuracy  94.9 %", "accuracy   84.0 %", False),
        ("fc1 64 → 88", "fc1 64 → 87", True),
        ("fc1 64 → 88", "fc2 64 → 88", False),
        ("fc1 64 → 88", "fc1 64 → 99", False),
        ("6,610 parameters", "6,535 parameters", True),
        ("6,610 parameters", "4,810 parameters", False),
        ("loss 0.20", "loss 0.22", True),
        ("loss 0.20", "loss 0.40", False),
        ("2 clients", "3 clients", False),
        ("mid.weight[0]", "mid.weight[1]", False),
        ("True", "False", False),
        ("a\nb", "a", False),
    ],
)
def test_only_times_and_rounding_may_differ(shown: str, found: str, same: bool) -> None:
    assert agree(shown, found) is same


def test_corrections_replace_outputs_and_nothing_else(tmp_path: Path) -> None:
    right = page_of("# Page\n", PYTHON, "```text\n42 units\n```\n", CONSOLE, "The end.\n")
    wrong = right.replace("42 units", "1 unit\nor none").replace("\nthree\n", "\n")
    assert corrected(wrong, run_page(wrong, tmp_path)) == right
    start = wrong.index("```console")
    assert corrected(wrong, run_page(wrong, tmp_path), start) == right[right.index("```console") :]


def test_output_that_the_page_has_no_room_for_is_not_written_into_it() -> None:
    block = Block("python", "print(1)", "", (3, 3))
    with pytest.raises(AssertionError, match="no text block follows"):
        corrected("abcdef", [Ran(block, "1\n")])
