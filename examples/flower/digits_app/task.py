"""The model, and the data of a site."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST = 360  # of the 1,797 images, which no site has


class Net(nn.Module):
    """A small convolutional net for 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 36, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (n, 1, 8, 8)."""
        hidden = self.conv(x).relu().flatten(1)
        logits: Tensor = self.fc2(self.fc1(hidden).relu())
        return logits


def site_data(site: int, sites: int) -> tuple[Tensor, Tensor]:
    """Return a site's images and labels: mostly those classes that are its own."""
    images, labels = _digits()
    images, labels = images[TEST:], labels[TEST:]
    generator = torch.Generator().manual_seed(0)
    owner = (labels + torch.randint(0, 2, labels.shape, generator=generator)) % sites
    return images[owner == site], labels[owner == site]


def test_data() -> tuple[Tensor, Tensor]:
    """Return images and labels that no site has."""
    images, labels = _digits()
    return images[:TEST], labels[:TEST]


def _digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]
