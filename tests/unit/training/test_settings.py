import pytest

from fedmerge.errors import UsageError
from fedmerge.values import Stage, TrainSettings, default_settings


@pytest.mark.parametrize(
    ("stage", "rate", "epochs", "decay"),
    [("whole", 0.01, 20, 1e-4), ("partial", 0.01, 20, 0.0), ("last", 0.001, 60, 1e-4)],
)
def test_stages_have_the_settings_of_the_papers_appendix(
    stage: Stage, rate: float, epochs: int, decay: float
) -> None:
    settings = default_settings("classification").at(stage)
    assert settings.learning_rate == pytest.approx(rate)
    assert (settings.epochs, settings.weight_decay) == (epochs, decay)
    assert (settings.optimizer, settings.momentum) == ("sgd", 0.9)


def test_language_models_keep_one_rate() -> None:
    settings = default_settings("language-model")
    assert {settings.at(stage).learning_rate for stage in ("whole", "partial", "last")} == {0.8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "torch.optim.SGD"),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("learning_rate", 1e31),
        ("momentum", 1.0),
        ("epochs", 0),
        ("batch_size", 2.5),
        ("proximal", -1),
        ("clip_norm", 0),
        ("seed", -1),
        ("mixed_precision", 1),
    ],
)
def test_wrong_settings_are_usage_errors(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is .*, expected"):
        TrainSettings(**{name: value})  # type: ignore[arg-type]
