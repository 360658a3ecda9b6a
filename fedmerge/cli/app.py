"""The program: its commands, each carried out by a module that is imported when it is called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedmerge import __version__
from fedmerge.cli.commands import COMMANDS, Command
from fedmerge.cli.config import code_of_config
from fedmerge.cli.defects import foreseen
from fedmerge.cli.examples import INTRODUCTION, epilog
from fedmerge.cli.parameters import signature_of
from fedmerge.cli.signals import MESSAGE, at_work
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError

app = typer.Typer(
    name="fedmerge",
    help="Merge separately trained PyTorch checkpoints of one architecture into one model.",
    epilog="Start with: fedmerge match a.pt b.pt -o global.pt",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedmerge {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", callback=_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Merge separately trained PyTorch checkpoints of one architecture into one model."""
    if context.invoked_subcommand is None:
        print(INTRODUCTION)


def _callback(command: Command) -> Callable[..., None]:
    """Return the function that typer calls; heavy imports happen in it, so that help is quick."""

    def call(**given: Any) -> None:
        if "threads" in given:
            _use_threads(given["threads"])
        told = Terminal(given["json"], given["quiet"], given["verbose"])
        with foreseen(told):
            module = importlib.import_module(f"fedmerge.cli.{command.name}")
            with at_work(getattr(module, "STOPPED", MESSAGE)):
                for note in code_of_config(given["context"], given) if "context" in given else ():
                    told.note(f"note: {note}")
                code = module.run(given, told) or 0
        raise typer.Exit(code)

    call.__signature__ = signature_of(command.parameters)  # type: ignore[attr-defined]
    return call


def _use_threads(threads: int | None) -> None:
    """Limit the CPU threads of every library; they read this when they are first imported.

    Torch multiplies what is large. Numpy has the rest, which threads would only slow down: theirs
    wait for work in a loop, and for each other if the machine is busy. Torch's are told to sleep
    meanwhile: small nets took seven times as much CPU time on a busy machine without that.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"--threads is {threads}, expected a whole number from 1")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)


for _command in COMMANDS:
    app.command(
        _command.name,
        help=_command.help,
        rich_help_panel=_command.panel,
        epilog=epilog(_command.name),
    )(_callback(_command))
