"""Exported programs whose graphs loop, grow, or call what they should not."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.attacks.attack import add, attack
from tests.attacks.building import PROTOCOL_2, state_dict, tensor, torch_zip, write_zip

Node = dict[str, Any]
Arg = dict[str, Any]
FLOAT = 7  # the number of float32
DOUBLE, LONG, HALF, COMPLEX = 8, 5, 6, 11


def named(name: str) -> Arg:
    """Return the argument that is a tensor by its name."""
    return {"as_tensor": {"name": name}}


def whole(value: int) -> Arg:
    """Return the argument that is a number."""
    return {"as_int": value}


def sizes(*values: int) -> Arg:
    """Return the argument that is a list of numbers."""
    return {"as_ints": list(values)}


def node(target: str, *arguments: Arg, out: str = "out", outputs: Sequence[Arg] = ()) -> Node:
    """Return one op of a graph; a short name is one of ATen's."""
    full = target if target.startswith(("torch", "_operator", "os")) else f"torch.ops.aten.{target}"
    return {
        "target": full,
        "inputs": [{"name": f"a{k}", "arg": a, "kind": 1} for k, a in enumerate(arguments)],
        "outputs": list(outputs) or [named(out)],
        "metadata": {},
        "is_hop_single_tensor_return": None,
    }


def meta(shape: Sequence[int], dtype: int = FLOAT) -> dict[str, Any]:
    """Return what a graph says of a tensor."""
    strides = [1]
    for length in shape[:0:-1]:
        strides.insert(0, strides[0] * length)
    return {
        "dtype": dtype,
        "sizes": [whole(n) for n in shape],
        "strides": [whole(n) for n in strides[: len(shape)]],
        "storage_offset": whole(0),
        "layout": 7,
        "device": {"type": "cpu", "index": None},
        "requires_grad": False,
    }


def graph(
    nodes: Sequence[Node], *, inputs: Sequence[str], outputs: Sequence[Arg], is_one: bool = True
) -> dict[str, Any]:
    """Return a graph inside a node, which gives one tensor or several."""
    return {
        "inputs": [named(name) for name in inputs],
        "outputs": list(outputs),
        "nodes": list(nodes),
        "tensor_values": {},
        "sym_int_values": {},
        "sym_bool_values": {},
        "is_single_tensor_return": is_one,
    }


def program(
    nodes: Iterable[Node],
    *,
    shape: Sequence[int] = (2, 4),
    weight: Sequence[int] = (4, 4),
    result: str = "out",
    dtype: int = FLOAT,
) -> dict[str, Any]:
    """Return the JSON of a program: x and one weight w in, one tensor out."""
    described = graph(list(nodes), inputs=["w", "x"], outputs=[named(result)])
    described["tensor_values"] = {"w": meta(weight, dtype), "x": meta(shape, dtype)}
    specs = [
        {"parameter": {"arg": {"name": "w"}, "parameter_name": "fc.weight"}},
        {"user_input": {"arg": named("x")}},
    ]
    signature = {"input_specs": specs, "output_specs": [{"user_output": {"arg": named(result)}}]}
    calls = [{"fqn": "", "signature": None}, {"fqn": "fc", "signature": None}]
    return {
        "graph_module": {"graph": described, "signature": signature, "module_call_graph": calls}
    }


def write(
    folder: Path,
    described: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    records: Mapping[str, bytes] | None = None,
    shape: Sequence[int] = (4, 4),
    dtype: int = FLOAT,
) -> str:
    """Write an archive as `torch.export.save` does, and return the command that plans it."""
    size = {FLOAT: 4, DOUBLE: 8, LONG: 8, HALF: 2, COMPLEX: 16}[dtype]
    count = 1
    for length in shape:
        count *= length
    weight = {
        "path_name": "weight_0",
        "is_param": True,
        "use_pickle": False,
        "tensor_meta": meta(shape, dtype),
    }
    chosen = {"fc.weight": weight} if config is None else config
    content = {
        "models/model.json": json.dumps(described).encode(),
        "data/weights/weight_0": b"\0" * (count * size),
        "data/weights/model_weights_config.json": json.dumps({"config": chosen}).encode(),
        "data/constants/model_constants_config.json": b'{"config": {}}',
        "archive_format": b"pt2",
        "byteorder": b"little",
        **(records or {}),
    }
    write_zip(folder / "a.pt2", {f"a/{name}": record for name, record in content.items()})
    return "plan a.pt2"


