"""`python -m benchmarks.child module:function JSON`: call a function, print its result as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from importlib import import_module


def main() -> None:
    """Call the function; whatever it prints goes to stderr, so that stdout is the result."""
    name, arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    with contextlib.redirect_stdout(sys.stderr):
        result = getattr(import_module(module), function)(**json.loads(arguments))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
