from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError
from fedmerge.probes import (
    Ascent,
    Probes,
    distance_from_statistics,
    draw_targets,
    noise_probes,
    synthetic_probes,
    watched_norms,
)

CLASSES = 4
STEPS = 30
GAIN = 0.4  # from chance, 0.25; recurrent nets gain least, about 0.5


class Recurrent(nn.Module):
    """A classifier of float sequences (n, steps, features) by their last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, _ = self.lstm(x)
        return self.head(steps[:, -1]), steps


def convolutional(*extra: nn.Module) -> nn.Module:
    head = nn.Linear(6 * 16, CLASSES)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), head, *extra)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def probabilities() -> nn.Module:
    return convolutional(nn.Softmax(1))


SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    convolutional: (1, 8, 8),
    probabilities: (1, 8, 8),
    Recurrent: (8, 8),
    dense: (64,),
}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found.log() if isinstance(model, nn.Sequential) and len(model) == 8 else found


def trained(kind: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model that tells apart in which quarter of an 8×8 image the bright patch is."""
    torch.manual_seed(seed)
    model = kind().train()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        y = torch.randint(CLASSES, (64,))
        x = torch.randn(64, 8, 8) * 0.5
        quarters = x.view(64, 2, 4, 2, 4)
        quarters[torch.arange(64), y // 2, :, y % 2] += 1.5
        outputs = logits(model, x.reshape(64, *SHAPES[kind]))
        adam.zero_grad()
        nn.functional.cross_entropy(outputs, y).backward()  # type: ignore[no-untyped-call]
        adam.step()
    model.zero_grad()
    return model


def clients(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    return [trained(kind, seed) for seed in (1, 2)]


def start(kind: Callable[[], nn.Module], count: int = 60) -> Probes:
    like = (torch.zeros(1, *SHAPES[kind]),)
    return noise_probes(like, count, mean=0.0, std=1.0, seed=0, tokens=None)


def made(
    models: list[nn.Module], noise: Probes, *, seed: int = 0, ascent: Ascent | None = None
) -> Probes:
    builds = [lambda model=model: model for model in models]
    return synthetic_probes(builds, noise, steps=STEPS, seed=seed, ascent=ascent)


@torch.no_grad()
def hits(models: list[nn.Module], probes: Probes, seed: int = 0) -> float:
    """Return how often clients see in probes the class that they were made for."""
    targets = draw_targets(len(probes), CLASSES, Ascent().least_confidence, seed=seed).argmax(1)
    seen = [logits(model.eval(), probes.inputs[0]).argmax(1) for model in models]
    return torch.stack([(classes == targets).float().mean() for classes in seen]).mean().item()


@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_clients_see_in_the_inputs_what_they_were_made_for_far_more_often_than_in_noise(
    kind: Callable[[], nn.Module],
) -> None:
    models, noise = clients(kind), start(kind)
    probes = made(models, noise)
    assert probes.source == "synthetic"
    assert probes.inputs[0].shape == noise.inputs[0].shape
    assert hits(models, probes) > hits(models, noise) + GAIN
    assert hits(models, probes, seed=1) < hits(models, noise) + GAIN / 2  # other targets


def test_weights_statistics_gradients_and_modes_stay_as_they_were() -> None:
    models = clients(convolutional)
    models[0].eval()
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    made(models, start(convolutional))
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert [model.training for model in models] == [False, True]


def test_a_seed_fixes_the_inputs_and_another_changes_them() -> None:
    models, noise = clients(dense), start(dense)
    once = made(models, noise).inputs[0]
    assert torch.equal(made(models, noise).inputs[0], once)
    assert not torch.equal(made(models, noise, seed=1).inputs[0], once)


def test_inputs_come_nearer_to_what_batch_norms_remember() -> None:
    models, noise = clients(convolutional), start(convolutional)

    @torch.no_grad()
    def distance(probes: Probes) -> float:
        with watched_norms() as norms:
            for model in models:
                model.eval()(probes.inputs[0])
        assert len(norms) == len(models)
        return distance_from_statistics(norms).item()

    matched = distance(made(models, noise))
    assert matched < 0.5 * distance(noise)
    assert matched < distance(made(models, noise, ascent=Ascent(statistics=0.0)))


def test_the_distance_from_statistics_is_that_of_two_normal_distributions() -> None:
    norm = nn.BatchNorm1d(1).eval()
    norm.running_mean = torch.tensor([1.0])
    norm.running_var = torch.tensor([4.0])
    with watched_norms() as norms:
        norm(torch.tensor([[4.0], [6.0]]))  # mean 5, deviation 1
        nn.functional.batch_norm(
            torch.tensor([[4.0], [6.0]]),
            running_mean=norm.running_mean,
            running_var=norm.running_var,
        )
        nn.BatchNorm1d(1, track_running_stats=False)(torch.tensor([[4.0], [6.0]]))
    assert len(norms) == 2
    assert distance_from_statistics(norms).item() == pytest.approx((4 / 2) ** 2 + 0.5**2, rel=1e-4)


def test_batch_norms_of_exported_programs_are_seen_too() -> None:
    x, mean, variance = torch.randn(5, 2), torch.zeros(2), torch.ones(2)
    ops = torch.ops.aten
    with watched_norms() as norms:
        ops.batch_norm.default(x, None, None, mean, variance, False, 0.1, 1e-5, False)
        ops._native_batch_norm_legit_no_training.default(x, None, None, mean, variance, 0.1, 1e-5)
    assert [norm.values is x and norm.variance is variance for norm in norms] == [True, True]


def test_smoothness_makes_images_smoother() -> None:
    def roughness(smoothness: float) -> float:
        images = made(models, noise, ascent=Ascent(smoothness=smoothness)).inputs[0]
        return (images.diff(dim=-1).abs().mean() / images.std()).item()

    models, noise = clients(convolutional), start(convolutional)
    assert roughness(3.0) < 0.9 * roughness(0.0)


def test_the_scale_of_inputs_changes_nothing_but_their_scale() -> None:
    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.model(x / 256)  # a power of two: exact
            return found

    models, noise = clients(dense), start(dense)
    large = Probes((noise.inputs[0] * 256,), "noise")
    scaled = made([Scaled(model) for model in models], large).inputs[0]
    torch.testing.assert_close(scaled / 256, made(models, noise).inputs[0])


def test_integer_inputs_stay_and_precision_is_kept() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, CLASSES).double()

        def forward(self, rows: Tensor, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(x) * rows[:, None]}

    rows, x = torch.arange(7), torch.randn(7, 3, dtype=torch.float64)
    probes = synthetic_probes([Chosen], Probes((rows, x), "noise"), steps=3, seed=0)
    assert torch.equal(probes.inputs[0], rows)
    assert probes.inputs[1].dtype == torch.float64
    assert not torch.equal(probes.inputs[1][1:], x[1:])


def test_clients_take_turns_with_one_in_memory_and_progress_is_told() -> None:
    built, told = [], []
    models = clients(dense)

    def build(client: int) -> nn.Module:
        built.append(client)
        return models[client]

    synthetic_probes(
        [lambda: build(0), lambda: build(1)],
        start(dense, 6),
        steps=6,
        seed=0,
        ascent=Ascent(stint=2, chunk=6),
        progress=lambda step, done, total: told.append((step, done, total)),
    )
    assert len(built) == 1 + 3  # the number of classes is asked for first
    assert set(built[1:3]) == {0, 1}
    assert told == [("synthetic inputs", done, 6) for done in (2, 4, 6)]


def test_targets_are_softened_between_two_classes() -> None:
    targets = draw_targets(500, 5, 0.6, seed=0)
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 500)
    assert ((targets > 0).sum(1) <= 2).all()
    assert targets.amax(1).min().item() == pytest.approx(0.6, abs=0.01)
    assert set(targets.argmax(1).tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("model", "x", "problem"),
    [
        (nn.Conv2d(1, 2, 1), torch.zeros(3, 1, 4, 4), r"outputs are \(2, 2, 4, 4\), expected \(2,"),
        (nn.Linear(4, 1), torch.zeros(3, 4), r"outputs are \(2, 1\), expected \(2, classes\)"),
        (nn.Embedding(4, 3), torch.zeros(3, dtype=torch.int64), "takes whole numbers only"),
    ],
)
def test_models_that_are_no_classifiers_of_floats_are_refused(
    model: nn.Module, x: Tensor, problem: str
) -> None:
    with pytest.raises(ArchitectureError, match=problem) as caught:
        synthetic_probes([lambda: model], Probes((x,), "noise"), steps=1, seed=0)
    assert "`probe=noise`" in caught.value.hint


def test_outputs_without_gradients_are_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)  # has a gradient, but the inputs have none

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(x.detach())
            return found

    noise = Probes((torch.randn(3, 4),), "noise")
    for build in (Detached, lambda: Detached().requires_grad_(False)):
        with pytest.raises(ArchitectureError, match="no gradient at its inputs"):
            synthetic_probes([build], noise, steps=1, seed=0)