LINEAR = node("linear.default", named("x"), named("w"), out="h")
H = named("h")


def after_linear(*nodes: Node) -> dict[str, Any]:
    """Return a program that begins with a layer, whose result is `h`."""
    return program([LINEAR, *nodes])


def _ops(name: str, *nodes: Node) -> None:
    add(f"a graph {name}", lambda folder: write(folder, after_linear(*nodes)), 0, 1, 3)


_ops("that is fine", node("relu.default", H))
_ops("that runs code", node("os.system", {"as_string": "mkdir canary"}))
_ops("that saves a file", node("save.default", H, {"as_string": "canary"}))
_ops(
    "that maps a file",
    node("from_file.default", {"as_string": "canary"}, {"as_bool": True}, whole(4)),
)
_ops("that loads", node("torch.load", {"as_string": "a.pt"}))
_ops("that repeats text", node("_operator.mul", {"as_string": "a" * 1000}, whole(1 << 40)))
_ops("that repeats a list", node("_operator.mul", sizes(1), whole(1 << 40)))
_ops("that divides by zero", node("_operator.floordiv", whole(1), whole(0)))
_ops("that divides by zero again", node("_operator.mod", whole(1), whole(0)))
_ops("that makes no number a whole one", node("torch.sym_int", {"as_float": "Infinity"}))
_ops("that makes nothing a whole one", node("torch.sym_int", {"as_float": "NaN"}))
_ops("of a number that is none", node("_operator.neg", {"as_float": "x"}))
_ops(
    "of powers",
    *(
        node(
            "_operator.mul",
            *[{"as_sym_int": {"as_name": f"n{k}"}}] * 2,
            outputs=[{"as_sym_int": {"as_name": f"n{k + 1}"}}],
        )
        for k in range(60)
    ),
)
_ops("that gets an item", node("_operator.getitem", H, whole(0)))
_ops("that repeats", node("repeat.default", H, sizes(1 << 20, 1 << 20)))
_ops("that expands", node("expand.default", H, sizes(1 << 40, 2, 4)))
_ops(
    "that expands and adds",
    node("expand.default", H, sizes(1 << 30, 2, 4), out="e"),
    node("add.Tensor", named("e"), named("e")),
)
_ops("of zeros", node("zeros.default", sizes(1 << 40)))
_ops(
    "of many zeros",
    *(node("zeros.default", sizes(1 << 22), out=f"z{k}") for k in range(200)),
    node("cat.default", {"as_tensors": [{"name": f"z{k}"} for k in range(200)]}),
)
_ops("of a range", node("arange.default", whole(1 << 50)))
_ops("of an identity", node("eye.default", whole(1 << 30)))
_ops("of classes", node("one_hot.default", H, whole(1 << 40)))
_ops(
    "that splits by ones",
    node("zeros.default", sizes(1 << 22), out="z"),
    node("split.Tensor", named("z"), whole(1), outputs=[{"as_tensors": [{"name": "out"}]}]),
)
_ops(
    "that splits into very many",
    node("tensor_split.sections", H, whole(1 << 40), outputs=[{"as_tensors": [{"name": "out"}]}]),
)
_ops(
    "that splits into nothing",
    node(
        "split_with_sizes.default",
        H,
        sizes(*[0] * 300_000),
        outputs=[{"as_tensors": [{"name": "out"}]}],
    ),
)
_ops(
    "that takes an axis apart",
    node("zeros.default", sizes(1 << 22, 1), out="z"),
    node("unbind.int", named("z"), outputs=[{"as_tensors": [{"name": "out"}]}]),
)
_ops("of very many axes", node("view.default", H, sizes(*[1] * 100_000, 2, 4)))
_ops("that pads", node("pad.default", H, sizes(1 << 40, 1 << 40)))
_ops("that pads the other way", node("pad.default", H, sizes(-(1 << 40), 0)))
_ops("that rolls", node("roll.default", H, sizes(1 << 62), sizes(0)))
_ops("that windows", node("unfold.default", H, whole(0), whole(1 << 40), whole(1)))
_ops("of strides", node("as_strided.default", H, sizes(1 << 30, 4), sizes(0, 1)))
_ops("of strides beyond", node("as_strided.default", H, sizes(2, 4), sizes(1 << 40, 1)))
_ops(
    "of an index beyond",
    node("arange.default", whole(9), out="i"),
    node("index_select.default", H, whole(0), named("i")),
)
_ops(
    "of an embedding beyond",
    node("arange.default", whole(99), out="i"),
    node("embedding.default", named("w"), named("i")),
)
_ops(
    "of a large pool",
    node("view.default", H, sizes(1, 1, 2, 4), out="v"),
    node("avg_pool2d.default", named("v"), sizes(1 << 40, 1)),
)
_ops(
    "of a large window",
    node("view.default", H, sizes(1, 1, 2, 4), out="v"),
    node(
        "max_pool2d.default", named("v"), sizes(1, 1), sizes(1, 1), sizes(0, 0), sizes(1 << 62, 1)
    ),
)
_ops(
    "that scales up",
    node("view.default", H, sizes(1, 1, 2, 4), out="v"),
    node("upsample_nearest2d.default", named("v"), sizes(1 << 20, 1 << 20)),
)
_ops(
    "of a wide kernel",
    node("zeros.default", sizes(1, 1, 1500, 1500), out="v"),
    node("zeros.default", sizes(1, 1, 100, 100), out="k"),
    node("conv2d.default", named("v"), named("k")),
)
_ops("of sparse numbers", node("to_sparse.default", H))
_ops(
    "of another device",
    {
        **node("zeros.default", sizes(2)),
        "inputs": [
            {"name": "size", "arg": sizes(2), "kind": 1},
            {"name": "device", "arg": {"as_device": {"type": "cuda", "index": 99}}, "kind": 2},
        ],
    },
)
_ops(
    "with odd keywords",
    {**node("relu.default"), "inputs": [{"name": "nothing", "arg": H, "kind": 2}]},
)
_ops(
    "of letters",
    node(
        "einsum.default",
        {"as_string": "ab,ab->" + "a" * 100_000},
        {"as_tensors": [{"name": "h"}, {"name": "h"}]},
    ),
)
_ops(
    "of many letters",
    node(
        "einsum.default",
        {"as_string": "...,".join(["ab"] * 50_000)},
        {"as_tensors": [{"name": "h"}] * 50_000},
    ),
)
_ops(
    "that writes over its weight",
    node("copy_.default", named("w"), named("w")),
    node("relu_.default", H),
)
_ops("that changes nothing", node("relu.default", named("nowhere")))
_ops("called by escapes", node("\x1b[2J\x07.default", H))
_ops("called by a very long name", node("x" * 1_000_000, H))


