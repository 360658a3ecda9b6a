"""Models that call torch's compiler by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import PATIENCE, process

FLEX = """
import warnings
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.hidden, self.head = nn.Linear(4, 16), nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).unsqueeze(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants it compiled
            x = flex_attention(x, x, x).squeeze(1)
        return self.head(self.hidden(x).relu())
"""


@pytest.mark.slow
def test_flex_attention_is_watched_in_a_process_that_has_not_loaded_the_compiler(
    tmp_path: Path,
) -> None:
    (tmp_path / "flex.py").write_text(FLEX)
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(FLEX, namespace)
    torch.save(namespace["Net"]().state_dict(), tmp_path / "a.pt")
    code = ("--model", "flex.py:Net", "--input-shape", "1,2,4")
    done = process("plan", "a.pt", *code, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [group["name"] for group in done.json["groups"]] == ["hidden"]


BRANCHING = """
import sys
import torch
from torch import nn
from fedmerge.architecture.from_code import plan_model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)))

net, inputs = Net().eval(), (torch.ones(2, 4),)
assert "torch._dynamo" not in sys.modules
assert [group.name for group in plan_model(net, inputs).groups] == ["stem"]
with torch.no_grad():
    exported = torch.export.export(net, inputs).module()
    print(torch.equal(exported(*inputs), net(*inputs)))
"""


@pytest.mark.slow
def test_the_compiler_works_as_before_after_a_model_was_watched() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BRANCHING],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.stdout == "True\n", done.stderr
