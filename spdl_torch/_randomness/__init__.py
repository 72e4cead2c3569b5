"""One generator for each sample; the training loop's are left alone.

What a sample draws follows from a key: the numbers that say which sample of which epoch it is. So
it is the same whoever makes the sample: a thread, a process, an executor, the calling thread.
"""

from ._generators import (
    CurrentGenerators,
    CurrentlyOf,
    SampleGenerators,
    SampleRng,
    restart_sample,
    restore_current_rng,
    sample_rng,
)
from ._keyed import (
    Keyed,
    KeyedCollate,
    KeyedDataset,
    KeyedHook,
    KeyedIterable,
    randomness_of,
    show_dataset,
)
from ._mode import DrawsOfSamples, RandomnessOfSamples
from ._process_wide import preserve_global_rng, seed_as_worker_process

__all__ = [
    "CurrentGenerators",
    "CurrentlyOf",
    "DrawsOfSamples",
    "Keyed",
    "KeyedCollate",
    "KeyedDataset",
    "KeyedHook",
    "KeyedIterable",
    "RandomnessOfSamples",
    "SampleGenerators",
    "SampleRng",
    "preserve_global_rng",
    "randomness_of",
    "restart_sample",
    "restore_current_rng",
    "sample_rng",
    "seed_as_worker_process",
    "show_dataset",
]
