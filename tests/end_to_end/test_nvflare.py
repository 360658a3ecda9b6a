"""Jobs in NVFLARE's simulator: a process per site, real messages, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from tests.nvflare import needs_nvflare

pytestmark = [needs_nvflare, pytest.mark.slow]

LIMIT = 300  # seconds for a job, on a busy machine
OPTIONS: dict[str, Any] = {"epochs": 1, "passes": 2, "batch_size": 32, "max_growth": 1.5}
NET = """
    import numpy as np
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 3)

        def forward(self, x):
            return self.fc2(self.fc1(x).relu())

    def load(site):
        rng = np.random.default_rng(int(site.rpartition("-")[2]))
        x = rng.standard_normal((96, 6)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)
"""
FEDMA_CLIENT = """
    from net import Net, load

    from fedmerge.nvflare import serve

    serve(load, Net, device="cpu")
"""
FEDMA_JOB = """
    from nvflare.recipe import SimEnv

    from fedmerge.nvflare import FedMARecipe

    if __name__ == "__main__":
        recipe = FedMARecipe(
            name="job", model="net.py:Net", train_script="client.py", options=OPTIONS
        )
        recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
"""
FEDAVG_CLIENT = """
    import nvflare.client as flare
    import torch
    from net import Net, load

    flare.init()
    x, y = map(torch.as_tensor, load(flare.get_site_name()))
    model = Net()
    while flare.is_running():
        model.load_state_dict(flare.receive().params)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(50):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"loss": loss.item()}))
""".replace("import torch\n", "import torch\n    from torch import nn\n")
FEDAVG_JOB = """
    from net import Net
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    from fedmerge.nvflare import MatchedAggregator, use_installed

    if __name__ == "__main__":
        recipe = FedAvgRecipe(
            name="job",
            model=Net(),
            min_clients=2,
            num_rounds=2,
            train_script="client.py",
            aggregator=MatchedAggregator(),
        )
        use_installed(recipe)
        recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
"""


def simulate(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """Run a job and return the folder of the server's app; no process of it is left."""
    for name, text in {"net": NET, **scripts}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    home = folder / "home"
    home.mkdir()
    with tempfile.TemporaryDirectory() as sockets:  # names of sockets have 107 characters at most
        ran = subprocess.run(
            [sys.executable, "job.py"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), "TMPDIR": sockets},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ERROR" not in ran.stdout + ran.stderr
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    assert left_behind(folder) == []
    return folder / "workspace/job/server/simulate_job/app_server"


def left_behind(folder: Path) -> list[str]:
    """Return the commands of processes that still run in a folder."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                commands.append((process / "cmdline").read_text())
        except OSError:  # it has just ended, or is another user's
            continue
    return commands


def test_fedma_gives_the_bytes_of_the_local_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FEDMA_JOB.replace("OPTIONS", repr(OPTIONS))
    saved = simulate(tmp_path, monkeypatch, client=FEDMA_CLIENT, job=job) / "global.pt"
    from net import Net, load  # type: ignore[import-not-found]

    local = tmp_path / "local.pt"
    own = {site: load(site) for site in ("site-1", "site-2")}
    given: dict[str, Any] = {"model": "net:Net", "device": "cpu", "output": local}
    retrained = fedmerge.retrain([], own, **given, **OPTIONS)
    assert saved.read_bytes() == local.read_bytes()
    record, expected = (json.loads(Path(f"{path}.json").read_text()) for path in (saved, local))
    assert record == expected
    assert retrained.growth > 1
    assert fedmerge.load_model(Net, saved).fc1.out_features == retrained.widths["fc1"]


def test_nvflares_fedavg_takes_the_matched_aggregator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = simulate(tmp_path, monkeypatch, client=FEDAVG_CLIENT, job=FEDAVG_JOB)
    from net import Net, load

    model = Net()
    model.load_state_dict(torch.load(app / "FL_global_model.pt")["model"])
    x, y = (np.concatenate(both) for both in zip(load("site-1"), load("site-2"), strict=True))
    loss = nn.functional.cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y))
    assert loss < 0.5  # three classes by chance: 1.1
    assert not (app / "custom" / "fedmerge").exists()
