"""The boundary around the user's code: what leaves it, in whose name, with which line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import load_factory, plan_model
from fedmerge.errors import (
    CheckpointError,
    Defect,
    FedmergeError,
    ModelCodeError,
    TrainingCodeError,
    UserCodeError,
)
from fedmerge.process import listening
from fedmerge.tracebacks import USERS, failure_of, is_users, last_line, whole_traceback
from fedmerge.user_code import (
    StopRun,
    find_object,
    optional_tensors,
    own_code,
    run_model,
    user_code,
)

HERE = Path(__file__).name


class Failing(nn.Module):
    """A model whose forward raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "kind", [SystemExit, GeneratorExit, StopIteration, BaseException, KeyError]
)
def test_whatever_code_raises_becomes_an_error_that_keeps_it(kind: type[BaseException]) -> None:
    with pytest.raises(ModelCodeError, match=rf"{kind.__name__}: '?mine'? \(") as caught:
        run_model(Failing(kind("mine")), [torch.ones(2, 3)])
    assert isinstance(caught.value.__cause__, kind)
    assert caught.value.problem.startswith("the model does not run on inputs of shape (2, 3): ")
    assert HERE in caught.value.problem
    assert "in forward" in caught.value.details
    assert (caught.value.kind, caught.value.exit_code) == ("ArchitectureError", 3)


def test_errors_of_ours_pass_as_they_are() -> None:
    error = CheckpointError("a file")
    with pytest.raises(CheckpointError, match=r"^a file$") as caught, user_code("it fails"):
        raise error
    assert caught.value is error


def test_the_place_of_an_error_is_put_in_front_and_its_traceback_stays() -> None:
    error = TrainingCodeError("it fails", "a hint", details="lines").within("a.npz")
    assert (error.problem, error.hint, error.details) == ("a.npz: it fails", "a hint", "lines")
    assert (error.kind, error.exit_code, str(error)) == ("TrainingError", 1, "a.npz: it fails")


def ours() -> None:
    """Stand for a callback of ours that has a bug."""
    with own_code():
        raise LookupError("our own")


def test_a_bug_of_ours_leaves_whatever_the_code_around_it_does() -> None:
    def swallow() -> None:
        with suppress(BaseException):
            ours()

    def change() -> None:
        try:
            ours()
        except LookupError as error:
            raise ValueError("theirs") from error

    for around in (ours, swallow, change):
        with pytest.raises(LookupError, match=r"^our own$"), user_code("it fails"):
            around()


def test_what_is_meant_to_end_a_run_is_no_bug_of_ours() -> None:
    with pytest.raises(UserCodeError, match="it fails: StopRun"), user_code("it fails"), own_code():
        raise StopRun


def test_a_stack_that_the_user_s_code_filled_is_no_bug_of_ours() -> None:
    def deeper() -> None:
        with own_code():
            sys.getrecursionlimit()
        deeper()

    with pytest.raises(UserCodeError, match="RecursionError"), user_code("it fails"):
        deeper()


def test_an_op_s_rule_that_fails_is_ours_and_a_forward_that_fails_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            try:
                out: Tensor = self.layer(x)
            except Exception:
                return x
            return out

    def fails(*_: object) -> None:
        raise RuntimeError("a rule")

    inputs = (torch.ones(2, 3),)
    plan_model(Careful(), inputs)
    with pytest.raises(ModelCodeError, match="RuntimeError: a forward"):
        plan_model(Failing(RuntimeError("a forward")), inputs)
    monkeypatch.setattr("fedmerge.architecture.from_code.tracing._apply", fails)
    with pytest.raises(RuntimeError, match=r"^a rule$"):
        plan_model(Careful(), inputs)


def test_interrupts_are_those_that_were_heard() -> None:
    def raised(error: BaseException | None, heard: bool | None) -> type[BaseException] | None:
        try:
            with listening(lambda: heard), user_code("it fails"):
                if error is not None:
                    raise error
        except BaseException as left:
            return type(left)
        return None

    class Own(KeyboardInterrupt):
        """An exception of the user's."""

    assert raised(KeyboardInterrupt(), None) is KeyboardInterrupt  # nobody knows better
    assert raised(Own(), None) is ModelCodeError
    assert raised(KeyboardInterrupt(), False) is ModelCodeError
    assert raised(ValueError(), True) is KeyboardInterrupt
    assert raised(None, True) is KeyboardInterrupt
    assert raised(None, False) is None


def test_what_code_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with user_code("it fails"):
        print("theirs")
    print("ours")
    assert capsys.readouterr() == ("ours\n", "theirs\n")


