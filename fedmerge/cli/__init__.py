"""The command line: options in, tables or JSON out, errors as messages and exit codes."""

from fedmerge.cli.boundary import main

__all__ = ["main"]
