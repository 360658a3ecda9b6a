"""The plan of a file's graph, made in a process of its own: operations may crash on odd arguments.

A graph is data of a stranger's. Torch's operations are native code that trusts its caller: some end
the process on arguments that no exporter would write. Then the file is refused, and nothing else is
lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedmerge import errors
from fedmerge.architecture.model_code import plan_program
from fedmerge.architecture.plan_json import plan_from_json, plan_to_json
from fedmerge.checkpoint import Checkpoint, ReadOptions, open_checkpoint
from fedmerge.errors import ArchitectureError, FedmergeError
from fedmerge.private_torch import load_compiler
from fedmerge.process import python_command
from fedmerge.tracebacks import is_out_of_memory
from fedmerge.values.plans import Plan

# What the system lets the other process take if the graph's own budget does not hold.
MOST_CPU_SECONDS = 60
MOST_MEMORY = 200_000_000  # bytes beside what Python and torch take
MOST_MEMORY_PER_BYTE = 24  # besides, of the file: a plan holds its weights as doubles several times
_MEMORY = Path("/proc/self/statm")  # Linux: pages; the sixth number is what RLIMIT_DATA counts
_MAIN = "from fedmerge.architecture.plan_apart import main; main()"


def plan_graph(client: Checkpoint, *, seed: int, tries_growth: bool = True) -> Plan:
    """Return the plan of the graph that a client's file has; what ends its process is an error."""
    if client.path is None:
        return plan_program(client, seed=seed, tries_growth=tries_growth)
    place = {"path": str(client.path), "name": client.name, "reading": vars(client.reading)}
    answer = planned_apart({**place, "seed": seed, "tries_growth": tries_growth})
    if "error" in answer:
        kind = getattr(errors, answer["error"]["kind"], ArchitectureError)
        raise kind(answer["error"]["problem"], answer["error"]["hint"])
    return plan_from_json(answer["plan"])


def planned_apart(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what another process answers to a request, or how it ended."""
    done = subprocess.run(
        python_command(_MAIN, json.dumps(request)), capture_output=True, check=False
    )
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    return crashed(request, done.returncode)


def crashed(request: Mapping[str, Any], code: int) -> dict[str, Any]:
    """Return the answer of a process that ended with a code, below 0 by a signal."""
    how = f"exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = signal.Signals(-code).name
    return _refused(request, f"running its graph ends the process that tries it ({how})")


def _refused(request: Mapping[str, Any], why: str) -> dict[str, Any]:
    problem = f"{request['name']}: {why}"
    hint = "give the model's code with `model`, or export the model again"
    return {"error": {"kind": "ArchitectureError", "problem": problem, "hint": hint}}


def answer_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a request's file as JSON, or what is wrong with it."""
    try:
        reading = ReadOptions(**{k: _as_read(v) for k, v in request["reading"].items()})
        client = open_checkpoint(Path(request["path"]), reading, name=request["name"])
        tries_growth = request.get("tries_growth", True)
        found = plan_program(client, seed=request["seed"], tries_growth=tries_growth)
        return {"plan": plan_to_json(found)}
    except FedmergeError as error:
        told = {"kind": error.kind, "problem": error.problem, "hint": error.hint}
        return {"error": told}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _refused(request, "running its graph takes more memory than any should")


def _as_read(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    """Answer a request of another process."""
    request = json.loads(sys.argv[-1])
    load_compiler()  # the first op does, and no file is to pay for it
    with suppress(ImportError, OSError):
        _limit(Path(request["path"]).stat().st_size)
    os.write(1, json.dumps(answer_to(request)).encode())


def _limit(size: int) -> None:
    """Let the system end this process, or give it no more memory, beyond what a file may cost."""
    import resource  # not on Windows

    used = int(_MEMORY.read_text().split()[5]) * resource.getpagesize()
    for kind, wanted in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, MOST_CPU_SECONDS),
        (resource.RLIMIT_DATA, used + MOST_MEMORY + MOST_MEMORY_PER_BYTE * size),
    ):
        _, most = resource.getrlimit(kind)
        is_free = most == resource.RLIM_INFINITY
        resource.setrlimit(kind, (wanted if is_free else min(wanted, most), most))
