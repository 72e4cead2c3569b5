"""Files that something went wrong with: an image or an ImageError, and the process lives on."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
import subprocess
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from spdl_torch import ImageError, ImageLoader

from .images import FORMATS, encoded
from .tiers import sampled

NUM_MUTATIONS = int(os.environ.get("SPDL_TORCH_FUZZ_MUTATIONS", "4000"))
"""In the exhaustive tier."""
MAX_PIXELS = 2_000_000
MAX_GROWTH_BYTES = 200e6
"""Some images of MAX_PIXELS in RGBA, and what the allocator keeps."""
MAX_SECONDS = 5
"""Of CPU time for one file; the slowest takes a hundredth of it."""

NAMES = list(FORMATS)
EXTREMES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
LOADERS = [
    ImageLoader(max_pixels=MAX_PIXELS),
    ImageLoader((24, 24), max_pixels=MAX_PIXELS),
    ImageLoader(24, crop="center", mode="unchanged", max_pixels=MAX_PIXELS),
    ImageLoader(5, reducing_gap=1, apply_exif_orientation=True, max_pixels=MAX_PIXELS),
    ImageLoader(24, crop="random", horizontal_flip=0.5, mode="L", max_pixels=MAX_PIXELS),
]


# -- mutations -------------------------------------------------------------------------------------


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    block = chance.randbytes(chance.randint(1, 16))
    data[start : start + len(block)] = block


def overwrite_header(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(min(len(data), 64))] = chance.randrange(256)


def write_extreme(data: bytearray, chance: random.Random) -> None:
    letter = chance.choice("BHI")
    number = chance.choice(EXTREMES) & ((1 << 8 * struct.calcsize(letter)) - 1)
    block = struct.pack(chance.choice("<>") + letter, number)
    # Most that a decoder trusts stands at the front.
    start = chance.randrange(chance.choice([min(len(data), 64), len(data)]))
    data[start : start + len(block)] = block


def delete(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randint(1, 40)]


def insert(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = chance.randbytes(chance.randint(1, 40))


def repeat(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = data[start : start + chance.randint(1, 100)]


def swap(data: bytearray, chance: random.Random) -> None:
    length = chance.randint(1, 1 + len(data) // 4)
    first = chance.randrange(len(data) - length)
    second = chance.randrange(len(data) - length)
    block = data[first : first + length]
    data[first : first + length] = data[second : second + length]
    data[second : second + length] = block


def blank(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 200), len(data) - start)
    data[start : start + length] = bytes([chance.choice([0, 0xFF])]) * length


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


MUTATIONS = [
    *(flip_bits, overwrite, overwrite_header, write_extreme, delete, insert, repeat, swap, blank),
    truncate,
]


def repair_checksums(png: bytearray) -> None:
    """Let a mutation of a PNG get past the door."""
    position = 8
    while position + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, position)
        end = position + 8 + length
        if end + 4 > len(png):
            return
        struct.pack_into(">I", png, end, zlib.crc32(png[position + 4 : end]))
        position = end + 4


def mutated(number: int) -> tuple[str, bytes]:
    """The name of a format and a damaged file of it; the same whenever it is asked for."""
    chance = random.Random(number)
    name = NAMES[number % len(NAMES)]
    data = bytearray(encoded(name, 40, 56))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        chance.choice(MUTATIONS)(data, chance)
        if len(data) < 2:
            break
    if name.startswith("png") and chance.random() < 0.7:
        repair_checksums(data)
    return name, bytes(data)


# -- the attack ------------------------------------------------------------------------------------


def complaint_about(number: int) -> str | None:
    """What is wrong with how a damaged file was taken."""
    _, data = mutated(number)
    loader = LOADERS[number // len(NAMES) % len(LOADERS)]
    torch.manual_seed(number)
    started = time.process_time()
    try:
        image = loader.decode(data)
    except ImageError as error:
        image = None
        if not str(error).endswith("."):
            return f"an error that is no sentence: {error}"
    except BaseException:
        return traceback.format_exc()
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        return f"it took {seconds:.1f} seconds"
    if image is None:
        return None
    if image.dtype != torch.uint8 or image.ndim != 3 or image.numel() > 4 * MAX_PIXELS:
        return f"a strange image: {image.dtype} {tuple(image.shape)}"
    return None


def attack(first: int, num_mutations: int, journal: Path) -> None:
    """Decode damaged files; the journal says what this process was at if it died."""
    warnings.simplefilter("error")
    for name in NAMES:
        for loader in LOADERS:
            with contextlib.suppress(ImageError):
                loader.decode(encoded(name, 40, 56))
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    complaints = []
    with journal.open("w") as file:
        for number in range(first, first + num_mutations):
            file.seek(0)
            file.write(f"mutated({number})")
            file.flush()
            complaint = complaint_about(number)
            if complaint is not None:
                complaints.append(f"mutated({number}), {NAMES[number % len(NAMES)]}: {complaint}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth_bytes = (peak - peak_before) * 1024
    if growth_bytes > MAX_GROWTH_BYTES:
        complaints.append(f"memory grew by {growth_bytes / 1e6:.0f} MB")
    if complaints:
        sys.exit("\n".join(complaints))


@pytest.mark.parametrize("num_mutations", sampled([10 * len(FORMATS), NUM_MUTATIONS], 2))
def test_damaged_files_crash_nothing(tmp_path, num_mutations):
    """Each is decoded to an image or refused with an ImageError, quickly and in little memory."""
    journal = tmp_path / "journal"
    journal.write_text("an intact file")
    program = (
        "import sys; from pathlib import Path; from tests.test_image_fuzz import attack\n"
        f"attack(0, {num_mutations}, Path({str(journal)!r}))"
    )
    # In its own process: a decoder that crashes must not end the other tests.
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60 + num_mutations / 100,
        check=False,
    )
    assert finished.returncode == 0, f"{journal.read_text()}: {finished.stderr[-5000:]}"
