"""Images that cost as much to decode as ImageNet's photographs, made quickly."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

__all__ = ["NUM_CLASSES", "make_photos"]

NUM_CLASSES = 8

_SCENE_SIZE = (750, 1000)
"""(height, width) of what the photographs of a class are cut out of."""


def make_photos(folder: Path, num_images: int, on_made: Callable[[], object]) -> int:
    """Fill a folder with JPEGs, a subfolder for each class; gives the number of bytes.

    Args:
        folder: which one.
        num_images: how many, of all classes.
        on_made: called for each.

    """
    num_bytes = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        scenes = list(threads.map(_scene, range(NUM_CLASSES)))
        for number in range(NUM_CLASSES):
            (folder / f"class-{number}").mkdir()
        for size in threads.map(partial(_save_photo, folder, scenes), range(num_images)):
            num_bytes += size
            on_made()
    return num_bytes


def _scene(class_number: int) -> Any:
    """Shades, edges and grain, in the colours of a class; H×W×3."""
    random = np.random.default_rng(class_number)
    height, width = _SCENE_SIZE
    pixels = np.empty((height, width, 3), np.float32)
    for channel in range(3):
        # Eight classes, eight corners of the cube of colours.
        level = 170 if class_number >> channel & 1 else 80
        pixels[:, :, channel] = level + 20 * _field(random, 5)
    pixels += 18 * _field(random, 50)[:, :, None]
    for _ in range(8):
        # Things with sharp outlines, each of one colour.
        pixels[_field(random, 8) > 1.5] += random.normal(scale=60, size=3)
    pixels += 10 * _field(random, 400)[:, :, None]
    pixels += random.normal(scale=7, size=(height, width, 1)).astype(np.float32)
    return pixels.clip(0, 255).astype(np.uint8)


def _field(random: np.random.Generator, num_cells: int) -> Any:
    """Values around 0 that change smoothly, so many times from side to side."""
    coarse = random.normal(size=(num_cells, num_cells)).astype(np.float32)
    size = _SCENE_SIZE[::-1]
    return np.asarray(PIL.Image.fromarray(coarse).resize(size, PIL.Image.Resampling.BICUBIC))


def _save_photo(folder: Path, scenes: list[Any], number: int) -> int:
    random = np.random.default_rng(NUM_CLASSES + number)
    scene = scenes[number % NUM_CLASSES]
    height, width = random.integers((340, 450), (420, 550))
    top, left = random.integers((0, 0), (scene.shape[0] - height, scene.shape[1] - width))
    part = scene[top : top + height, left : left + width, :: random.choice([-1, 1])]
    path = folder / f"class-{number % NUM_CLASSES}" / f"{number:05}.jpg"
    PIL.Image.fromarray(np.ascontiguousarray(part)).save(path, quality=92, subsampling=0)
    return path.stat().st_size