@attack(0, 1, 3)
def a_graph_of_a_hundred_thousand_ops(folder: Path) -> str:
    """Give as long a chain of ops."""
    names = ["h", *(f"r{k}" for k in range(99_000))]
    chain = (node("relu.default", named(a), out=b) for a, b in pairwise(names))
    return write(folder, after_linear(*chain, node("relu.default", named(names[-1]))))


@attack(0, 1, 3)
def a_graph_that_keeps_all_it_makes(folder: Path) -> str:
    """Give ops whose results are all needed by the last one."""
    names = [f"r{k}" for k in range(20_000)]
    made = (node("relu.default", H, out=name) for name in names)
    last = node("cat.default", {"as_tensors": [{"name": name} for name in names]})
    return write(folder, after_linear(*made, last))


@attack(0, 1, 3)
def a_graph_of_long_lists(folder: Path) -> str:
    """Give each of many ops a long list of numbers."""
    many = (node("relu.default", H, sizes(*range(1000)), out=f"r{k}") for k in range(2_000))
    return write(folder, after_linear(*many, node("relu.default", H)))


_ROUND = node("relu.default", named("c"), out="d")


def _loop(name: str, *body: Node, is_one: bool = False) -> None:
    """Register a loop that goes on and on: its state c becomes what `d` is in its body."""
    always = [
        node("ones.default", sizes(), out="one"),
        node("gt.Scalar", named("one"), whole(0), out="yes"),
    ]
    graphs = {
        "cond": graph(always, inputs=["c"], outputs=[named("yes")]),
        "body": graph(body, inputs=["c"], outputs=[named("d")], is_one=is_one),
    }
    parts = [{"as_graph": {"name": n, "graph": inner}} for n, inner in graphs.items()]
    loop = node(
        "torch.ops.higher_order.while_loop",
        *parts,
        {"as_tensors": [{"name": "h"}]},
        {"as_tensors": []},
        outputs=[{"as_tensors": [{"name": "out"}]}],
    )
    add(f"a loop {name}", lambda folder: write(folder, after_linear(loop)), 0, 1, 3)


