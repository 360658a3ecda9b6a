"""The JSON schemas of what fedmerge reads and prints, made from the types that decode it.

`python -m fedmerge.cli.schemas FOLDER` writes them; docs/reference/schemas has them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from fedmerge.cli.config_types import config_type, configurable
from fedmerge.cli.results import RESULTS, Failed
from fedmerge.graph.plan_json import JsonPlan
from fedmerge.workflow.record_file import RecordFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
CLASS_COUNTS = dict[str, list[int | float]]


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by the name of its file."""
    found = {
        "record": _schema("A merge record", RecordFile),
        "plan": _schema("A plan", JsonPlan),
        "class-counts": _schema("Samples per client and class", CLASS_COUNTS),
    }
    for command in configurable():
        config = _schema(f"A configuration of `fedmerge {command.name}`", config_type(command))
        found[f"config-{command.name}"] = _with_underscores(config)
    for name, kinds in RESULTS.items():
        found[f"json-{name}"] = _schema(f"What `fedmerge {name} --json` prints", *kinds, Failed)
    return found


def _schema(title: str, *kinds: Any) -> dict[str, Any]:
    """Return the schema of a document of one of some types."""
    each, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    document = each[0] if len(each) == 1 else {"anyOf": list(each)}
    definitions = {"$defs": components} if components else {}
    return {"$schema": DIALECT, "title": title, **document, **definitions}


def _with_underscores(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a configuration with names in both of their spellings."""
    for definition in schema["$defs"].values():
        names = definition["properties"]
        names |= {name.replace("-", "_"): value for name, value in names.items()}
    return schema


def text_of(schema: dict[str, Any]) -> str:
    """Return a schema as it stands in its file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main(folder: Path) -> None:
    """Write all schemas into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.json").write_text(text_of(schema), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
