"""Decoding leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest

from spdl_torch import ImageError, ImageLoader

from . import images

NUM_DECODES = int(os.environ.get("SPDL_TORCH_NUM_DECODES", "4000"))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_decoding_leaks_no_memory():
    """Memory stays flat over thousands of decodes in four threads."""
    files = [
        images.encoded(name, height, width)
        for name in ("jpeg 4:2:0", "jpeg 4:4:4", "png rgb", "webp lossy")
        for height, width in ((90, 120), (131, 77), (64, 64))
    ]
    damaged = files[0][: len(files[0]) // 2]
    loaders = [ImageLoader(), ImageLoader(48), ImageLoader(48, crop="random", horizontal_flip=0.5)]
    numbers = itertools.count()
    resident = {}

    def decode():
        while (number := next(numbers)) < NUM_DECODES:
            loaders[number % 3].decode(files[number % len(files)])
            if number % 50 == 0:
                with pytest.raises(ImageError):
                    loaders[0].decode(damaged)
            if number % (NUM_DECODES // 4) == 0:
                resident[number] = resident_bytes()

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, first, *_, last = (resident[number] for number in sorted(resident))
    assert last - first < 8e6
