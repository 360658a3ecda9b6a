"""Whatever the user's code raises is its failure: one line, its traceback with -v, no success."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.helpers import PATIENCE, Cli, Outcome, error_lines
from tests.end_to_end.troubles import Trouble, make_trouble

RAISED = {  # what the code does → the last line of its traceback
    "sys.exit(0)": "SystemExit: 0",
    "GeneratorExit": "GeneratorExit: trouble at {}",
    "KeyboardInterrupt": "KeyboardInterrupt: trouble at {}",
    "StopIteration": "StopIteration: trouble at {}",
    "ValueError": "ValueError: trouble at {}",
    "NotImplementedError": "NotImplementedError: trouble at {}",
    "MemoryError": "MemoryError: trouble at {}",
    "Loud": "Loud: trouble at {}",  # a KeyboardInterrupt of the user's own
    "Odd": "Odd: trouble at {}",  # a BaseException of the user's own
    "Mute": "Mute: it can't be shown",  # an exception whose text is code that exits
    "RecursionError": "RecursionError: maximum recursion depth exceeded",
    "RuntimeError of torch": "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
}
COMMANDS = {"plan": 3, "match": 3, "eval": 1, "compare": 3, "retrain": 1}  # codes of a forward
PLACES = {  # where code is called from, by which command → its exit code
    "import": {"plan": 3, "match": 3, "eval": 1, "compare": 1, "retrain": 3},
    "factory": {"plan": 3, "match": 3, "eval": 3, "compare": 3, "retrain": 3},
    "state_dict": {"plan": 3, "match": 3, "eval": 3, "compare": 3, "retrain": 3},
    "load": {"eval": 3, "retrain": 3},
    "deepcopy": {"plan": 3, "match": 3, "compare": 3},
    "mode": {"plan": 3, "match": 3, "eval": 3, "retrain": 1},
    "parameters": {"plan": 3, "match": 3, "eval": 3, "retrain": 3},
    "getattr": {"plan": 3, "match": 3, "eval": 1, "compare": 3, "retrain": 1},
    "training": {"retrain": 1},
    "backward": {"retrain": 1},
    "task": {"eval": 1, "compare": 1, "retrain": 1},
    "loss": {"eval": 1, "compare": 1, "retrain": 1},
    "metrics": {"eval": 1, "compare": 1},
    "counts": {"retrain": 1},
    "data": {"retrain": 1},
}
EACH_PLACE = [(place, name) for place, codes in PLACES.items() for name in codes]


@pytest.fixture
def trouble(tmp_path: Path) -> Trouble:
    """Code that raises, with all that commands need."""
    return make_trouble(tmp_path)


def failed(outcome: Outcome, code: int, *says: str) -> None:
    """Check that a command failed with one line that says why."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    (error,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    for phrase in says:
        assert phrase in error


def written(trouble: Trouble) -> list[str]:
    return sorted(path.name for path in trouble.folder.glob("out*") if path.is_file())


@pytest.mark.parametrize("name", COMMANDS)
def test_code_without_trouble_succeeds(name: str, trouble: Trouble, cli: Cli) -> None:
    cli.done(*trouble.command(name))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("what", RAISED)
def test_what_a_forward_raises_fails_the_command(
    what: str, name: str, trouble: Trouble, cli: Cli
) -> None:
    trouble.is_at("forward", what)
    says = [RAISED[what].format("forward"), f"{trouble.code}:", f"in '{trouble.code}:Net'"]
    failed(cli(*trouble.command(name)), COMMANDS[name], *says)
    assert written(trouble) == []


@pytest.mark.parametrize(("place", "name"), EACH_PLACE)
def test_wherever_code_exits_the_command_fails(
    place: str, name: str, trouble: Trouble, cli: Cli
) -> None:
    trouble.is_at(place, "sys.exit(0)")
    failed(cli(*trouble.command(name)), PLACES[place][name], "SystemExit: 0", f"{trouble.code}:")
    assert written(trouble) == []


