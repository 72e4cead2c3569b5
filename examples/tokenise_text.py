"""A tokeniser in pure Python holds the GIL: measure it, and use more processes.

    python examples/tokenise_text.py

The gain is the number of free cores: none on a machine that is busy.
"""

from __future__ import annotations

import random
import time

import torch
from torch.nn.utils.rnn import pad_sequence

from spdl_torch import DataLoader, StagedDataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Tokeniser:
    """Splits words into the longest pieces that it knows."""

    def __init__(self, num_pieces: int = 5000) -> None:
        rng = random.Random(0)
        pieces = {"".join(rng.choices(LETTERS, k=rng.randint(2, 4))) for _ in range(num_pieces)}
        self.ids = {piece: number for number, piece in enumerate([*LETTERS, *sorted(pieces)], 1)}
        self.longest = max(map(len, self.ids))

    def __call__(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            start = 0
            while start < len(word):
                for end in range(min(len(word), start + self.longest), start, -1):
                    number = self.ids.get(word[start:end])
                    if number is not None:
                        ids.append(number)
                        start = end
                        break
        return ids


class Texts(StagedDataset[list[int]]):
    def __init__(self, size: int) -> None:
        rng = random.Random(1)
        self.words = ["".join(rng.choices(LETTERS, k=rng.randint(3, 10))) for _ in range(2000)]
        self.size = size
        self.tokenise = Tokeniser()

    def __len__(self) -> int:
        return self.size

    def load(self, index: int) -> str:
        rng = random.Random(index)
        return " ".join(rng.choices(self.words, k=rng.randint(200, 400)))

    def preprocess(self, raw: str) -> list[int]:
        return self.tokenise(raw)

    def collate(self, samples: list[list[int]]) -> torch.Tensor:
        return pad_sequence([torch.tensor(ids) for ids in samples], batch_first=True)


def measure(dataset: Texts, num_processes: int) -> tuple[float, int, str]:
    loader = DataLoader(dataset, batch_size=16, num_workers=2, num_processes=num_processes)
    started = time.perf_counter()
    num_tokens = sum(int(batch.count_nonzero()) for batch in loader)
    seconds = time.perf_counter() - started
    return len(dataset) / seconds, num_tokens, str(loader.stats().verdict)


def main() -> None:
    dataset = Texts(1000)
    # By default, the threads of a StagedDataset share one process: it is to be thread-safe.
    for num_processes, place in ((1, "1 process"), (2, "2 processes")):
        texts_per_second, num_tokens, verdict = measure(dataset, num_processes)
        print(f"2 threads in {place}: {texts_per_second:.0f} texts/s, {num_tokens} tokens")
        print(f"  {verdict}")


if __name__ == "__main__":
    main()
