"""Load a folder of images in ImageNet's layout with ImageLoader.

    python examples/image_folder.py DIRECTORY

Without a directory, it creates a small one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import PIL.Image
from torchvision.datasets import ImageFolder

from spdl_torch import DataLoader, ImageLoader


def make_folder(root: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(200):
        # A few random colours, enlarged: smooth, as photographs mostly are.
        colours = random.integers(0, 256, (6, 8, 3), np.uint8)
        image = PIL.Image.fromarray(colours).resize((500, 375), PIL.Image.Resampling.BICUBIC)
        folder = root / ("sea" if number % 2 else "sky")
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{number}.jpg")


def main(root: Path) -> None:
    dataset = ImageFolder(
        str(root), loader=ImageLoader(size=224, crop="random", horizontal_flip=0.5)
    )
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2)
    started = time.perf_counter()
    for images, labels in loader:
        print(tuple(images.shape), images.dtype, f"{labels.float().mean():.2f}")
    seconds = time.perf_counter() - started
    print(f"{len(dataset)} images, {len(dataset) / seconds:.0f} a second")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            make_folder(Path(directory))
            main(Path(directory))