_loop("without end", _ROUND)
_loop("that gives no list", _ROUND, is_one=True)
_loop("that grows", node("repeat.default", named("c"), sizes(2, 1), out="d"))
_loop("of long lists", node("repeat.default", named("c"), sizes(*[1] * 200_000), out="r"), _ROUND)
_loop(
    "of other long lists",
    node("sum.dim_IntList", named("c"), sizes(*[0] * 200_000), out="r"),
    _ROUND,
)
_loop(
    "of much work",
    node("zeros.default", sizes(600, 600), out="z"),
    node("mm.default", named("z"), named("z"), out="y"),
    _ROUND,
)


def _work(name: str, count: int, width: int, dtype: int = FLOAT) -> None:
    """Register a graph of products of zeros."""
    kind = {"as_scalar_type": dtype}
    square = node("zeros.default", sizes(width, width), out="z")
    square["inputs"].append({"name": "dtype", "arg": kind, "kind": 2})
    products = [node("mm.default", named("z"), named("z"), out=f"p{k}") for k in range(count)]
    _ops(f"of products of {name}", square, *products, node("relu.default", named(f"p{count - 1}")))


_work("large squares", 20, 2_000)
_work("one very large square", 1, 5_000)
_work("whole numbers", 5, 1_000, LONG)
_work("half precision", 20, 2_000, HALF)
_work("doubles", 20, 1_500, DOUBLE)


@attack(0, 1, 3)
def slow_functions(folder: Path) -> str:
    """Call functions that take long for each number."""
    large = node("full.default", sizes(1 << 20), {"as_float": 0.3}, out="z")
    calls = [
        node(f"{f}.default", named("z"), out=f"{f}{k}")
        for k in range(200)
        for f in ("erfinv", "digamma", "tan")
    ]
    return write(folder, after_linear(large, *calls, node("relu.default", named("tan199"))))


@attack(0, 1, 3)
def many_groups(folder: Path) -> str:
    """Give many layers, every one a group of units that must be checked."""
    layers = [
        node("linear.default", named("x" if not k else f"l{k - 1}"), named("w"), out=f"l{k}")
        for k in range(1_500)
    ]
    return write(folder, program([*layers, node("relu.default", named("l1499"))]))


