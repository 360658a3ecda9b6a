"""Where the program starts: before anything else is imported, it can be ended."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from fedmerge.cli.exit_codes import end_at_once

        end_at_once()  # before anything is imported that takes its time
        from fedmerge.streams import open_closed_streams

        open_closed_streams()  # before anything is opened
        from fedmerge.cli import exit_codes
    except Exception as error:
        sys.exit(_not_imported(error))
    exit_codes.main()


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
        print(json.dumps({"schema": 1, "error": told}))  # as cli.terminal has it
    return failure.exit_code
