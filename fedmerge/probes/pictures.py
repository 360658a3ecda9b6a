"""Which inputs are pictures, also where they come as one row of pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

IMAGE_AXES = 4  # samples, channels, height, width
SMALLEST_SIDE = 16  # of a square that a row of pixels is taken for
COLOURS = (1, 3)


def picture_shape(shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return a picture's shape (n, channels, height, width) for inputs (n, …), None if it is none.

    A row of pixels is taken for a square, grey or in three colours, and so is a square without
    channels: nets of images that begin with a linear or recurrent layer read them so.

    >>> picture_shape((8, 784)), picture_shape((8, 3072)), picture_shape((8, 28, 28))
    ((8, 1, 28, 28), (8, 3, 32, 32), (8, 1, 28, 28))
    >>> picture_shape((8, 100)) is None, picture_shape((8, 50, 28)) is None
    (True, True)
    """
    samples, *own = shape
    if len(own) == IMAGE_AXES - 1:
        return tuple(shape)
    if len(own) == 2 and own[0] == own[1] >= SMALLEST_SIDE:
        return (samples, 1, *own)
    if len(own) == 1:
        for colours in COLOURS:
            side = math.isqrt(own[0] // colours)
            if side >= SMALLEST_SIDE and colours * side * side == own[0]:
                return (samples, colours, side, side)
    return None
