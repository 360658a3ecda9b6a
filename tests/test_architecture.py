"""The layout shows the way the data goes: modules import only what lies further right."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedmerge.cli import commands

PACKAGE = Path(__file__).parent.parent / "fedmerge"

GROUND = ("values", "errors")
USER_CODE = ("user_code", "tracebacks", "process")  # what names and runs it, and tells its failures
FILES = ("checkpoint", "decoding", "private_torch")
MODELS = ("architecture", "matching", "training", "probes")

# Each part and the parts it may import, besides itself: everything further right.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "decoding": {"errors"},
    "values": {"decoding", "errors"},
    "process": set(),
    "private_torch": set(),
    "tracebacks": {"errors"},
    "user_code": {"process", "tracebacks", "errors"},
    "checkpoint": {"decoding", "private_torch", *GROUND},
    "matching": {*GROUND},
    "engines": {"process", "decoding", *USER_CODE, *GROUND},
    "architecture": {"process", *FILES, *USER_CODE, *GROUND},
    "training": {*FILES, *USER_CODE, *GROUND},
    "probes": {"architecture", "training", *FILES, *USER_CODE, *GROUND},
    "notebook": {"values"},
    "merging": {"notebook", *MODELS, *FILES, *USER_CODE, *GROUND, "__init__"},
    "federated": {"merging", "engines", *MODELS, *FILES, *USER_CODE, *GROUND, "__init__"},
    "report": {"federated", "merging", *MODELS, *FILES, *USER_CODE, *GROUND, "__init__"},
    "api": {
        *("report", "federated", "merging", "engines", "notebook"),
        *(*MODELS, *FILES, *USER_CODE, *GROUND),
    },
    "measuring": {
        *("api", "federated", "merging", "notebook", "engines"),
        *(*MODELS, *FILES, *USER_CODE, *GROUND),
    },
    "cli": {
        "measuring",
        *("api", "report", "federated", "merging", "engines", "architecture", "training"),
        "probes",
        *("process", "__init__"),
        *(*FILES, *USER_CODE, *GROUND),
    },
    "frameworks": {"api", "federated", "merging", *MODELS, "engines", *FILES, *USER_CODE, *GROUND},
    "flower": {"frameworks", "api", "federated", *MODELS, "engines", *FILES, *USER_CODE, *GROUND},
    "nvflare": {"frameworks", "api", "federated", *MODELS, "engines", *FILES, *USER_CODE, *GROUND},
    "__main__": {"cli"},
    "__init__": {
        "api",
        "measuring",
        "report",
        "federated",
        "merging",
        "engines",
        *MODELS,
        *FILES,
        *GROUND,
    },
}
# Packages within packages, and the modules of the same package that they may import.
INNER = {
    "architecture.from_code": {"architecture.widths"},
    "architecture.from_code.rules": {
        "architecture.from_code.trace",
        "architecture.from_code.labels",
    },
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
_NAMED = re.compile(r"fedmerge\.([\w.]+):\w+")  # as engines name what they call
_TYPED = re.compile(r"from fedmerge\.([\w.]+) import (\w+)")  # in programs that tests run


def part_of(module: Path) -> str:
    """Return the top-level part that a module of the package belongs to."""
    return module.parts[0].removesuffix(".py")


def dotted(module: Path) -> str:
    """Return a module's name below fedmerge, that of its package for an `__init__`."""
    name = ".".join(module.with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_names(source: str) -> Iterator[str]:
    """Yield what a source imports of fedmerge, at any depth and in strings, below fedmerge."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("fedmerge.") for a in node.names if _is_ours(a.name))
        elif isinstance(node, ast.ImportFrom) and node.module and _is_ours(node.module):
            assert node.level == 0, "imports are absolute"
            inner = node.module.removeprefix("fedmerge").removeprefix(".")
            yield from (f"{inner}.{alias.name}".strip(".") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (match[1] for match in _NAMED.finditer(node.value))


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "fedmerge"


def imported_parts(source: str) -> set[str]:
    """Return the parts of fedmerge that a module's source imports."""
    heads = {name.partition(".")[0] for name in imported_names(source)}
    return {"__init__" if head == "__version__" else head for head in heads}


def imported_modules(module: Path) -> set[str]:
    """Return the modules of fedmerge that a module imports when it is imported itself."""
    known = {dotted(other) for other in MODULES}
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = imported_names("\n".join(map(ast.unparse, at_once)))
    return {name if name in known else name.rpartition(".")[0] for name in names} & known


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_imports_only_what_lies_further_right(module: Path) -> None:
    part = part_of(module)
    imported = imported_parts((PACKAGE / module).read_text(encoding="utf-8"))
    assert imported <= ALLOWED[part] | {part}


def test_what_is_exported_comes_from_parts_that_may_be_imported() -> None:
    stub = (PACKAGE / "__init__.pyi").read_text(encoding="utf-8")
    assert imported_parts(stub.replace("from .", "from fedmerge.")) <= ALLOWED["__init__"]


@pytest.mark.parametrize("inner", INNER)
def test_inner_packages_know_little_of_what_is_around_them(inner: str) -> None:
    around = inner.rpartition(".")[0]
    own = [module for module in MODULES if dotted(module).startswith(inner)]
    imported = {name for module in own for name in imported_modules(module)}
    near = {name for name in imported if name.startswith(around) and not name.startswith(inner)}
    assert near <= INNER[inner]


def test_no_two_modules_need_each_other() -> None:
    """Follow imports of whole modules; a cycle would have no order to be read in."""
    imports = {dotted(module): imported_modules(module) for module in MODULES}
    # A package's own list of exports is read last.
    exports = {dotted(module) for module in MODULES if module.name == "__init__.py"}
    waiting = {name: needed - exports for name, needed in imports.items()}
    while waiting:
        ready = {name for name, needed in waiting.items() if not needed & set(waiting)}
        assert ready, f"a cycle among {sorted(waiting)}"
        waiting = {name: needed for name, needed in waiting.items() if name not in ready}


# Modules that tests name, since they put something of their own in the place of a private part, or
# since the module is a program. Everything else comes from a package, so that modules can move.
NAMED_BY_TESTS = {
    "architecture.from_code.soundness": "its runs and copies are counted",
    "architecture.from_code.dispatch": "the limit of steps is lowered",
    "architecture.from_code.program_budget": "the limit of steps is lowered",
    "architecture.model_code": "its steps are watched",
    "architecture.plan_apart": "graphs are planned in the process of the tests",
    "checkpoint.tensors": "blocks are made small",
    "checkpoint.torchscript": "the limit of attributes is lowered",
    "checkpoint.writing": "tensors are made to count as large",
    "cli.demo": "trains for one epoch only",
    "cli.exit_codes": "signals are sent between two of its steps",
    "cli.reference": "a program: python -m fedmerge.cli.reference",
    "cli.schemas": "a program: python -m fedmerge.cli.schemas",
    "engines.flower_engine": "its limits are lowered",
    "engines.nvflare_engine": "its limits are lowered",
    "engines.processes": "its worker is replaced by one that hangs or talks nonsense",
    "engines.ray_engine": "its limits are lowered",
    "federated.fedma": "its steps are watched",
    "matching.assignment": "solvers are watched and taken away",
    "matching.features": "blocks are made small",
    "matching.scores": "blocks are made small",
    "matching.sweeps": "its steps are watched",
    "merging.by_probes": "its steps are watched",
    "merging.by_weights": "its steps are watched",
    "merging.candidates": "its steps are watched",
    "merging.fit": "its limit of memory is lowered",
    "merging.targets": "its limit of memory is lowered",
    "probes.least_squares": "its steps are watched",
    "report.charts": "its limits are lowered",
    "architecture.from_library.transformers_models": "the library is taken from it",
    "report.merged_folders": "its limit is lowered",
    "report.drawing": "its colours are compared",
}
TESTS = sorted(Path(__file__).parent.rglob("*.py"))


@cache
def exported() -> set[str]:
    """Return all that packages export, such as `cli.app`, which is also a module's name."""
    return {
        f"{'.'.join(stub.relative_to(PACKAGE).parent.parts)}.{alias.name}"
        for stub in PACKAGE.rglob("__init__.pyi")
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def deep_modules(source: str) -> set[str]:
    """Return the modules inside packages that a test names when it imports."""
    modules = {dotted(module) for module in MODULES if module.name != "__init__.py"}
    names = {*imported_names(source), *(f"{m[1]}.{m[2]}" for m in _TYPED.finditer(source))}
    homes = names - exported() | {name.rpartition(".")[0] for name in names}
    return {name for name in homes & modules if "." in name}


def test_tests_import_from_packages() -> None:
    sources = {test: test.read_text(encoding="utf-8") for test in TESTS if test != Path(__file__)}
    named = {str(test): deep_modules(source) for test, source in sources.items()}
    inside = {test: modules - NAMED_BY_TESTS.keys() for test, modules in named.items()}
    assert {test: modules for test, modules in inside.items() if modules} == {}
    assert set().union(*named.values()) == NAMED_BY_TESTS.keys()  # none is listed in vain


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from fedmerge.merging.result import Merge\n",
        "import fedmerge.merging.result\n",
        "from fedmerge.merging import result\n",
        "CODE = 'from fedmerge.merging.result import Merge'\n",
    ],
)
def test_the_rule_sees_an_import_from_inside_a_package(source: str) -> None:
    assert deep_modules(source) == {"merging.result"}
    assert not deep_modules("from fedmerge.merging import Merge\nimport fedmerge.errors\n")


