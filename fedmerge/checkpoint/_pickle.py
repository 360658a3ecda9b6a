"""Read pickles without running anything: only plain values are ever built.

Python's unpickler calls whatever a file names, and torch's, which calls only a list of functions,
still calls those with any arguments. Here nothing named in a file is ever imported or called: a
table says which names stand for which of our own functions, which check their arguments; objects
of classes that the user admits are inert; all other names are noted, and the file is refused.
"""

import struct
from dataclasses import dataclass

from fedmerge.checkpoint._files import Region
from fedmerge.checkpoint._machine import MALFORMED, Machine, Stream, Trust
from fedmerge.checkpoint._opcodes import STEPS, STOP


class PickleError(Exception):
    """A pickle that is damaged or over budget; `asked` are the names it gave until then."""

    def __init__(self, reason: str, asked: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.asked = asked


@dataclass(frozen=True, slots=True)
class Unpickled:
    """What a pickle holds."""

    value: object
    asked: tuple[str, ...]  # names that neither the table nor the user knows
    end: int = 0  # where the pickle ends in its region


NOTHING = Unpickled(None, ())


def read_pickle(region: Region, trust: Trust, *, after: Unpickled = NOTHING) -> Unpickled:
    """Return what the pickle at the beginning of a file, or after another one, holds."""
    machine = Machine(Stream(region, after.end), trust, region.file.budget)
    try:
        value = _run(machine)
    except (*MALFORMED, struct.error) as error:
        reason = str(error) or type(error).__name__
        raise PickleError(reason, tuple(machine.asked)) from error
    return Unpickled(value, tuple(machine.asked), machine.stream.place)


def _run(machine: Machine) -> object:
    """Take step after step; return what is on top of the stack after the last."""
    take, count = machine.take, machine.budget.take_step
    while (code := take(1)[0]) != STOP:
        count()
        step = STEPS.get(code)
        if step is None:
            raise ValueError(f"the unknown step 0x{code:02x}")
        step(machine)
    return machine.stack.pop()