def test_an_error_is_told_in_one_line_however_long_it_is() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise SystemExit(0)

    assert last_line(ValueError("one\n\ttwo\nthree")) == "ValueError: one two three"
    assert last_line(SystemExit()) == "SystemExit"
    assert last_line(MuteError()) == "MuteError: it can't be shown"
    long = last_line(ValueError("a" * 1000 + "z" * 1000))
    assert len(long) < 450
    assert long.startswith("ValueError: aaa")
    assert long.endswith("zzz")


def test_an_endless_traceback_loses_its_middle() -> None:
    def first(number: int) -> int:
        return second(number + 1)

    def second(number: int) -> int:
        return first(number + 1)

    with pytest.raises(RecursionError, match="recursion") as caught:
        first(0)
    text = whole_traceback(caught.value)
    assert len(text) < 41_000
    assert text.startswith("Traceback (most recent call last):")
    assert "RecursionError: maximum recursion depth exceeded" in text.splitlines()[-1]


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("x = 1\ndef build(:\n")
    with pytest.raises(ModelCodeError, match=r"SyntaxError: .*net\.py:2\)$"):
        load_factory(f"{tmp_path / 'net.py'}:build", {})


def test_objects_know_by_which_reference_they_were_given(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        1 / 0\n"
    )
    reference = f"{tmp_path / 'net.py'}:Net"
    with pytest.raises(ModelCodeError, match=r"ZeroDivisionError: division by zero") as caught:
        run_model(load_factory(reference, {}), [torch.ones(1)])
    assert caught.value.problem.endswith(f"{tmp_path / 'net.py'}:4), in '{reference}'")


def test_unforeseen_errors_are_the_user_s_where_their_code_raised_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def fails():\n    raise LookupError('theirs')\n")
    fails = find_object(f"{tmp_path / 'own.py'}:fails", what="function")
    assert callable(fails)
    with pytest.raises(LookupError, match="theirs") as caught:
        fails()
    assert is_users(caught.value)
    failure = failure_of(caught.value)
    assert isinstance(failure, UserCodeError)
    assert failure.exit_code == 1
    USERS.clear()
    assert isinstance(failure_of(caught.value), Defect)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (KeyError("x"), Defect, "a defect in fedmerge: KeyError: 'x'"),
        (MemoryError(), FedmergeError, "out of memory"),
        (PermissionError(13, "Permission denied", "f"), FedmergeError, "Permission denied: 'f'"),
    ],
)
def test_unforeseen_errors_are_told_apart(
    error: Exception, kind: type[FedmergeError], says: str
) -> None:
    failure = failure_of(error)
    assert type(failure) is kind
    assert says in failure.problem
    assert failure.exit_code == (70 if kind is Defect else 1)


def test_torch_says_which_tensors_a_file_may_lack() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert optional_tensors(net) == {"1.num_batches_tracked"}
    assert optional_tensors(nn.Linear(2, 3)) == set()


def changing(change: Callable[[], object]) -> None:
    with user_code("it changes its process", error=TrainingCodeError):
        change()


def a_shallow_stack() -> None:
    sys.setrecursionlimit(200)


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "the current folder": (lambda: os.chdir("/"), os.getcwd),
    "where modules are looked for": (lambda: sys.path.clear(), lambda: list(sys.path)),
    "how deep calls may be": (a_shallow_stack, sys.getrecursionlimit),
    "the standard error": (lambda: setattr(sys, "stderr", None), lambda: sys.stderr),
    "torch's default device": (
        lambda: torch.set_default_device("meta"),
        torch.get_default_device,
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_code_changes_about_its_process_is_put_back(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change, look = CHANGES[what]
    monkeypatch.chdir(tmp_path)
    before, seen = look(), list[object]()

    def change_and_look() -> None:
        change()
        seen.append(look())

    changing(change_and_look)
    assert look() == before
    assert seen[0] != before  # negative control: the code saw its own change


def test_what_code_adds_to_its_process_stays(tmp_path: Path) -> None:
    depth = sys.getrecursionlimit()
    try:
        changing(lambda: sys.path.append(str(tmp_path)))
        changing(lambda: sys.setrecursionlimit(depth + 7))
        assert sys.path[-1] == str(tmp_path)
        assert sys.getrecursionlimit() == depth + 7
    finally:
        sys.path.remove(str(tmp_path))
        sys.setrecursionlimit(depth)


def test_blocks_that_overlap_put_back_what_was_there_before_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (user_code(name, error=TrainingCodeError) for name in ("one", "two"))
    first.__enter__()
    os.chdir("/")
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert Path.cwd() == tmp_path


def test_code_that_ends_the_process_at_once_has_failed() -> None:
    with pytest.raises(TrainingCodeError, match=r"it changes its process: SystemExit: os._exit\(0"):
        changing(lambda: os._exit(0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs copies of a process")
def test_a_copy_of_the_process_may_end_at_once() -> None:
    codes: list[int] = []

    def copy() -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    changing(copy)
    assert codes == [7]
