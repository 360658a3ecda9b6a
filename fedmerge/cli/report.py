"""`fedmerge report`, and `--report` of other commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.cli.arguments import model_code
from fedmerge.cli.scores import evaluating, evaluation_options
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.reporting.report import check_report_output, write_report

if TYPE_CHECKING:
    from fedmerge.workflow.reporting.images import ImageOptions


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Write a page about a merged file, and say where it is."""
    with evaluating(terminal) as progress:
        written = write_report(
            given["merged"],
            given["output"],
            given["clients"] or (),
            model=model_code(given),
            image=_image_options(given),
            data=given["data"],
            evaluation=evaluation_options(given) if given["data"] is not None else None,
            baselines=given["baseline"] or (),
            work_dir=given["work_dir"],
            allow_global=given["allow_global"] or (),
            force=given["force"],
            progress=progress,
        )
    terminal.result(written.to_json())
    terminal.line(written.verdict)
    terminal.line(f"wrote {written.output}; open it with a browser")


def _image_options(given: Mapping[str, Any]) -> ImageOptions | None:
    """Return the image of --image, if there is one."""
    if given["image"] is None:
        for name in ("image_index", "image_group"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --image")
        return None
    return _image_of(given["image"], given)


def _image_of(file: Path, given: Mapping[str, Any]) -> ImageOptions:
    from fedmerge.workflow.evaluate import given_preparation  # records alone do without
    from fedmerge.workflow.reporting.images import ImageOptions

    return ImageOptions(
        file=file,
        index=given["image_index"] or 0,
        preparation=given_preparation(given["normalize"], given["channels_last"]),
        groups=tuple(given["image_group"] or ()),
    )


def check_also(given: Mapping[str, Any], inputs: Sequence[Path]) -> None:
    """Refuse a --report that can't be written, before any work."""
    image = _image_options(given)
    if given["report"] is None:
        if image is not None:
            raise UsageError("--image is for a page about the result", "give --report, too")
        return
    check_report_output(given["report"], inputs=inputs, force=_may_replace(given))
    if image is not None:
        from fedmerge.workflow.reporting.images import check_image

        if given["model"] is None:
            raise UsageError("--image: models have to be run for it", "give their code: --model")
        check_image(image)


def also_report(
    given: Mapping[str, Any],
    output: Path,
    *,
    clients: Sequence[Path] = (),
    work_dir: Path | None = None,
    progress: Progress = silent,
) -> dict[str, str]:
    """Write the page of --report about what was just written; return it as `--json` prints it."""
    if given["report"] is None:
        return {}
    image = _image_options(given) or _first_sample(given)
    write_report(
        output,
        given["report"],
        clients if image is not None else (),
        model=model_code(given),
        image=image,
        work_dir=work_dir,
        allow_global=given["allow_global"] or (),
        force=_may_replace(given),
        progress=progress,
    )
    return {"report": str(given["report"])}


def _may_replace(given: Mapping[str, Any]) -> bool:
    """Whether an older page may be replaced: that of a run which goes on is its own."""
    return bool(given["force"] or given.get("resume"))


def _first_sample(given: Mapping[str, Any]) -> ImageOptions | None:
    """Return the first sample that a run in rounds was evaluated on: no client's own."""
    data = given.get("data")
    if data is None or not Path(data).is_file():
        return None
    return replace(_image_of(Path(data), given), is_optional=True)


def say_report(written: Mapping[str, str], terminal: Terminal) -> None:
    """Say where the page is, if there is one."""
    for page in written.values():
        terminal.line(f"wrote {page}, a page about it")
