"""Commands in a process that has all they need: graphs are planned in copies, options made once."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as arrow
import torch
import typer.main
from pyarrow import parquet

from benchmarks.fuzz.costs import add_copy, cost_since, forget_peak
from fedmerge.architecture import plan_apart
from fedmerge.cli.exit_codes import run
from tests.attacks.programs import LINEAR, program, write
from tests.attacks.texts import clients


@contextmanager
def warm() -> Iterator[None]:
    """Let commands for a while do without what only costs time in a process of many commands.

    Their options are made once, and graphs are planned in copies of this process, not in new ones,
    under the same rule: a crash is a refusal.
    """
    once = functools.cache(typer.main.get_command)
    with patch.object(typer.main, "get_command", once):
        with patch.object(plan_apart, "planned_apart", plan_apart.answer_to):
            _warm_up()  # in this process, so that copies have what planning imports
        gc.collect()
        gc.freeze()  # else every copy copies all objects with its first collection
        with patch.object(plan_apart, "planned_apart", _planned_in_a_copy):
            yield
        gc.unfreeze()


def _warm_up() -> None:
    """Run commands of all kinds once, so that what they import is there."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        os.chdir(folder)
        write(folder, program([LINEAR], result="h"))
        (folder / "t.yaml").write_text("seed: 1\n")
        torch.save({"x": torch.zeros(8, 2), "y": torch.arange(8) % 2}, folder / "d.pt")
        parquet.write_table(arrow.table({"x": [0.0] * 8, "y": [0, 1] * 4}), folder / "t.parquet")
        for command in (
            *("plan a.pt2 --quiet", "inspect a.pt2"),
            f"match {clients(folder)} -o g.pt --config t.yaml",
            *("verify g.pt", "report g.pt -o r.html", "convert g.pt -o h.safetensors"),
            "partition d.pt --clients 2 --homogeneous -o shards",
            "partition t.parquet --clients 2 --homogeneous -o tables",
        ):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                code = run(command.split())
            assert code == 0, said.getvalue()
        os.chdir(before)


def _planned_in_a_copy(request: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a file's graph as `planned_apart` does, in a copy that need not import torch again."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            before = forget_peak()
            answer = plan_apart.answer_to(request)
            told = json.dumps({"answer": answer, "memory": cost_since(before).memory})
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(told.encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    if code := os.waitstatus_to_exitcode(status):
        return plan_apart.crashed(request, code)
    found: dict[str, Any] = json.loads(text)
    add_copy(found["memory"])
    return dict(found["answer"])
