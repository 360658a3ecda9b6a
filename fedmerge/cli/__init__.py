"""The command line: options in, tables or JSON out, errors as messages and exit codes."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from fedmerge.cli.signals import end_at_once

        end_at_once()  # before anything is imported that takes its time
        from fedmerge.streams import open_closed_streams

        open_closed_streams()  # before anything is opened
        from fedmerge.cli import boundary
    except Exception as error:
        sys.exit(_not_imported(error))
    boundary.main()


def _not_imported(error: Exception) -> int:
    """Say that the command line can't even be imported, and return the code of a defect."""
    import json

    from fedmerge.tracebacks import failure_of

    failure = failure_of(error)
    if {"-v", "--verbose"} & set(sys.argv):
        print(failure.details, file=sys.stderr)
    print(f"error: {failure.problem}\nhint: {failure.hint}", file=sys.stderr)
    if "--json" in sys.argv:
        told = {name: getattr(failure, name) for name in ("kind", "problem", "hint", "exit_code")}
        print(json.dumps({"error": told}))
    return failure.exit_code
