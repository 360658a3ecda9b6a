"""What is shown to who does not know how to begin: a few commands, and examples of each."""

from __future__ import annotations

from collections.abc import Mapping

INTRODUCTION = """\
fedmerge merges separately trained PyTorch checkpoints of one architecture into one model.

  See it work on small nets that it trains itself:
    fedmerge demo
  Merge files, from names and shapes alone or with your model's code:
    fedmerge match a.pt b.pt -o global.pt
    fedmerge match a.pt b.pt --model net.py:Net -o global.pt
  Measure the result next to its clients, their average and their ensemble:
    fedmerge compare a.pt b.pt --global global.pt --model net.py:Net --data test.npz

All commands: fedmerge --help. Options and examples of one: fedmerge match --help."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "match": (
        "fedmerge match a.pt b.pt -o global.pt",
        "fedmerge match clients/ --max-growth 1 -o global.safetensors",
        "fedmerge match a.pt b.pt --model net.py:Net --report report.html",
        "fedmerge match a.pt b.pt --model net.py:Net --probe-data x.npz --frontier",
    ),
    "retrain": (
        "fedmerge retrain --shards data/ --model net.py:Net --data test.npz --passes 2",
        "fedmerge retrain a.pt b.pt --shards data/ --model net.py:Net --epochs 5",
        "fedmerge retrain --shards data/ --model net.py:Net --method fedavg",
    ),
    "eval": (
        "fedmerge eval global.pt --model net.py:Net --data test.npz",
        "fedmerge eval g.pt --model net.py:Net --data text.npz --task language-model",
    ),
    "compare": (
        "fedmerge compare a.pt b.pt --model net.py:Net --data test.npz",
        "fedmerge compare clients/ --global g.pt --model net.py:Net --data test.npz",
    ),
    "partition": (
        "fedmerge partition data.npz --clients 4 --dirichlet 0.5 -o shards",
        "fedmerge partition data.npz --by writer --min-samples 20 -o shards",
    ),
    "plan": (
        "fedmerge plan a.pt",
        "fedmerge plan a.pt --model net.py:Net --graph plan.svg",
        "fedmerge plan a.pt --assume-chain -o plan.json",
    ),
    "inspect": (
        "fedmerge inspect a.pt b.pt",
        "fedmerge inspect checkpoint.ckpt --key nets.G",
    ),
    "verify": (
        "fedmerge verify global.pt",
        "fedmerge verify global.pt a.pt b.pt --model net.py:Net",
    ),
    "report": (
        "fedmerge report global.pt -o report.html",
        "fedmerge report global.pt --model net.py:Net --data test.npz -o report.html",
        "fedmerge report global.pt --model net.py:Net --image digit.png -o report.html",
    ),
    "convert": (
        "fedmerge convert checkpoint.ckpt -o weights.safetensors",
        "fedmerge convert a.pt --dtype bfloat16 -o a-half.pt",
    ),
    "export": (
        "fedmerge export g.pt --model net.py:Net --input-shape 1,3,32,32 -o g.pt2",
        "fedmerge export g.pt --model net.py:Net --input-shape 1,3,32,32 -o g.onnx",
    ),
    "demo": (
        "fedmerge demo",
        "fedmerge demo somewhere-else",
    ),
}


def epilog(command: str) -> str:
    """Return what stands under a command's help."""
    return "\n".join(("Examples:", *(f"  {line}" for line in EXAMPLES[command])))