@attack(0, 1, 3)
def many_parameters(folder: Path) -> str:
    """Give four hundred layers of their own weights."""
    described = program([LINEAR])
    module = described["graph_module"]
    names = [f"l{k}" for k in range(400)]
    module["graph"]["nodes"] = [
        node(
            "linear.default",
            named("x" if not k else f"h{names[k - 1]}"),
            named(f"w{name}"),
            out=f"h{name}",
        )
        for k, name in enumerate(names)
    ]
    module["graph"]["inputs"] = [*(named(f"w{name}") for name in names), named("x")]
    module["signature"]["input_specs"] = [
        *(
            {"parameter": {"arg": {"name": f"w{n}"}, "parameter_name": f"{n}.weight"}}
            for n in names
        ),
        {"user_input": {"arg": named("x")}},
    ]
    module["signature"]["output_specs"] = [{"user_output": {"arg": named(f"h{names[-1]}")}}]
    weight = {"path_name": "weight_0", "use_pickle": False, "tensor_meta": meta([4, 4])}
    copies = {f"data/weights/w{n}": b"\0" * 64 for n in names}
    config = {f"{n}.weight": {**weight, "path_name": f"w{n}"} for n in names}
    return write(folder, described, config=config, records=copies)


@attack(0, 1, 3)
def inputs_larger_than_memory(folder: Path) -> str:
    """Claim an input of a tera of numbers."""
    return write(folder, program([LINEAR, node("relu.default", H)], shape=(1 << 40, 4)))


@attack(0, 1, 3)
def a_graph_within_graphs(folder: Path) -> str:
    """Nest graphs in graphs until no more fit."""
    inner = graph([_ROUND], inputs=["c"], outputs=[named("d")])
    for _ in range(14):
        part = {"as_graph": {"name": "p", "graph": inner}}
        call = node(
            "torch.ops.higher_order.wrap_with_set_grad_enabled",
            {"as_bool": False},
            part,
            named("c"),
            out="d",
        )
        inner = graph([call, call], inputs=["c"], outputs=[named("d")])
    part = {"as_graph": {"name": "p", "graph": inner}}
    return write(
        folder,
        after_linear(
            node("torch.ops.higher_order.wrap_with_set_grad_enabled", {"as_bool": False}, part, H)
        ),
    )


# What lies beside the graph


@attack(1)
def a_very_deep_model(folder: Path) -> str:
    """Nest a hundred thousand lists in place of a model."""
    return write(folder, {}, records={"models/model.json": b"[" * 100_000})


@attack(1, 3)
def a_model_that_is_a_list(folder: Path) -> str:
    """Give a list in place of a model."""
    return write(folder, {}, records={"models/model.json": b"[]"})


CONFIGS: dict[str, Any] = {
    "outside": {"path_name": "../../../etc/passwd"},
    "by nothing": {"path_name": ""},
    "that is missing": {"path_name": "nowhere"},
    "of huge sizes": {"tensor_meta": {**meta([4, 4]), "sizes": [whole(1 << 62)] * 2}},
    "of negative strides": {"tensor_meta": {**meta([4, 4]), "strides": [whole(-4), whole(1)]}},
    "of sizes that are texts": {"tensor_meta": {**meta([4, 4]), "sizes": [{"as_int": "4"}]}},
    "of symbols": {"tensor_meta": {**meta([4, 4]), "sizes": [{"as_expr": {"expr_str": "exit()"}}]}},
    "of an unknown type": {"tensor_meta": {**meta([4, 4]), "dtype": 99}},
    "of a type that is a list": {"tensor_meta": {**meta([4, 4]), "dtype": [7]}},
    "of a sparse layout": {"tensor_meta": {**meta([4, 4]), "layout": 1}},
    "that is a pickle": {"use_pickle": True},
    "without a description": {"tensor_meta": None},
    "of 65 axes": {"tensor_meta": meta([1] * 65)},
}
_WEIGHT = {"path_name": "weight_0", "use_pickle": False, "tensor_meta": meta([4, 4])}
for _name, _change in CONFIGS.items():
    add(
        f"a weight {_name}",
        lambda f, c=_change: write(
            f, program([LINEAR], result="h"), config={"fc.weight": {**_WEIGHT, **c}}
        ),
        *(0, 1, 3),
    )
