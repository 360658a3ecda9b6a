"""Changed probes: views, mixtures and pastes, by the kind of input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedmerge.probes import (
    AUGMENTATIONS,
    CHANGES,
    Augmentation,
    Probes,
    augmentation_for,
    kind_of,
    mirrored,
    picture_shape,
)

IMAGES = torch.rand(40, 3, 12, 12, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randint(9, (40, 30), generator=torch.Generator().manual_seed(0))


def changed(name: str, samples: Tensor, seed: int = 0) -> Tensor:
    return AUGMENTATIONS[name](samples, torch.Generator().manual_seed(seed))


def test_every_change_that_can_be_asked_for_is_there() -> None:
    assert {*AUGMENTATIONS, "none"} == set(CHANGES)


@pytest.mark.parametrize("name", ["views", "flips", "mixtures", "pastes"])
def test_images_keep_their_shape_and_range_and_the_seed_decides(name: str) -> None:
    found = changed(name, IMAGES)
    assert found.shape == IMAGES.shape
    assert found.dtype == IMAGES.dtype
    assert found.min() >= -1e-6
    assert found.max() <= 1 + 1e-6
    assert torch.equal(found, changed(name, IMAGES))
    assert not torch.equal(found, changed(name, IMAGES, seed=1))


def test_views_of_one_colour_are_of_that_colour_and_others_are_zoomed() -> None:
    plain = torch.full((5, 1, 8, 8), 0.3)
    torch.testing.assert_close(changed("views", plain), plain)
    ramp = torch.linspace(0, 1, 16).expand(200, 1, 16, 16)
    slopes = changed("views", ramp).diff(dim=-1).mean((1, 2, 3)) / ramp.diff(dim=-1).mean()
    assert 0.5 < slopes.mean() < 1.0  # a part of the ramp, as wide as the whole was
    assert slopes.std() > 0.05


def test_about_half_of_the_images_are_mirrored_and_nothing_else() -> None:
    found = changed("flips", IMAGES)
    same = (found == IMAGES).flatten(1).all(1)
    mirror = (found == IMAGES.flip(-1)).flatten(1).all(1)
    assert bool((same ^ mirror).all())
    assert 10 < int(mirror.sum()) < 30


def test_mixtures_lie_between_two_samples() -> None:
    samples = torch.arange(10.0)[:, None] * torch.ones(3)
    found = changed("mixtures", samples)
    assert found.min() >= 0
    assert found.max() <= 9
    assert bool((found == found[:, :1]).all())  # one share for the whole sample
    assert int((found[:, 0] != found[:, 0].round()).sum()) >= 7


@pytest.mark.parametrize("samples", [IMAGES, IMAGES[:, 0], TEXTS], ids=["images", "rows", "texts"])
def test_pastes_are_boxes_of_one_other_sample(samples: Tensor) -> None:
    numbered = torch.arange(len(samples)).view(-1, *[1] * (samples.ndim - 1)).expand_as(samples)
    found = changed("pastes", numbered.contiguous())
    for number, own in enumerate(found):
        others = set(own.flatten().tolist()) - {number}
        assert len(others) <= 1
    shares = (found != numbered).float().flatten(1).mean(1)
    assert 0.2 < shares.mean() < 0.8
    if samples.ndim == 4:
        inside = (found != numbered)[:, 0]
        rows, columns = inside.any(2), inside.any(1)
        assert bool((inside == rows[:, :, None] & columns[:, None, :]).all())


def test_every_other_batch_of_texts_stays_as_it_is() -> None:
    probes = Probes((TEXTS,), "data")
    usual = augmentation_for(probes)
    pasted, plain = (
        usual.batch(number, probes, torch.Generator().manual_seed(0)).inputs[0] for number in (0, 1)
    )
    assert torch.equal(plain, TEXTS)
    assert not torch.equal(pasted, TEXTS)
    assert augmentation_for(probes, ["views"]).ways == ()  # of pictures


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ((IMAGES,), "image"),
        ((torch.rand(4, 784),), "image"),  # a row of pixels
        ((torch.rand(4, 28, 28),), "image"),
        ((torch.rand(4, 50, 28),), "sequence"),
        ((torch.rand(4, 100),), "numbers"),
        ((TEXTS,), "tokens"),
        ((torch.rand(4, 10), TEXTS[:4]), None),  # they belong together
        ((torch.rand(4),), None),
        ((torch.ones(4, 9, dtype=torch.bool),), None),
    ],
)
def test_the_kind_of_input_decides_how_it_is_changed(
    inputs: tuple[Tensor, ...], kind: str | None
) -> None:
    assert kind_of(inputs) == kind
    probes = Probes(inputs, "data")
    found = augmentation_for(probes)
    assert bool(found.ways) is (kind is not None)
    copies = found.copies(probes, 3, seed=0)
    assert len(copies) == (4 if kind else 1) * len(probes)
    assert all(torch.equal(a[: len(b)], b) for a, b in zip(copies.inputs, inputs, strict=True))


def test_rows_of_pixels_are_changed_as_the_picture_that_they_are() -> None:
    flat = IMAGES[:, :1].repeat(1, 1, 2, 2).flatten(1)  # of 24×24 pixels
    ways = Augmentation((("flips",),))
    found = ways.changed(Probes((flat,), "data"), seed=0).inputs[0]
    expected = changed("flips", flat.view(-1, 1, 24, 24)).flatten(1)
    assert torch.equal(found, expected)
    assert not torch.equal(found, flat)
    mirror = mirrored(Probes((flat,), "data")).inputs[0]
    assert torch.equal(mirror.view(-1, 24, 24), flat.view(-1, 24, 24).flip(-1))


def test_only_wanted_changes_are_made() -> None:
    probes = Probes((IMAGES,), "data")
    assert augmentation_for(probes, ["none"]).ways == ()
    assert augmentation_for(probes, ["pastes"]).ways == (("pastes",),)
    usual = augmentation_for(probes)
    assert usual.flips
    assert not usual.without("flips").flips
    assert {name for way in usual.without("flips").ways for name in way} == {
        "views",
        "pastes",
        "mixtures",
    }
    assert augmentation_for(probes, ["none"]).batch(0, probes, torch.Generator()) is probes


def test_pictures_are_told_by_their_shape() -> None:
    assert picture_shape((2, 3, 5, 7)) == (2, 3, 5, 7)
    assert picture_shape((2, 3072)) == (2, 3, 32, 32)
    assert picture_shape((2, 64)) is None  # too small to tell
    assert picture_shape((2, 10, 10)) is None
