import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmerge.errors import UsageError
from fedmerge.probes import Spectrum, noise_probes

IMAGE = torch.zeros(2, 3, 32, 32)
PLAIN = Spectrum(leafy=0.0, exponent_spread=0.0, contrast_spread=0.0)


def made(
    like: Tensor, count: int = 400, *, seed: int = 0, spectrum: Spectrum | None = None
) -> Tensor:
    probes = noise_probes(
        (like,), count, mean=0.0, std=1.0, seed=seed, tokens=None, spectrum=spectrum
    )
    assert probes.source == "noise"
    return probes.inputs[0]


def slope(images: Tensor) -> float:
    """Return how the logarithm of the amplitude changes with that of the frequency."""
    size = images.shape[-1]
    power = torch.fft.fft2(images.double()).abs().square().mean((0, 1)).flatten().numpy()
    axis = np.fft.fftfreq(size)
    frequency = np.hypot(axis[:, None], axis[None]).reshape(-1)
    used = (frequency > 1 / size) & (frequency < 0.5)
    return float(np.polyfit(np.log(frequency[used]), np.log(power[used]) / 2, 1)[0])


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_the_spectrum_of_images_falls_as_asked(exponent: float) -> None:
    images = made(IMAGE, spectrum=Spectrum(exponent=exponent, exponent_spread=0.0, leafy=0.0))
    assert slope(images) == pytest.approx(-exponent, abs=0.03)


def test_images_and_sequences_are_pink_and_features_white_by_default() -> None:
    for shape in ((2, 3, 32, 32), (2, 32, 32), (2, 1, 4, 32, 32)):
        assert slope(made(torch.zeros(shape)).reshape(-1, 1, 32, 32)) < -0.6
    rows_of_pixels = made(torch.zeros(2, 1024), 200)  # nets of images may begin with a linear layer
    assert slope(rows_of_pixels.reshape(-1, 1, 32, 32)) < -0.6
    features = made(torch.zeros(2, 1025), 200)[:, :1024]  # no square
    assert slope(features.reshape(-1, 1, 32, 32)) == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 28, 20), (2, 50), (2, 2, 6, 8, 8), (2,)])
def test_mean_and_deviation_are_those_asked_for(shape: tuple[int, ...]) -> None:
    (noise,) = noise_probes(
        (torch.zeros(shape),), 2000, mean=0.5, std=0.25, seed=3, tokens=None
    ).inputs
    assert noise.shape == (2000, *shape[1:])
    assert noise.mean().item() == pytest.approx(0.5, abs=0.03)
    assert noise.std().item() == pytest.approx(0.25, rel=0.06)


def test_every_channel_may_have_its_own_mean_and_deviation() -> None:
    mean, std = [0.0, 1.0, -1.0], [1.0, 0.5, 2.0]
    (noise,) = noise_probes((IMAGE,), 1000, mean=mean, std=std, seed=0, tokens=None).inputs
    assert noise.mean((0, 2, 3)).tolist() == pytest.approx(mean, abs=0.12)
    assert noise.std((0, 2, 3)).tolist() == pytest.approx(std, rel=0.06)
    with pytest.raises(UsageError, match=r"`probe_mean` has 2 numbers, .* has 3 channels"):
        noise_probes((IMAGE,), 5, mean=[0.0, 1.0], std=1.0, seed=0, tokens=None)


def test_channels_are_alike_to_the_degree_asked() -> None:
    for shared in (0.0, 0.75):
        images = made(IMAGE, spectrum=Spectrum(shared=shared, leafy=0.0))
        pairs = torch.corrcoef(images.transpose(0, 1).flatten(1))
        assert pairs[0, 1].item() == pytest.approx(shared, abs=0.05)


def test_samples_differ_in_contrast_unless_told_not_to() -> None:
    def spread(spectrum: Spectrum) -> float:
        deviations = made(torch.zeros(2, 1, 64, 64), spectrum=spectrum).std((1, 2, 3))
        return math.log(float(deviations.quantile(0.9) / deviations.quantile(0.1)))

    assert spread(Spectrum(contrast_spread=0.5, leafy=0.0)) > spread(PLAIN) + 0.5


def test_a_seed_fixes_the_noise_and_another_seed_changes_it() -> None:
    assert torch.equal(made(IMAGE, 8), made(IMAGE, 8))
    assert not torch.equal(made(IMAGE, 8), made(IMAGE, 8, seed=1))


def test_noise_made_block_by_block_is_as_pink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmerge.probes.noise.BLOCK", 10_000)
    images = made(IMAGE, 300, spectrum=PLAIN)
    assert slope(images) == pytest.approx(-1.0, abs=0.05)
    assert images.std().item() == pytest.approx(1.0, rel=0.1)


def test_tokens_are_uniform_below_their_number_and_masks_are_the_example_s() -> None:
    mask = torch.tensor([[True, False, True]])
    like = (torch.zeros(1, 5, dtype=torch.int32), mask, torch.zeros(1, 4, dtype=torch.float64))
    tokens, masks, floats = noise_probes(like, 4000, mean=0.0, std=1.0, seed=0, tokens=4).inputs
    assert (tokens.dtype, floats.dtype) == (torch.int32, torch.float64)
    shares = torch.bincount(tokens.flatten().long()) / tokens.numel()
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.02)
    assert torch.equal(masks, mask.expand(4000, 3))


def test_whole_numbers_need_to_know_how_many_tokens_there_are() -> None:
    like = (torch.zeros(1, 5, dtype=torch.int64),)
    with pytest.raises(UsageError, match="how many there are is unknown"):
        noise_probes(like, 3, mean=0.0, std=1.0, seed=0, tokens=None)


def test_an_input_that_is_one_number_is_refused() -> None:
    with pytest.raises(UsageError, match="an input of the model is one number"):
        noise_probes((torch.tensor(1.0),), 3, mean=0.0, std=1.0, seed=0, tokens=None)