@pytest.mark.parametrize(("place", "name"), [("forward", "eval"), ("import", "plan")])
def test_the_whole_traceback_is_shown_with_v_only(
    place: str, name: str, trouble: Trouble, cli: Cli
) -> None:
    trouble.is_at(place, "Odd")
    quiet, loud = cli(*trouble.command(name)), cli(*trouble.command(name), "-v")
    assert (quiet.code, loud.code) == (loud.code, quiet.code)
    assert "Traceback" not in quiet.err
    assert "Traceback (most recent call last):" in loud.err
    assert f'File "{trouble.code}", line' in loud.err
    assert "in fail" in loud.err
    assert loud.err.endswith("\n".join([*error_lines(quiet.err), ""]))


def test_json_has_the_error_and_nothing_that_the_code_prints(trouble: Trouble, cli: Cli) -> None:
    trouble.is_at("loss", "GeneratorExit")
    error = cli(*trouble.command("eval"), "--json").json["error"]
    assert (error["kind"], error["exit_code"]) == ("TrainingError", 1)
    trouble.is_at("forward", "printed")
    outcome = cli.done(*trouble.command("eval"), "--json")
    assert outcome.json["task"].endswith(":Task")
    assert "a line of the user's code" in outcome.err


def process(arguments: list[str]) -> Outcome:
    """Run a command as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fedmerge", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_a_process_whose_code_exits_with_0_does_not(trouble: Trouble) -> None:
    trouble.is_at("forward", "sys.exit(0)")
    outcome = process(trouble.command("eval"))
    assert (outcome.code, outcome.out) == (1, "")
    assert "SystemExit: 0" in error_lines(outcome.err)[0]


@pytest.mark.parametrize("who", ["a handler", "a thread"])
def test_what_else_runs_in_a_process_does_not_end_it(who: str, trouble: Trouble) -> None:
    trouble.is_at("forward", f"{who} that exits")
    outcome = process(trouble.command("eval"))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert "ValueError: no" in outcome.err.splitlines()[0]


def test_a_model_that_changes_the_folder_is_merged_from_relative_paths(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble.is_at("forward", "another folder")
    monkeypatch.chdir(trouble.folder)
    command = trouble.command("match")
    outcome = process([Path(word).name if word.endswith(".pt") else word for word in command])
    assert outcome.code == 0, outcome.err
    assert list(trouble.folder.glob("*.pt"))


ROUNDS = """
import sys
from pathlib import Path
{code}
class OnceBad(Net):
    def forward(self, x):
        # The first forwards are the trial's and the plan's; a client's own follow.
        if self.training and torch.is_grad_enabled() and len(x) == {rows}:
            raise {error}("bad batch")
        return super().forward(x)
"""


@pytest.mark.parametrize("engine", ["local", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", ["GeneratorExit", "SystemExit", "Loud"])
def test_a_client_s_failure_in_a_round_has_its_last_line_and_its_traceback_with_v(
    engine: str, error: str, trouble: Trouble, cli: Cli
) -> None:
    code = Path(trouble.code).read_text()
    Path(trouble.code).write_text(ROUNDS.format(code=code, rows=8, error=error))
    command = [word.replace(":Net", ":OnceBad") for word in trouble.command("retrain")]
    events = trouble.folder / "events.jsonl"
    ways = ["--engine", engine, "--retries", 0, "--events", events]
    if engine == "processes":
        ways += ["--workers", 1]
    quiet = cli(*command, *ways)
    assert quiet.code == 1
    assert f"{error}: bad batch ({trouble.code}:" in quiet.err
    assert "Traceback" not in quiet.err
    told = [json.loads(line) for line in events.read_text().splitlines()]
    failed = [event for event in told if event["event"] == "client-failed"]
    assert {event["client"] for event in failed} == {"a", "b"}
    assert all("in forward" in event["details"] for event in failed)
    events.unlink()  # nothing is overwritten without --force
    loud = cli(*command, *ways, "--work-dir", trouble.folder / "another", "-v")
    assert "Traceback (most recent call last):" in loud.err
    assert f'File "{trouble.code}", line' in loud.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["eval", pytest.param("match", marks=pytest.mark.slow)])
def test_a_real_interrupt_while_the_user_s_code_runs_is_one(
    name: str, number: int, trouble: Trouble
) -> None:
    trouble.is_at("forward", "sleep")
    running = subprocess.Popen(
        [sys.executable, "-m", "fedmerge", *trouble.command(name)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    while "asleep" not in running.stderr.readline():
        assert running.poll() is None
    time.sleep(0.1)  # until it sleeps indeed
    running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, out, err) == (130, "", "interrupted\n")


SWALLOWS = """
import os, signal
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("steps", nn.Linear(1, 1).weight.long()[0, 0])

    def forward(self, x):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
        except BaseException:
            {reaction}
        return self.last(self.first(x).relu())
