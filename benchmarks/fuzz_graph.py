"""`python -m benchmarks.fuzz_graph`: plan thousands of random networks; none may be unsound."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import numpy as np
import torch

from fedmerge.architecture.from_code import plan_model, verify_plan
from fedmerge.errors import ArchitectureError
from tests.random_nets import random_net


def main() -> None:
    """Plan and verify random networks, and count groups, pins and refusals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_graph", description=__doc__)
    parser.add_argument("--nets", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started, counts, notes = time.perf_counter(), Counter[str](), Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.nets):
        net, inputs = random_net(seed)
        plan = plan_model(net, inputs)
        counts["groups"] += len(plan.groups)
        counts["nets without groups"] += not plan.groups
        notes.update(note for note in plan.notes if "no rule" in note)
        try:
            verify_plan(net, plan, inputs, rng=np.random.default_rng(seed))
        except ArchitectureError as error:
            kind = "unsound" if "permuting" in error.problem else "not verified"
            counts[kind] += 1
            print(f"seed {seed}: {error.problem}", flush=True)
    seconds = time.perf_counter() - started
    print(f"{arguments.nets} nets in {seconds:.0f} s: {dict(counts)}", *notes.items(), sep="\n")
    raise SystemExit(1 if counts["unsound"] else 0)


if __name__ == "__main__":
    main()
