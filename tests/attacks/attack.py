"""What an attack is: files in a folder, a command on them, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Build: TypeAlias = Callable[[Path], str]  # writes files into a folder, returns the command


@dataclass(frozen=True)
class Attack:
    """Hostile files, and with which codes a command may end on them."""

    build: Build
    codes: frozenset[int]


ATTACKS: dict[str, Attack] = {}


def attack(*codes: int) -> Callable[[Build], Build]:
    """Register a function as an attack under its name; `codes` are the exit codes allowed."""

    def register(build: Build) -> Build:
        add(build.__name__.strip("_"), build, *codes)
        return build

    return register


def add(name: str, build: Build, *codes: int) -> None:
    """Register an attack."""
    assert name not in ATTACKS, f"two attacks called {name}"
    ATTACKS[name] = Attack(build, frozenset(codes))