"""


@pytest.mark.parametrize("reaction", ["pass", "raise ValueError('mine')", "raise SystemExit(0)"])
def test_code_can_not_swallow_an_interrupt(reaction: str, trouble: Trouble, cli: Cli) -> None:
    Path(trouble.code).write_text(SWALLOWS.format(reaction=reaction))
    command = trouble.command("eval")
    command = [word for word in command if word != "--task" and not word.endswith(":Task")]
    outcome = cli(*command)
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


def broken(*_: Any, **__: Any) -> Any:
    """Stand for a function of fedmerge that has a bug."""
    raise LookupError("of our own")


OURS = {  # functions that the user's code is around, or that once hid behind it
    "plan": "fedmerge.architecture.from_code.tracing._apply",
    "match": "fedmerge.merging.by_probes.probe_clients",
    "eval": "fedmerge.training.shards.Shard.batch",
    "compare": "fedmerge.probes.probe_inputs.readings",
    "retrain": "fedmerge.training.local_training._batches",
    "frontier": "fedmerge.merging.frontier.matched_candidates",
    "export": "fedmerge.merging.onnx_export.tensors_in",
}


@pytest.mark.parametrize("name", OURS)
def test_a_bug_of_ours_is_a_defect_and_never_a_warning(
    name: str, trouble: Trouble, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OURS[name], broken)
    outcome = cli(*trouble.command(name))
    failed(outcome, 70, "error: a defect in fedmerge: LookupError: of our own")
    assert "hint: -v shows the traceback" in outcome.err
    assert "warning" not in outcome.err
    assert written(trouble) == []
    again = ["--work-dir", trouble.folder / "another"] if name == "retrain" else []
    loud = cli(*trouble.command(name), *again, "-v")
    assert (loud.code, "in broken" in loud.err) == (70, True)


@pytest.mark.parametrize("error", [EOFError, KeyError, RecursionError, SystemExit, GeneratorExit])
def test_every_unforeseen_error_is_a_defect_in_json_too(
    error: type[BaseException], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error("unforeseen")

    monkeypatch.setattr("fedmerge.cli.inspect.run", fails)
    outcome = cli("inspect", "a.pt", "--json")
    assert outcome.code == 70
    assert (outcome.json["error"]["kind"], outcome.json["error"]["exit_code"]) == ("Defect", 70)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_no_memory_is_no_defect(
    error: Exception, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("fedmerge.cli.inspect.run", fails)
    cli.refused("inspect", "a.pt", code=1, says=["error: out of memory"])


@pytest.mark.parametrize("module", ["fedmerge.cli.commands", "fedmerge.cli.app", "torch"])
def test_a_module_that_can_not_be_imported_is_one_line(module: str, tmp_path: Path) -> None:
    code = "import sys, importlib.abc\n"
    code += "class No(importlib.abc.MetaPathFinder):\n"
    code += "    def find_spec(self, name, path, target=None):\n"
    code += f"        if name == {module!r}: raise ImportError('no ' + name)\n"
    code += "sys.meta_path.insert(0, No())\n"
    code += "sys.argv = ['fedmerge', 'inspect', 'a.pt', '--json']\n"
    code += "from fedmerge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 70, done.stderr
    assert error_lines(done.stderr)[0].startswith(
        f"error: a defect in fedmerge: ImportError: no {module}"
    )
    assert json.loads(done.stdout)["error"]["kind"] == "Defect"


def test_an_error_of_the_user_s_own_that_claims_success_has_none(
    trouble: Trouble, cli: Cli
) -> None:
    text = "from fedmerge.errors import FedmergeError\n"
    text += "class Fine(FedmergeError):\n    exit_code = 0\n"
    text += "def Net():\n    raise Fine('all is well')\n"
    Path(trouble.code).write_text(text)
    cli.refused(*trouble.command("plan"), code=1, says=["all is well"])
