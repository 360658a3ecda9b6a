"""Work for the engines' tests: light, so that a worker starts quickly."""

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

from fedmerge.errors import TrainingError
from fedmerge.values import Arrays, JsonObject, Place, WorkResult

HERE = "tests.unit.engines.work"
PATIENCE = 300.0  # seconds, on a busy machine


def double(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    return WorkResult({name: array * 2 for name, array in arrays.items()}, settings)


def echo(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    return WorkResult(arrays, settings)


def sleep(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    time.sleep(settings["seconds"])
    return WorkResult({}, {"pid": os.getpid()})


def wait(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Go on as soon as others have made as many files in a folder as are waited for."""
    end = time.monotonic() + PATIENCE
    while len(list(Path(settings["folder"]).iterdir())) < settings.get("files", 1):
        assert time.monotonic() < end, "nobody made the files"
        time.sleep(0.02)
    return WorkResult({}, {})


def meet(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    """Stay until another one of these tasks is there, too."""
    (Path(settings["folder"]) / str(os.getpid())).touch()
    return wait(arrays, {**settings, "files": 2}, place)


def fail(arrays: Arrays, settings: JsonObject, place: Place) -> NoReturn:
    raise ZeroDivisionError(f"no data for {settings['name']}")


def refuse(arrays: Arrays, settings: JsonObject, place: Place) -> NoReturn:
    raise TrainingError("shard.npz: is empty", "fill it")


def leave(arrays: Arrays, settings: JsonObject, place: Place) -> NoReturn:
    raise SystemExit(3)


def not_a_result(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    return WorkResult({"objects": np.array([object()])}, {})


def die(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return WorkResult({}, {})


def die_once(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    mark = Path(settings["mark"])
    if not mark.exists():
        mark.touch()
        os._exit(7)
    return WorkResult({}, {"survived": True})


def change_input(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    arrays["x"][0] = 1
    return WorkResult({}, {})


def describe(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    values = {
        "pid": os.getpid(),
        "device": place.device,
        "threads": place.threads,
        "timeout": place.timeout,
        "types": {name: type(value).__name__ for name, value in settings.items()},
    }
    return WorkResult({}, values)


def hold_gpu(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    began = time.time()
    meet(arrays, settings, place)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    times = {"began": began, "ended": time.time()}
    return WorkResult({}, {"pid": os.getpid(), "gpu": visible, "device": place.device, **times})


def linger(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    Path(settings["mark"]).write_text(str(os.getpid()))
    time.sleep(600)
    return WorkResult({}, {})


def where(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    threads = {name: os.environ.get(name) for name in names}
    if "folder" in settings:
        meet(arrays, settings, place)
    return WorkResult({}, {"parent": os.getppid(), "folder": str(Path.cwd()), "threads": threads})


def talk(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    print("words of the user's code")
    os.write(1, b"words of a library\n")
    return WorkResult({}, {"said": True})


def interrupt_self(arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return WorkResult({}, {"alive": True})
