"""The layout shows the way the data goes: modules import only what lies further right."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fedmerge"

USER_CODE = ("references", "user_code", "tracebacks")  # what names it, runs it, tells its failures

# Each part and the parts it may import, besides itself.
ALLOWED = {
    "errors": set(),
    "types": {"errors"},
    "decoding": {"errors"},
    "streams": set(),
    "tracebacks": {"errors"},
    "user_code": {"tracebacks", "errors"},
    "references": {"user_code", "tracebacks", "errors"},
    "checkpoint": {"decoding", "types", "errors"},
    "graph": {"decoding", *USER_CODE, "types", "errors"},
    "matching": {"types", "errors"},
    "units": {"types", "errors"},
    "training": {"checkpoint", "decoding", *USER_CODE, "types", "errors"},
    "engines": {"streams", "user_code", "tracebacks", "types", "errors"},
    "report": {"types", "errors"},  # values to a page; workflow fills them
    # Runs models on inputs read from files.
    "probing": {"graph", "training", "checkpoint", "user_code", "types", "errors"},
    "workflow": {
        *("checkpoint", "graph", "matching", "units", "training", "engines", "probing"),
        *("report", "decoding", *USER_CODE, "types", "errors", "__init__"),
    },
    "cli": {
        *("workflow", "checkpoint", "graph", "decoding", "references", "user_code"),
        *("streams", "tracebacks", "types", "errors", "__init__"),
    },
    "__main__": {"cli"},
    "__init__": {"workflow", "checkpoint", "types", "errors"},
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def part_of(module: Path) -> str:
    """Return the top-level part that a module of the package belongs to."""
    return module.parts[0].removesuffix(".py")


def imported_parts(source: str) -> set[str]:
    """Return the parts of fedmerge that a module's source imports, at any depth."""
    parts = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            is_root = node.module == "fedmerge"
            names = [f"fedmerge.{a.name}" for a in node.names] if is_root else [node.module]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "fedmerge":
                part = rest.partition(".")[0]
                parts.add("__init__" if part == "__version__" else part)
    return parts


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_imports_only_what_lies_further_right(module: Path) -> None:
    part = part_of(module)
    imported = imported_parts((PACKAGE / module).read_text(encoding="utf-8"))
    assert imported <= ALLOWED[part] | {part}


def test_the_rule_sees_a_forbidden_import() -> None:
    found = imported_parts("def f():\n    from fedmerge.workflow.match import match\n")
    assert found == {"workflow"}
    assert not found <= ALLOWED["matching"]


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) not in ("cli", "__main__")])
def test_only_the_command_line_prints_or_exits(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"print", "sys.exit", "exit"} & set(called)
