"""Modules in the current folder are the user's: only the user's own code imports them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import needs_ray
from tests.end_to_end.helpers import PATIENCE
from tests.end_to_end.retraining import Scene, make_scene

SHADOWS = ("signal", "queue", "subprocess", "threading", "secrets", "cProfile", "fedmerge")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A scene in a folder with modules that nobody wants, and one that the model needs."""
    scene = make_scene(tmp_path)
    for name in SHADOWS:
        text = f"open({str(tmp_path / 'canary')!r}, 'a').write({name!r})\nraise ImportError\n"
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "sizes.py").write_text("HIDDEN = 6\n")
    net = tmp_path / "net.py"
    net.write_text("from sizes import HIDDEN\n" + net.read_text().replace("=6", "=HIDDEN"))
    return scene


def installed(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as the script that is installed with the package, in a folder."""
    script = folder / "bin" / "fedmerge-script"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from fedmerge.cli import main\nmain()\n")
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ("net.py:build", "local"),
        pytest.param("net.py:build", "processes", marks=pytest.mark.slow),
        pytest.param("net:build", "local", marks=pytest.mark.slow),
        pytest.param("net:build", "processes", marks=pytest.mark.slow),
        pytest.param("net:build", "ray", marks=[needs_ray, pytest.mark.slow]),
    ],
)
def test_a_run_imports_what_its_model_needs_and_nothing_else(
    model: str, engine: str, scene: Scene
) -> None:
    command = [*scene.command("g.pt"), "--model", model, "--engine", engine]
    done = installed(scene.folder, *command)
    assert done.returncode == 0, done.stderr
    assert not (scene.folder / "canary").exists()


@pytest.mark.slow
def test_other_commands_import_nothing_either(scene: Scene) -> None:
    for command in (["--version"], ["match", *scene.clients, "-o", scene.folder / "g.pt"]):
        done = installed(scene.folder, *command)
        assert done.returncode == 0, done.stderr
    assert not (scene.folder / "canary").exists()
