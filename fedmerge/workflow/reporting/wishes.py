"""What a report shall show beside what its record tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmerge.workflow.evaluate import EvaluationOptions
    from fedmerge.workflow.models import ModelCode
    from fedmerge.workflow.reporting.images import ImageOptions


@dataclass(frozen=True)
class Wishes:
    """What else a report shall show, for which models are run."""

    clients: Sequence[str | Path] = ()
    model: ModelCode | None = None
    image: ImageOptions | None = None
    data: str | None = None
    evaluation: EvaluationOptions | None = None
    baselines: Sequence[str | Path] = ()
    work_dir: Path | None = None  # of a run in rounds; None: beside the merged file
    allow_global: Sequence[str] = ()  # classes that the clients' files may name


def short_names(files: Sequence[str | Path], taken: Sequence[str] = ()) -> list[str]:
    """Return what files are called: their stems, numbered where they are not the first of a name.

    >>> short_names(["fedavg.pt", "a/fedma.pt", "b/fedma.pt"], taken=["fedma"])
    ['fedavg', 'fedma (2)', 'fedma (3)']
    """
    uses, names = Counter(taken), []
    for stem in (Path(file).stem for file in files):
        uses[stem] += 1
        names.append(stem if uses[stem] == 1 else f"{stem} ({uses[stem]})")
    return names
