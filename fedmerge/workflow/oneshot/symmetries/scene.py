"""A scene whose clients are rewritten to be alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fedmerge.types.progress import Progress
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.agreement import answers
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.scene import Candidate, Scene
from fedmerge.workflow.oneshot.steady import EQUAL
from fedmerge.workflow.oneshot.symmetries.alike import Alike
from fedmerge.workflow.oneshot.symmetries.rewritten import settled
from fedmerge.workflow.prepared import Prepared


@dataclass(frozen=True)
class AlikeScene(Scene):
    """Rewritten clients; only the element-wise average is that of the clients as they are.

    That one is the best of all where clients come from one start, so it must not be lost.
    """

    plain: Scene | None = None  # of the clients as they are
    alike: Alike | None = None

    @property
    def _stored(self) -> Prepared:
        assert self.plain is not None
        return self.plain.prepared

    def ways(self, matched: Merge, lead: int | None, progress: Progress) -> Iterator[Candidate]:
        """Yield a matching's ways to merge units; embeddings are read as products ask for it."""
        assert self.alike is not None
        led = replace(matched, averaging=replace(matched.averaging, lead=lead))
        for candidate in super().ways(self.alike.read_anew(led), lead, progress):
            yield replace(candidate, merge=settled(candidate.merge, self.prepared.aligned))


def made_alike(scene: Scene) -> Scene:
    """Return a scene of clients that are more alike, if they have symmetries and answer as before.

    Where units are compared by their weights alone, clients stay as they are.
    """
    if scene.options.signature == "weights":
        return scene
    alike = Alike(scene.models, scene.options, scene.probes)
    models = alike.rewritten()
    if models is None or not _answers_are_same(scene, models):
        return scene
    kept = ("options", "probes", "held_out", "neutral", "clients", "dropped")
    fields = {name: getattr(scene, name) for name in kept}
    return AlikeScene(models=models, **fields, plain=scene, alike=alike)


def _answers_are_same(scene: Scene, models: Models) -> bool:
    """Return whether all clients answer held-out probes as they did before they were rewritten."""
    for number, before in enumerate(scene.clients):
        after = answers(models.client(number), scene.held_out, device=models.device)
        tolerance = EQUAL * float(before.abs().max())
        if not torch.allclose(before, after, rtol=0, atol=tolerance, equal_nan=True):
            return False
    return True
