import pytest
import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError
from fedmerge.probes import generated_probes, is_language_model

TOKENS, LENGTH = 5, 9
LIKE = (torch.zeros(2, LENGTH, dtype=torch.int64),)


class Markov(nn.Module):
    """A model whose next token is `step` on from the last, as sure as `sharpness` makes it."""

    def __init__(self, step: int = 1, sharpness: float = 50.0, layout: str = "steps") -> None:
        super().__init__()
        table = torch.eye(TOKENS).roll(step, 1) * sharpness
        self.table = nn.Parameter(table)
        self.layout = layout
        self.dropout = nn.Dropout(0.9)

    def forward(self, tokens: Tensor) -> object:
        logits = self.dropout(self.table[tokens])
        layouts = {
            "steps": logits,
            "flat": logits.flatten(0, 1),
            "last": logits[:, -1],
            "state": (logits, torch.zeros(3)),
        }
        return layouts[self.layout]


def written(*models: nn.Module, count: int = 40, seed: int = 0, **options: float) -> Tensor:
    probes = generated_probes(
        [lambda model=model: model for model in models],  # type: ignore[misc]
        LIKE,
        tokens=TOKENS,
        count=count,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )
    assert probes.source == "generated text"
    return probes.inputs[0]


@pytest.mark.parametrize("layout", ["steps", "flat", "last", "state"])
def test_every_token_follows_from_the_one_before(layout: str) -> None:
    texts = written(Markov(layout=layout))
    assert texts.shape == (40, LENGTH)
    assert texts.dtype == torch.int64
    assert torch.equal(texts[:, 1:], (texts[:, :-1] + 1) % TOKENS)


def test_every_client_writes_its_share() -> None:
    texts = written(Markov(1), Markov(2), count=41)
    steps = (texts[:, 1:] - texts[:, :-1]) % TOKENS
    assert (steps[:21] == 1).all()
    assert (steps[21:] == 2).all()


def test_first_tokens_are_uniform() -> None:
    firsts = torch.bincount(written(Markov(), count=2000)[:, 0]) / 2000
    assert firsts.tolist() == pytest.approx([1 / TOKENS] * TOKENS, abs=0.03)


def test_tokens_are_drawn_with_the_model_s_probabilities_at_the_temperature() -> None:
    def share(temperature: float) -> float:
        texts = written(Markov(sharpness=2.0), count=600, temperature=temperature)
        return ((texts[:, 1:] - texts[:, :-1]) % TOKENS == 1).float().mean().item()

    for temperature in (1.0, 0.5):
        odds = torch.tensor([2.0, 0, 0, 0, 0]).div(temperature).softmax(0)[0].item()
        assert share(temperature) == pytest.approx(odds, abs=0.02)


def test_a_seed_fixes_the_texts_and_another_changes_them() -> None:
    model = Markov(sharpness=1.0)
    assert torch.equal(written(model), written(model))
    assert not torch.equal(written(model), written(model, seed=1))


def test_texts_written_a_few_at_a_time_follow_the_model_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedmerge.probes.text.HELD_LOGITS", 3 * LENGTH * TOKENS)
    texts = written(Markov(), count=10, steps=4)
    assert texts.shape == (10, 4)
    assert torch.equal(texts[:, 1:], (texts[:, :-1] + 1) % TOKENS)


def test_a_diverged_client_writes_anything() -> None:
    model = Markov()
    model.table.data.fill_(float("nan"))
    texts = written(model, count=200)
    shares = torch.bincount(texts.flatten(), minlength=TOKENS) / texts.numel()
    assert shares.tolist() == pytest.approx([1 / TOKENS] * TOKENS, abs=0.05)


def test_the_models_stay_as_they_were() -> None:
    model = Markov().train()
    before = model.table.detach().clone()
    written(model)
    assert model.training
    assert torch.equal(model.table, before)
    assert model.table.grad is None


def test_models_that_write_no_text_are_refused() -> None:
    class Pooled(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens) + 1, 2)

    with pytest.raises(ArchitectureError, match=r"outputs are \(41, 2\) for tokens \(40, 1\)"):
        written(Pooled())
    with pytest.raises(ArchitectureError, match="models that take tokens"):
        generated_probes([Markov], (torch.zeros(2, 3),), tokens=5, count=2, seed=0)


@pytest.mark.parametrize(
    ("outputs", "tokens", "expected"),
    [
        (torch.zeros(2, LENGTH, 7), None, True),
        (torch.zeros(2 * LENGTH, 7), None, True),
        ((torch.zeros(2, LENGTH, 7), torch.zeros(1)), None, True),
        (torch.zeros(2, 7), 7, True),
        (torch.zeros(2, 7), None, False),  # a classifier of seven classes
        (torch.zeros(2, 2), 7, False),
        (torch.zeros(2, LENGTH, 3), None, False),  # a tagger: token 6 is read, 3 are written
        (torch.zeros(2, LENGTH, 7), 50, False),
        (torch.zeros(2, LENGTH + 1, 7), None, False),
        ("text", None, False),
    ],
)
def test_language_models_are_told_by_their_outputs(
    outputs: object, tokens: int | None, expected: bool
) -> None:
    inputs = (torch.full((2, LENGTH), 6),)
    assert is_language_model(outputs, inputs, tokens=tokens) is expected


def test_a_model_of_float_sequences_is_no_language_model() -> None:
    assert not is_language_model(torch.zeros(2, LENGTH, 7), (torch.zeros(2, LENGTH),))
