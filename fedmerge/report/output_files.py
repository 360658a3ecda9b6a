"""The files that a merge is written to: checked before any work, and written after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.checkpoint import (
    OUTPUT_SUFFIXES,
    PROGRAM,
    Checkpoint,
    ModelFolder,
    check_folder,
    check_output,
    parse_size,
)
from fedmerge.errors import UsageError
from fedmerge.merging.client_sources import first_folder, paths_of
from fedmerge.merging.result import Merge
from fedmerge.report.reports import check_report_output, write_report
from fedmerge.values.wording import Progress, silent

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import ModelCode
    from fedmerge.federated.run_folder import WorkDir
    from fedmerge.report.unit_features import ImageOptions
    from fedmerge.training.samples import Data, Preparation


@dataclass(frozen=True)
class OutputFiles:
    """The files that a merge is written to: the model with its record, and a page about it."""

    output: str | Path | None
    force: bool
    shard_size: str | int | None
    report: str | Path | None
    image: ImageOptions | None
    resume: bool = False  # whether they may be those of the run that goes on
    method: str = ""  # of the merge: an ensemble may be written as a program
    folder: ModelFolder | None = None  # the first client, where the output is to be one like it

    @property
    def is_program(self) -> bool:
        """Whether the output is to be a program of the clients as branches."""
        is_named = self.output is not None and Path(self.output).suffix.lower() == PROGRAM
        return is_named and self.method == "ensemble"

    def check(
        self,
        clients: Any,
        *,
        can_run: bool,
        also: Sequence[Path] = (),
        state: WorkDir | None = None,
    ) -> None:
        """Refuse files that must not or can't be written, before any work."""
        if self.output is not None and self.folder is not None:
            inputs = [*paths_of(clients), *also]
            check_folder(self.output, inputs=inputs, force=self.force)
        elif self.output is not None:
            is_sharded = parse_size(self.shard_size) is not None
            inputs = [*paths_of(clients), *also]
            is_own = self.resume and state is not None and state.is_own(Path(self.output))
            check_output(
                self.output,
                inputs=inputs,
                force=self.force or is_own,
                sharded=is_sharded,
                is_program=self.is_program,
            )
        if self.report is not None or self.image is not None:
            self._check_report(clients, can_run=can_run)
        if state is not None and not self.resume:
            output = None if self.output is None else Path(self.output)
            state.check_free(output, force=self.force)

    def check_clients(self, clients: Sequence[Checkpoint]) -> None:
        """Refuse a Lightning checkpoint that the first client gives no values for."""
        if self.output is not None and clients:
            clients[0].beside_state_dict(self.output)

    def _check_report(self, clients: Any, *, can_run: bool) -> None:
        if self.report is None:
            raise UsageError("`image` is for a page about the result", "give `report`, too")
        if self.output is None:
            raise UsageError("`report` is about a file that is written", "give `output`, too")
        if self.is_program:
            raise UsageError("`report` is about one net, not about a program of several")
        may_exist = self.force or self.resume
        check_report_output(Path(self.report), inputs=paths_of(clients), force=may_exist)
        if self.image is not None:
            from fedmerge.report.unit_features import check_image

            if not can_run:
                raise UsageError("`image`: models have to be run for it", "give `model`, too")
            check_image(self.image)

    def write(
        self,
        merge: Merge,
        model: ModelCode | None,
        *,
        clients: Sequence[Checkpoint] = (),
        work_dir: str | Path | None = None,
        progress: Progress = silent,
    ) -> Merge:
        """Write the model, and the page about it; return it with what writing tells of it."""
        if self.output is None:
            return merge
        if self.is_program:
            from fedmerge.merging.ensemble_program import write_branches  # most do without

            return write_branches(merge, Path(self.output), force=self.force)
        written, merge = self._written(merge, Path(self.output), progress)
        if self.report is not None:
            files = [client.path for client in clients if client.path is not None]
            write_report(
                written,
                self.report,
                files if self.image is not None else (),
                model=model,
                image=self.image,
                work_dir=work_dir,
                allow_global=merge.session.options.allow_global,
                force=self.force or self.resume,
                progress=progress,
            )
        return merge

    def _written(self, merge: Merge, output: Path, progress: Progress) -> tuple[Path, Merge]:
        """Write a file or a folder; return the file of the weights."""
        if self.folder is None:
            written = merge.write(
                output,
                force=self.force,
                again=self.resume,
                shard_size=self.shard_size,
                progress=progress,
            )
            return written, merge
        from fedmerge.report.merged_folders import write_merged_folder  # files do without

        return write_merged_folder(
            merge,
            output,
            self.folder,
            force=self.force,
            shard_size=self.shard_size,
            progress=progress,
        )


def folder_like_clients(output: str | Path | None, clients: Any) -> ModelFolder | None:
    """Return the folder that the first client is, where the output is no name of a file."""
    if output is None or Path(output).suffix.lower() in (*OUTPUT_SUFFIXES, PROGRAM):
        return None
    return first_folder(clients)


def first_sample(data: Data | None, preparation: Preparation) -> ImageOptions | None:
    """Return the first sample that global models are evaluated on, where it is in a file."""
    from fedmerge.report.unit_features import ImageOptions

    if not isinstance(data, str | Path) or not Path(data).is_file():
        return None
    return ImageOptions(file=Path(data), preparation=preparation, is_optional=True)
