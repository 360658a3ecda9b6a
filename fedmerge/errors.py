"""The one exception family that fedmerge raises on purpose."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound="FedmergeError")


class FedmergeError(Exception):
    """A problem of the user's input, and what to do about it."""

    exit_code = 1

    def __init__(self, problem: str, hint: str = "", *, details: str = "", brief: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.details = details  # the traceback of code that failed, which -v shows
        self.brief = brief or problem  # without files and lines, for records

    def within(self: _Error, place: str) -> _Error:
        """Return the error with the place where it happened in front."""
        problem = f"{place}: {self.problem}"
        return type(self)(problem, self.hint, details=self.details, brief=self.brief)

    @property
    def kind(self) -> str:
        """The error's class name, as `--json` reports it."""
        return type(self).__name__


class UsageError(FedmergeError):
    """The command or call itself is wrong; nothing was read or written."""

    exit_code = 2


class CheckpointError(FedmergeError):
    """A file cannot be read or written as a checkpoint."""


class UnsafeCheckpointError(CheckpointError):
    """A file asks for code that nobody allowed."""

    exit_code = 4


class ArchitectureError(FedmergeError):
    """The clients do not share one architecture, or it is not understood."""

    exit_code = 3


class MatchingError(FedmergeError):
    """The matching problem has no admissible solution."""


class TrainingError(FedmergeError):
    """Shards, tasks or the training of a client are not what they must be."""


class VerificationError(FedmergeError):
    """A merged file does not agree with its record or its clients."""


class QualityError(FedmergeError):
    """A merge is not as good as it was required to be."""


class UntoldError(ArchitectureError):
    """A plan can't be verified: the model's outputs tell nothing."""

    @property
    def kind(self) -> str:
        """The error's family, as `--json` reports it."""
        return ArchitectureError.__name__


class UserCodeError(FedmergeError):
    """Code of the user's own failed."""


class ModelCodeError(UserCodeError, ArchitectureError):
    """The user's model can't be built, copied or run."""

    @property
    def kind(self) -> str:
        """The error's family, as `--json` reports it."""
        return ArchitectureError.__name__


class TrainingCodeError(UserCodeError, TrainingError):
    """The user's model, task or function of data fails on data."""

    @property
    def kind(self) -> str:
        """The error's family, as `--json` reports it."""
        return TrainingError.__name__


class Defect(FedmergeError):  # noqa: N818 (whose name --json tells)
    """Something in fedmerge itself is wrong."""

    exit_code = 70
