"""Stream tar shards to ranks and workers, and resume from a checkpoint in mid-epoch.

The files have WebDataset's layout: `0042.png` and `0042.cls` are the parts of one sample.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.utils.data import IterableDataset, get_worker_info

from spdl_torch import DataLoader, ImageLoader

Sample = tuple[torch.Tensor, int, str]


class TarShards(IterableDataset[Sample]):
    """Every rank and every worker reads its own shards from start to end."""

    def __init__(self, paths: list[Path], rank: int = 0, num_ranks: int = 1) -> None:
        if len(paths) < num_ranks:
            raise ValueError(f"{num_ranks} ranks need as many shards, got {len(paths)}.")
        self.paths = sorted(paths)[rank::num_ranks]
        self.images = ImageLoader(size=32)
        self.num_shards_done = 0
        self.offset = 0
        """Offset of the next sample in its shard."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        paths = self.paths if worker is None else self.paths[worker.id :: worker.num_workers]
        while self.num_shards_done < len(paths):
            yield from self.samples(paths[self.num_shards_done])
            self.num_shards_done += 1
            self.offset = 0
        self.num_shards_done = 0  # For the next epoch.

    def samples(self, path: Path) -> Iterator[Sample]:
        with path.open("rb") as file:
            # Earlier samples are not read again.
            file.seek(self.offset)
            parts: dict[str, bytes] = {}
            with tarfile.open(fileobj=file, mode="r:") as shard:
                for member in shard:
                    name = Path(member.name)
                    content = shard.extractfile(member)
                    assert content is not None
                    parts[name.suffix] = content.read()
                    if len(parts) == 2:
                        # Before the yield, so that a state taken then includes the sample.
                        self.offset = shard.offset
                        yield self.sample(name.stem, parts)
                        parts = {}

    def sample(self, key: str, parts: dict[str, bytes]) -> Sample:
        return self.images.decode(parts[".png"], key), int(parts[".cls"]), key

    # `loader.state_dict()` calls these to save the position of each worker.
    def state_dict(self) -> dict[str, Any]:
        return {"num_shards_done": self.num_shards_done, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_shards_done, self.offset = state["num_shards_done"], state["offset"]


def write_shards(folder: Path, num_shards: int, num_samples_each: int) -> list[Path]:
    random = np.random.default_rng(0)
    paths = [folder / f"{number:03}.tar" for number in range(num_shards)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as shard:
            for sample in range(num_samples_each):
                image = io.BytesIO()
                pixels = random.integers(0, 256, (40, 40, 3), np.uint8)
                PIL.Image.fromarray(pixels).save(image, "PNG")
                key = f"{number:03}{sample:04}"
                for suffix, data in ((".png", image.getvalue()), (".cls", b"%d" % (sample % 10))):
                    member = tarfile.TarInfo(key + suffix)
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))
    return paths


def make_loader(paths: list[Path]) -> DataLoader[Sample]:
    # Set by torchrun.
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return DataLoader(TarShards(paths, rank, num_ranks), batch_size=16, num_workers=2)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = write_shards(Path(name), num_shards=5, num_samples_each=60)
        loader = make_loader(paths)
        keys: list[str] = []
        for number, (images, _, batch_keys) in enumerate(loader, 1):
            keys += batch_keys
            if number == 7:
                print(tuple(images.shape), "in batch 7; stopping here")
                break
        state = loader.state_dict()

        loader = make_loader(paths)
        loader.load_state_dict(state)
        num_before = len(keys)
        for _, _, batch_keys in loader:
            keys += batch_keys
        print(f"{num_before} samples before, {len(keys) - num_before} after")
        print(f"{len(set(keys))} different ones of {len(keys)}")


if __name__ == "__main__":
    main()
