"""The command line: options in, tables or JSON out, errors as messages and exit codes."""

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    from fedmerge.cli.signals import end_at_once

    end_at_once()  # before anything is imported that takes its time
    from fedmerge.streams import open_closed_streams

    open_closed_streams()  # before anything is opened
    from fedmerge.cli import boundary

    boundary.main()
