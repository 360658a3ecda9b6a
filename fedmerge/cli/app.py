"""The program: its commands, each carried out by a module that is imported when it is called."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmerge import __version__
from fedmerge.cli.command_line import Command, dials_of, parameter
from fedmerge.cli.commands import COMMANDS, INTRODUCTION
from fedmerge.cli.exit_codes import MESSAGE, at_work, foreseen
from fedmerge.cli.help import command_help, program_help
from fedmerge.cli.output import Terminal
from fedmerge.errors import UsageError
from fedmerge.process import uncollected

_QUIET_HELP: dict[str, Any] = {"help_option_names": []}  # ours is shown
app = typer.Typer(
    name="fedmerge",
    invoke_without_command=True,
    context_settings=_QUIET_HELP,
    pretty_exceptions_enable=False,
)


def _shown(text: Callable[[], str]) -> Callable[[typer.Context, bool], None]:
    """Return the callback of a flag that prints a text and ends the command."""

    def show(context: typer.Context, asked: bool) -> None:
        if asked and not context.resilient_parsing:
            print(text())
            raise typer.Exit

    return show


def _flag(name: str, text: Callable[[], str], *more: str) -> Any:
    return typer.Option(*more, f"--{name}", is_eager=True, callback=_shown(text), metavar="")


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, _flag("version", lambda: f"fedmerge {__version__}")] = False,
    usage: Annotated[bool, _flag("help", program_help, "-h", "--help-all")] = False,
) -> None:
    """Merge separately trained PyTorch checkpoints of one architecture into one model."""
    if context.invoked_subcommand is None:
        print(INTRODUCTION)


def _load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Read a configuration before the other options, whose defaults it sets."""
    if path is not None:
        from fedmerge.cli.config import load_config

        load_config(context, path)
    return path


def _signature(command: Command) -> inspect.Signature:
    """Return the signature from which typer makes the options of a command."""
    callbacks = {
        "config": _load_config,
        "help": _shown(lambda: command_help(command, whole=False)),
        "help_all": _shown(lambda: command_help(command, whole=True)),
    }
    context = inspect.Parameter(  # typer fills it in
        "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
    )
    early = {name: {"callback": call, "is_eager": True} for name, call in callbacks.items()}
    options = [parameter(own, **early.get(own.name, {})) for own in command.parameters]
    return inspect.Signature([context, *options])


def _callback(command: Command) -> Callable[..., None]:
    """Return the function that typer calls; heavy imports happen in it, so that help is quick."""

    def call(**given: Any) -> None:
        context = given["context"]
        context.obj.command = command
        given |= dials_of(command, context, given.get("set") or ())
        if "threads" in given:
            _use_threads(given["threads"])
        told = Terminal(given["json"], given["quiet"], given["verbose"], command.speak)
        with foreseen(told):
            with uncollected():
                module = importlib.import_module(f"fedmerge.cli.{command.name}")
            with at_work(getattr(module, "STOPPED", MESSAGE)):
                for note in _notes(context, given):
                    told.note(f"note: {note}")
                code = module.run(given, told) or 0
        raise typer.Exit(code)

    call.__signature__ = _signature(command)  # type: ignore[attr-defined]
    return call


def _notes(context: typer.Context, given: dict[str, Any]) -> list[str]:
    if given.get("config") is None:
        return []
    from fedmerge.cli.config import code_of_config

    return code_of_config(context, given)


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
        raise UsageError(f"`threads` is {threads}, expected a whole number from 1")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)


for _command in COMMANDS.values():
    app.command(_command.name, help=_command.help, context_settings=_QUIET_HELP)(
        _callback(_command)
    )
