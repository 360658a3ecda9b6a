"""What became of mutants, in a file from which a campaign that was stopped goes on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path


class Outcomes:
    """Outcomes by the name of their mutant; without a file, only those of this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last one, of a process that was killed
                    name, outcome = json.loads(line)
                    self._known[name] = outcome

    def get(self, name: str) -> str | None:
        """Return what became of a mutant, None if it was not tried yet."""
        return self._known.get(name)

    def add(self, name: str, outcome: str) -> None:
        """Keep what became of a mutant."""
        self._known[name] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, outcome]) + "\n")
