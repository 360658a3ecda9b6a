"""The image that feature maps are of: a picture's file, an array, or a sample of a shard."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedmerge.checkpoint import read_npy
from fedmerge.errors import CheckpointError, TrainingError, UsageError
from fedmerge.training import Preparation
from fedmerge.training.containers import open_columns
from fedmerge.types.arrays import Array

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
SAMPLES = ("x", "x_test", "x_train")  # arrays of a shard or data set, the first found wins
COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}  # channels → Pillow's mode


@dataclass(frozen=True)
class ImageOptions:
    """Which image, how it reaches the model, and which groups look at it."""

    file: Path
    index: int = 0  # of the sample, in files that hold several
    preparation: Preparation = field(default_factory=Preparation)
    groups: tuple[str, ...] = ()  # none: the first and the last convolutional one
    is_optional: bool = False  # nobody asked for it: where it can't be seen, the page says why

    @property
    def label(self) -> str:
        """What the image is called."""
        is_one = self.file.suffix.lower() in PICTURES
        return self.file.name if is_one else f"{self.file.name}, sample {self.index}"


def read_image(options: ImageOptions, channels: int, size: tuple[int, ...]) -> Array:
    """Return the image (1, channels, height, width) as a model takes it.

    A picture's file is brought to the model's colours, and to `size` (height, width) if given.
    """
    suffix = options.file.suffix.lower()
    check_image(options)
    if suffix in PICTURES:
        return _picture(options, channels, size)
    sample = _array(options.file) if suffix == ".npy" else _sample(options.file, options.index)
    options.preparation.check(sample, options.file.name)
    image = options.preparation(sample)
    image = image[:, None] if image.ndim == 3 else image
    if image.ndim != 4 or image.shape[1] != channels:
        raise UsageError(
            f"--image {options.file.name}: is {image.shape[1:]}, expected {channels} channels, "
            "height and width"
        )
    return image


def check_image(options: ImageOptions) -> None:
    """Refuse an image that is not there."""
    if not options.file.is_file():
        raise UsageError(f"--image {options.file}: no such file")


def _picture(options: ImageOptions, channels: int, size: tuple[int, ...]) -> Array:
    from PIL import Image  # it comes with matplotlib

    if channels not in COLOURS:
        raise UsageError(
            f"--image {options.file.name}: the model takes {channels} channels, expected 1, 3 or 4",
            "give the image as .npy",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow's about pictures that fill memory
            with Image.open(options.file) as opened:
                picture = opened.convert(COLOURS[channels])
    except Exception as error:  # damaged pictures make its decoders raise nearly anything
        raise UsageError(f"--image {options.file.name}: cannot be read ({error})") from None
    if size:
        picture = picture.resize((size[1], size[0]))
    pixels = np.asarray(picture)
    pixels = pixels[None, None] if channels == 1 else np.moveaxis(pixels, -1, 0)[None]
    plain = Preparation((0.0,), (1.0,))
    return (options.preparation if options.preparation.mean else plain)(pixels)


def _array(path: Path) -> Array:
    """Return the array of an .npy file as one sample: (1, …)."""
    try:
        array = read_npy(path)
    except CheckpointError as error:
        raise UsageError(f"--image {error.problem}") from None
    if array.ndim == 2:
        return array[None] if array.dtype == np.uint8 else array[None, None]
    return array if array.ndim == 4 else array[None]


def _sample(path: Path, index: int) -> Array:
    try:
        columns = open_columns(path)
    except TrainingError as error:
        raise UsageError(
            f"--image {error.problem}", f"pictures ({', '.join(PICTURES)}), .npy or a shard"
        ) from None
    name = next((name for name in SAMPLES if name in columns), None)
    if name is None:
        found = ", ".join(columns) or "nothing"
        raise UsageError(f"--image {path.name}: expected an array x, found {found}")
    samples = columns[name]()
    if not 0 <= index < len(samples):
        raise UsageError(f"--image-index is {index}, {path.name} has {len(samples)} samples")
    return np.asarray(samples[index : index + 1])