_ODD_LISTS: dict[str, object] = {"a list": [], "a text": "x", "nothing": None}
for _name, _config in _ODD_LISTS.items():
    add(
        f"a list of weights that is {_name}",
        lambda f, c=_config: write(
            f,
            program([LINEAR]),
            records={"data/weights/model_weights_config.json": json.dumps({"config": c}).encode()},
        ),
        1,
    )


@attack(0, 1, 3)
def one_archive_as_many_weights(folder: Path) -> str:
    """Name one inner archive as ten thousand weights."""
    inner = torch_zip(
        folder / "inner", PROTOCOL_2 + b"N0" * 5_000 + state_dict(("w", tensor()))[2:]
    )
    weight = {**_WEIGHT, "path_name": "weight_1", "use_pickle": True}
    config = {f"l{k}.weight": weight for k in range(30_000)}
    command = write(
        folder,
        program([LINEAR]),
        config=config,
        records={"data/weights/weight_1": inner.read_bytes()},
    )
    inner.unlink()
    return command


@attack(0, 1, 3)
def one_record_as_many_weights(folder: Path) -> str:
    """Read one large record as ten thousand weights of one number."""
    weights = {
        f"l{k}.weight": {
            **_WEIGHT,
            "path_name": "big",
            "tensor_meta": {**meta([1]), "storage_offset": whole(k)},
        }
        for k in range(10_000)
    }
    command = write(
        folder, program([LINEAR]), config=weights, records={"data/weights/big": b"\0" * 4_000_000}
    )
    return command.replace("plan", "inspect")


@attack(0, 1, 3)
def examples_that_show_the_same_numbers(folder: Path) -> str:
    """Give twenty thousand example inputs that are views of the same numbers."""
    from tests.attacks.pickles import _views

    _views(folder, lambda k: (b"(J" + struct.pack("<i", 1_000_000 - k) + b"t", b"(K\x01t"))
    inner = folder / "a.pt"
    command = write(
        folder,
        program([LINEAR], result="h"),
        records={"data/sample_inputs/model.pt": inner.read_bytes()},
    )
    inner.unlink()
    return command


@attack(0, 1, 3, 4)
def examples_that_run_code(folder: Path) -> str:
    """Give example inputs that would make a folder."""
    inner = torch_zip(folder / "inner", PROTOCOL_2 + b"cos\nmkdir\nX\x06\x00\x00\x00canary\x85R.")
    command = write(
        folder,
        program([LINEAR], result="h"),
        records={"data/sample_inputs/model.pt": inner.read_bytes()},
    )
    inner.unlink()
    return command


@attack(0, 1, 3)
def many_models(folder: Path) -> str:
    """Give twenty thousand models in one file."""
    model = json.dumps(program([LINEAR], result="h")).encode()
    records = {}
    for k in range(3_000):
        records[f"models/m{k}.json"] = model
        records[f"data/weights/m{k}_weights_config.json"] = json.dumps(
            {"config": {"fc.weight": _WEIGHT}}
        ).encode()
        records[f"data/constants/m{k}_constants_config.json"] = b'{"config": {}}'
    return write(folder, program([LINEAR], result="h"), records=records)


@attack(1, 3)
def an_op_that_crashes(folder: Path) -> str:
    """Call a product of the wrong number of axes, which ends torch's process."""
    return write(folder, program([LINEAR, node("bmm.dtype", named("w"), named("h"), whole(64))]))
