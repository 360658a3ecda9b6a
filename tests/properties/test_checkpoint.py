import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerge.checkpoint import (
    PickleError,
    SourceFile,
    Trust,
    client_names,
    from_state_dict,
    open_checkpoint,
    read_pickle,
    write_model,
)
from fedmerge.decoding import FLOAT_DTYPES
from fedmerge.values import Array, TensorInfo

parts = st.text("abcdefg01_", min_size=1, max_size=6).filter(lambda part: part != "_orig_mod")
names = st.lists(parts, min_size=1, max_size=3).map(".".join).map("net.{}.weight".format)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
infos = st.builds(TensorInfo, shapes, st.sampled_from([*FLOAT_DTYPES, "int64", "uint8", "bool"]))
wrappers = st.lists(st.sampled_from(["module.", "_orig_mod.", "model."]), max_size=5)


def values_for(info: TensorInfo, seed: int) -> Array:
    """Numbers that every dtype holds exactly."""
    values = np.random.default_rng(seed).integers(0, 2 if info.dtype == "bool" else 100, info.shape)
    return np.asarray(values, dtype=np.float32 if info.is_float else np.int64)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, infos, max_size=5), st.sampled_from([".pt", ".safetensors"]))
def test_what_is_written_is_read_back(tensors: dict[str, TensorInfo], suffix: str) -> None:
    tensors = tensors | {"out.bias": TensorInfo((2,), "float32")}
    values = {name: values_for(info, seed) for seed, (name, info) in enumerate(tensors.items())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        digests = write_model(path, tensors, values.__getitem__)
        checkpoint = open_checkpoint(path)
        assert list(checkpoint.tensors.items()) == list(tensors.items())
        for name, array in values.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
            assert checkpoint.tensor_digest(name) == digests[name]


@given(st.sets(names, min_size=1, max_size=6), wrappers)
def test_wrappers_change_no_name_but_the_prefix(plain: set[str], stack: list[str]) -> None:
    tensors = {"".join(stack) + name: torch.ones(2) for name in sorted(plain)}
    checkpoint = from_state_dict(tensors, name="a")
    assert list(checkpoint.tensors) == sorted(plain)
    assert checkpoint.prefix == "model." * stack.count("model.")


@given(st.lists(st.sampled_from(["m", "m-2", "m-3", "m-2-2", "n"]), max_size=8))
def test_every_client_has_its_own_name(stems: list[str]) -> None:
    given_names = client_names([Path(f"{stem}.pt") for stem in stems])
    assert len(set(given_names)) == len(stems)
    for stem, name in zip(stems, given_names, strict=True):
        assert name == stem or (name.startswith(f"{stem}-") and name not in stems)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x80\x04", b"cos\nsystem\n"]))
def test_the_reader_of_pickles_survives_any_bytes(content: bytes, start: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(start + content)
        try:
            asked = read_pickle(SourceFile.of(path).whole, Trust()).asked
        except PickleError as error:
            asked = error.asked
    assert (b"os\nsystem" not in start) or asked[0] == "os.system"
