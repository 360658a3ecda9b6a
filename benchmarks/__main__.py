"""`make bench`: print every benchmark next to its bar, write them as JSON or into the page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.page import write_page
from benchmarks.report import Report, measured, merged, read_report
from benchmarks.suites import SUITES


def main() -> None:
    """Run benchmarks; a missed bar is shown, and an error only with --strict."""
    arguments = _arguments()
    if arguments.list:
        for name, suite in SUITES.items():
            print(f"{name:<15}{suite.title}{' (--all)' if suite.is_slow else ''}")
        return
    report = _report(arguments)
    if arguments.json:
        text = json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"
        _write(arguments.json, text)
    if arguments.page:
        write_page(report, Path(arguments.page))
    missed = [
        result for results in report.suites.values() for result in results if not result.is_met
    ]
    if arguments.strict and missed:
        sys.exit(f"{len(missed)} bars missed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help="names of suites; none: all that are not slow")
    parser.add_argument("--all", action="store_true", help="slow suites too")
    parser.add_argument("--list", action="store_true", help="list the suites")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for stdout")
    parser.add_argument("--page", metavar="FILE", help="put the results into the page")
    parser.add_argument(
        "--read", metavar="FILE", help="keep what --json wrote, run named suites anew"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no suite called {', '.join(sorted(unknown))}; see --list")
    return arguments


def _report(arguments: argparse.Namespace) -> Report:
    """Return kept results, with the named suites measured anew, or those of a fresh run."""
    if not arguments.read:
        return measured(_chosen(arguments.suites, everything=arguments.all), shown=sys.stderr)
    kept = read_report(json.loads(Path(arguments.read).read_text(encoding="utf-8")))
    if not arguments.suites:
        return kept
    return merged(kept, measured(arguments.suites, shown=sys.stderr))


def _chosen(names: Sequence[str], *, everything: bool) -> list[str]:
    if names:
        return list(names)
    return [name for name, suite in SUITES.items() if everything or not suite.is_slow]


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