def test_no_two_files_have_one_name() -> None:
    names = [module.stem for module in MODULES]
    assert {n for n in names if names.count(n) > 1} == {"__init__", "options"}


STEPS = ("architecture", "engines", "federated", "matching", "merging", "probes", "report")
PARSERS = {"default_work_dir", "given_preparation", "load_model", "event_to_json", "plan_to_json"}
NAMES = commands.COMMANDS.keys()
COMMANDS = [module for module in MODULES if part_of(module) == "cli" and module.stem in NAMES]


def steps_of(source: str) -> set[str]:
    """Return the functions that a module imports past `api`, but for those that parse options."""
    names = [name for name in imported_names(source) if name.partition(".")[0] in STEPS]
    called = {name.rpartition(".")[2] for name in names if ".options." not in name}
    return {name for name in called if name.islower()} - PARSERS


@pytest.mark.parametrize("module", COMMANDS, ids=str)
def test_a_command_puts_no_steps_together(module: Path) -> None:
    assert steps_of((PACKAGE / module).read_text(encoding="utf-8")) == set()


def test_the_rule_sees_a_step_of_a_command() -> None:
    assert steps_of("from fedmerge.merging.methods import merge_session\n") == {"merge_session"}
    assert steps_of("from fedmerge.merging.result import Merge\n") == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from fedmerge.merging.result import Merge\n",
        "import fedmerge.merging.result\n",
        "from fedmerge import merging\n",
        'TASK = "fedmerge.merging.result:Merge"\n',
    ],
)
def test_the_rule_sees_a_forbidden_import(source: str) -> None:
    found = imported_parts(source)
    assert found == {"merging"}
    assert not found <= ALLOWED["matching"]


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) not in ("cli", "__main__")])
def test_only_the_command_line_prints_or_exits(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not {"print", "sys.exit", "exit"} & set(called)


ATTRIBUTES_OF_TORCH = {"_schema", "_overloadpacket", "_cdata", "_modules"}


def private_torch_names(source: str) -> set[str]:
    """Return the private names of torch's that a source imports, or reads from what it imported.

    Attributes that only torch's own objects have count wherever they are read.
    """
    tree = ast.parse(source)
    torch_names = {"torch", "nn"}
    private: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            private |= {alias.name for alias in node.names if _is_private_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            private |= {name for name in names if _is_private_torch(name)}
            torch_names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
            continue
        root = ast.unparse(node).split(".")[0]
        is_ours = root in ("self", "cls")
        if root in torch_names or (node.attr in ATTRIBUTES_OF_TORCH and not is_ours):
            private.add(ast.unparse(node))
    return private


ATTRIBUTES_OF_TORCH = {
    "_schema",
    "_overloadpacket",
    "_cdata",
    "_modules",
    "_parameters",
    "_buffers",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private_torch(name: str) -> bool:
    head, *rest = name.split(".")
    return head == "torch" and any(map(_is_private, rest))


@pytest.mark.parametrize("module", [m for m in MODULES if str(m) != "private_torch.py"], ids=str)
def test_one_file_alone_names_private_parts_of_torch(module: Path) -> None:
    assert private_torch_names((PACKAGE / module).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch.utils._pytree as pytree\n",
        "def f():\n    from torch.utils import _pytree\n",
        "from torch._ops import OpOverload\n",
        "kind = torch.nn.modules.conv._ConvNd\n",
        "from torch import nn\nkind = nn.modules.conv._ConvNd\n",
        "def f(op): return op._schema.name\n",
        "def f(t): return t.untyped_storage()._cdata\n",
    ],
)
def test_the_rule_sees_a_private_name_of_torch(source: str) -> None:
    assert len(private_torch_names(source)) == 1
    assert not private_torch_names("class Net:\n    def f(self): return self._own.x\n")
