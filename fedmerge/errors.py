"""The one exception family that fedmerge raises on purpose."""


class FedmergeError(Exception):
    """A problem of the user's input, and what to do about it."""

    exit_code = 1

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

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
