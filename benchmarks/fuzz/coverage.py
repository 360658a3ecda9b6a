"""Inputs that reach new code of the readers, found by atheris where it is installed."""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fuzz import mutations

CORPUS = Path(__file__).parent / "corpus"
_WAYS = (
    *(mutations.any_bytes, mutations.zip_records, mutations.pickle_steps),
    *(mutations.legacy_pickles, mutations.safetensors_header, mutations.json_values),
)


def fuzz_by_coverage(runs: int, *, keep: Path) -> None:
    """Let atheris look for inputs; what it finds new is added to a copy of the corpus in `keep`."""
    try:
        atheris: Any = importlib.import_module("atheris")  # which not every Python has
    except ImportError:
        sys.exit("atheris is not installed: pip install 'fedmerge[fuzz]'")
    with atheris.instrument_imports(include=["fedmerge.checkpoint", "fedmerge.decoding"]):
        from benchmarks.fuzz.seeds import read_all
    from fedmerge.errors import FedmergeError

    keep.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp()) / "a"

    def read(content: bytes) -> None:
        place.write_bytes(content)
        try:
            read_all(place)
        except FedmergeError:
            return

    def mutate(content: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        mutated = rng.choice(_WAYS)(content, rng) if content else b"PK\x03\x04"
        return mutated[:most]

    names = [str(keep), *([str(CORPUS)] if CORPUS.is_dir() else [])]
    atheris.Setup(["fuzz", f"-runs={runs}", "-max_len=60000", *names], read, custom_mutator=mutate)
    atheris.Fuzz()
