import pytest

from fedmerge import engines, training
from fedmerge.engines import Share
from fedmerge.errors import UsageError
from fedmerge.federated import Running
from tests.clusters import needs_ray

pytestmark = needs_ray


def started(monkeypatch: pytest.MonkeyPatch, **options: object) -> dict[str, object]:
    """Return what the engine of a run is started with."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(engines, "RayEngine", lambda clients, **given: seen.update(given))
    Running(engine="ray", **options).start_engine(["a"])  # type: ignore[arg-type]
    return seen


def test_a_client_gets_as_many_cpus_as_threads_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch) == {
        "address": None,
        "share": Share(1, 0),
        "device": "cpu",
        "threads": 1,
    }
    assert started(monkeypatch, threads_per_client=3)["share"] == Share(3, 0)
    asked = started(monkeypatch, threads_per_client=3, cpus_per_client=0.5, address="h:1")
    assert (asked["share"], asked["threads"], asked["address"]) == (Share(0.5, 0), 3, "h:1")


def test_clients_use_gpus_where_they_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, gpus_per_client=0.5)["device"] == "cuda"
    assert started(monkeypatch, gpus_per_client=1, device="cpu")["device"] == "cpu"


def test_gpus_that_clients_do_not_get_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_devices", lambda asked: ("cuda:0", "cuda:1"))
    with pytest.raises(UsageError, match="`device` is cuda, but `engine=ray` gives clients no GPU"):
        started(monkeypatch, device="cuda")
    assert started(monkeypatch, device="cuda", gpus_per_client=2)["device"] == "cuda"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("address", "head", r"`address` is 'head', expected HOST:PORT or auto"),
        ("address", "ray://head:10001", r"`address` is 'ray://head:10001', expected HOST:PORT"),
        ("cpus_per_client", 0, r"`cpus_per_client` is 0, expected a positive number"),
        (
            "gpus_per_client",
            1.5,
            r"`gpus_per_client` is 1.5, expected a fraction of one or a whole",
        ),
        ("gpus_per_client", -1, r"`gpus_per_client` is -1, expected a fraction"),
    ],
)
def test_values_that_ray_cannot_use_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Running(engine="ray", **{option: value})  # type: ignore[arg-type]
