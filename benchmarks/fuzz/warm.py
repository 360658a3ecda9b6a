"""A process that has imported torch and fedmerge, and runs every command in a copy of itself."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.fuzz.children import PATIENCE, limit
from benchmarks.fuzz.costs import cost_since, forget_peak
from benchmarks.fuzz.forked import warm
from fedmerge.cli.exit_codes import main as be_fedmerge


def main() -> None:
    """Answer every line `[arguments, folder, folder for what is printed]` with an exit code."""
    torch.set_num_threads(1)
    with warm():
        for line in sys.stdin:
            arguments, folder, texts = json.loads(line)
            child = os.fork()
            if child == 0:
                _be_a_command(arguments, folder, Path(texts))
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


def _be_a_command(arguments: list[str], folder: str, texts: Path) -> None:
    """Be the command, and end; what it took is beside what it printed."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(texts / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdin, sys.argv = Path(os.devnull).open(), ["fedmerge", *arguments]  # noqa: SIM115 (to the end)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
    limit()
    signal.alarm(PATIENCE)
    before = forget_peak()
    code = 70
    try:
        be_fedmerge()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        (texts / "cost").write_text(json.dumps(asdict(cost_since(before))))
        os._exit(code)


if __name__ == "__main__":
    main()
