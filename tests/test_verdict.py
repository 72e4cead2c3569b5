"""Verdicts on pipelines whose bottleneck is known, and rule by rule."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from spdl_torch import DataLoader, LoaderStats, LoopStats, StagedDataset, StageStats

NUM_CORES = len(os.sched_getaffinity(0))
BLOCK = bytes(4 << 20)


def compute(num_times=1):
    """Keep a core busy for some milliseconds, without the GIL."""
    for _ in range(num_times):
        hashlib.sha256(BLOCK).digest()


def think(seconds):
    """Keep a core busy for so many seconds, and hold the GIL."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(number * number for number in range(200))


class Work(StagedDataset):
    """Samples that do a given kind of work in each stage."""

    def __init__(self, size, load=lambda: None, preprocess=lambda: None, collate=lambda: None):
        self.size, self.of_load, self.of_preprocess, self.of_collate = (
            size,
            load,
            preprocess,
            collate,
        )

    def __len__(self):
        return self.size

    def load(self, index):
        self.of_load()
        return index

    def preprocess(self, raw):
        self.of_preprocess()
        return raw

    def collate(self, samples):
        self.of_collate()
        return samples


def stats_of(dataset, num_workers=2, *, step=lambda: None, **arguments):
    with DataLoader(dataset, batch_size=8, num_workers=num_workers, **arguments) as loader:
        for _ in loader:
            step()
        return loader.stats()


PIPELINES = {
    "io-bound": (Work(400, load=lambda: time.sleep(0.01)), 2, None),
    "cpu-bound": (Work(200, preprocess=compute), NUM_CORES, None),
    "gil-bound": (Work(200, preprocess=lambda: think(0.004)), 4, None),
    "collate-bound": (Work(320, collate=lambda: compute(8)), 2, None),
    "training-bound": (Work(400), 2, lambda: time.sleep(0.02)),
    "oversubscribed": (Work(300, preprocess=compute), 8 * NUM_CORES, None),
}


@pytest.mark.parametrize("num_processes", [0, 1, 2])
@pytest.mark.parametrize("kind", PIPELINES)
def test_bottleneck_of_pipeline_is_found(kind, num_processes):
    """A pipeline with a known bottleneck gets the verdict of that name, wherever workers live."""
    dataset, num_workers, step = PIPELINES[kind]
    if kind == "gil-bound" and num_processes >= NUM_CORES:
        kind = "cpu-bound"  # A GIL for each core.
    # A pipeline runs for a second. A pause of the machine may spoil one run, but not two more.
    for num_needed in (1, 2):
        found = [
            stats_of(
                dataset,
                num_workers,
                step=step or (lambda: None),
                num_processes=min(num_processes, num_workers),
            )
            for _ in range(num_needed)
        ]
        if all(stats.verdict.kind == kind for stats in found):
            return
    pytest.fail("\n".join(str(stats) for stats in found))


@pytest.mark.parametrize(
    ("seconds", "kind", "advice"),
    [
        (0.002, "gil-bound", "Set num_processes=1:"),
        (0.0, "training-bound", "tuning it will not help"),
    ],
)
def test_slowed_step_is_told(seconds, kind, advice):
    """A step that needs the GIL is slowed by threads beside it that need it too."""
    dataset = Work(320, preprocess=lambda: think(seconds))
    for _ in range(3):
        stats = stats_of(dataset, step=lambda: think(0.02))
        if stats.verdict.kind == kind and advice in stats.verdict.advice:
            return
    pytest.fail(str(stats))


@pytest.mark.children
@pytest.mark.parametrize("num_processes", [None, 1, 2])
def test_children_do_not_slow_step(num_processes):
    """Workers in child processes are not blamed for the time of a step."""
    dataset = Work(320, preprocess=lambda: think(0.002))
    stats = stats_of(dataset, step=lambda: think(0.02), num_processes=num_processes)
    assert stats.num_processes == (num_processes or 1)
    assert "the loop's thread" not in stats.verdict.sentence, stats
    assert "queued for a core" not in stats.verdict.sentence, stats
    assert "num_processes=1" not in stats.verdict.advice, stats


@pytest.mark.parametrize("seconds", [0.0, 0.0015])
def test_step_on_device_is_not_slowed(seconds):
    """A step that sleeps because it waits for a device is not blamed on worker threads."""
    dataset = Work(320, preprocess=lambda: think(seconds))
    for _ in range(3):
        stats = stats_of(dataset, step=lambda: time.sleep(0.05))
        if stats.verdict.kind == "training-bound":
            return
    pytest.fail(str(stats))


# -- rule by rule ---------------------------------------------------------------------------------

SECONDS = 10.0


def stage(name, width, busy, *, cpu=0.0, queued=0.0, workers="thread", wake_seconds=0.0):
    """Return a stage with so many busy workers, on average."""
    return StageStats(
        name=name,
        width=width,
        elapsed_seconds=SECONDS,
        num_samples=1000,
        busy_seconds=busy * SECONDS,
        cpu_seconds=cpu * SECONDS,
        queued_seconds=queued * SECONDS,
        num_in_flight=0,
        histogram=(),
        workers=workers,
        wake_seconds=wake_seconds,
    )


def verdict(
    *stages,
    kind="thread",
    waited=0.9,
    first_wait=0.0,
    wake_seconds=0.0,
    num_cores=4,
    num_batches=100,
    process_cpu_seconds=0.0,
    step_cpu=0.0,
    step_queued=0.0,
    sleeps=0.0,
    num_processes=0,
    can_fuse=False,
):
    return LoaderStats(
        kind=kind,
        is_running=False,
        elapsed_seconds=SECONDS,
        stages=stages,
        loop=LoopStats(
            num_batches=num_batches,
            waited_seconds=waited * SECONDS,
            first_wait_seconds=first_wait * SECONDS,
            step_seconds=(1 - waited) * SECONDS,
            wake_seconds=wake_seconds,
            step_cpu_seconds=step_cpu * SECONDS,
            step_queued_seconds=step_queued * SECONDS,
            sleeps_per_step=sleeps,
        ),
        window=8,
        num_ready=0,
        num_bytes=0,
        num_bad_samples=0,
        num_retries=0,
        num_cores=num_cores,
        cpu_seconds=process_cpu_seconds,
        num_processes=num_processes,
        can_fuse=can_fuse,
    ).verdict


BUSY = stage("preprocess", 4, 4.0, cpu=0.4)
SURE = "The loader is not the bottleneck: tuning it will not help."
COLLATE = stage("collate", 4, 0.1, cpu=0.1)
IDLE_EXECUTOR = stage("preprocess", 2, 0.5, cpu=0.5, workers="executor")

CASES = {
    "too few batches": (
        verdict(num_batches=1),
        "unknown",
        "unknown: too few batches to tell (1).",
        "Iterate over the loader",
    ),
    "the loop hardly waits": (
        verdict(stage("preprocess", 4, 0.03, cpu=0.03), waited=0.04),
        "training-bound",
        "the loop waited 4 % of its time, its steps took 96.0 ms each.",
        SURE,
    ),
    "a step that waits for the GIL": (
        verdict(BUSY, waited=0.04, step_cpu=0.6, step_queued=0.06, sleeps=40, wake_seconds=0.01),
        "gil-bound",
        "up to 30.0 ms of each step, which takes 96.0 ms, the loop's thread waits for worker "
        "threads to release the GIL: these use 0.4 cores in its process.",
        "Set num_processes=1: the workers in a child process have a GIL of their own.",
    ),
    "a step that waits for the GIL longer than for batches": (
        verdict(BUSY, waited=0.3, step_cpu=0.35, sleeps=40, wake_seconds=0.01),
        "gil-bound",
        "up to 35.0 ms of each step, which takes 70.0 ms",
        "Set num_processes=1",
    ),
    "a step that waits for the GIL less than for batches": (
        verdict(BUSY, waited=0.4, step_cpu=0.35, sleeps=40, wake_seconds=0.01),
        "io-bound",
        "4.0 of 4 preprocess workers busy",
        "Raise num_workers",
    ),
    "a step that waits for a device": (
        verdict(BUSY, waited=0.04, step_cpu=0.1, sleeps=2, wake_seconds=0.01),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step that sleeps often, beside threads that release the GIL": (
        verdict(BUSY, waited=0.04, step_cpu=0.1, sleeps=400, wake_seconds=0.0004),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step that sleeps beside threads that do little": (
        verdict(
            stage("preprocess", 4, 4.0, cpu=0.04),
            waited=0.04,
            step_cpu=0.6,
            sleeps=40,
            wake_seconds=0.01,
        ),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step that sleeps beside workers in child processes": (
        verdict(BUSY, waited=0.04, step_cpu=0.6, sleeps=40, wake_seconds=0.01, num_processes=1),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step that queues for a core": (
        verdict(BUSY, waited=0.04, step_cpu=0.6, step_queued=0.3, wake_seconds=0.01),
        "training-bound",
        "up to 30.0 ms of that queued for a core because worker threads used 0.4 of 4.",
        "Use fewer workers if the steps are faster without",
    ),
    "a step that queues beside workers in child processes": (
        verdict(BUSY, waited=0.04, step_cpu=0.6, step_queued=0.3, num_processes=2),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step with a core of its own": (
        verdict(stage("preprocess", 4, 4.0, cpu=2.0), waited=0.04, step_cpu=0.95),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step beside a busy process pool": (
        verdict(
            stage("preprocess", 4, 4.0, cpu=4.0, workers="executor"),
            waited=0.04,
            step_cpu=0.6,
            process_cpu_seconds=6.1,
            sleeps=40,
            wake_seconds=0.01,
        ),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "a step beside a busy thread pool": (
        verdict(
            stage("preprocess", 4, 0.4, cpu=0.2, workers="executor"),
            waited=0.04,
            step_cpu=0.76,
            process_cpu_seconds=8.0 + 7.6,
            sleeps=40,
            wake_seconds=0.01,
        ),
        "gil-bound",
        "up to 20.0 ms of each step, which takes 96.0 ms",
        "Leave out preprocess_executor",
    ),
    "a step beside worker processes": (
        verdict(kind="multiprocessing", waited=0.04),
        "training-bound",
        "its steps took 96.0 ms each.",
        SURE,
    ),
    "in the loop's own thread": (
        verdict(kind="caller"),
        "unthreaded",
        "the loop waited 90 % of its time",
        "Set num_workers=4",
    ),
    "in processes": (
        verdict(kind="multiprocessing"),
        "process-bound",
        "which are not measured",
        "Without worker_method the workers live in child processes too, and their stages",
    ),
    "reading": (
        verdict(stage("load", 16, 15.9, cpu=0.5), stage("preprocess", 4, 0.8, cpu=0.7), COLLATE),
        "io-bound",
        "15.9 of 16 load workers busy, and they waited 97 % of that, preprocess idle 78 %.",
        "Raise num_io_workers (now 16).",
    ),
    "reading in one piece": (
        verdict(stage("preprocess", 4, 3.8, cpu=0.4), COLLATE),
        "io-bound",
        "3.9 of 4 preprocess workers busy",
        "Raise num_workers (now 4), or split the dataset",
    ),
    "an iterable dataset that reads": (
        verdict(stage("iterate", 4, 3.8, cpu=0.4), COLLATE),
        "io-bound",
        "3.9 of 4 iterate workers busy",
        "Raise num_workers (now 4)",
    ),
    "decoding with cores to spare": (
        verdict(stage("load", 16, 3.0, cpu=0.1), stage("preprocess", 2, 1.9, cpu=1.9)),
        "cpu-bound",
        "1.9 of 2 preprocess workers busy, using 1.9 of 4 cores, load idle 81 %.",
        "Raise num_cpu_workers to 4, the number of cores.",
    ),
    "decoding on all cores": (
        verdict(stage("preprocess", 4, 3.8, cpu=3.7), COLLATE),
        "cpu-bound",
        "using 3.8 of 4 cores",
        "If it decodes images, ImageLoader with its size= is faster.",
    ),
    "transforms that can be fused": (
        verdict(stage("preprocess", 4, 3.8, cpu=3.7), COLLATE, can_fuse=True),
        "cpu-bound",
        "using 3.8 of 4 cores",
        "All cores are taken: do less per sample, or do some of it on the device. fuse=True does",
    ),
    "decoding behind a load stage on all cores": (
        verdict(stage("load", 8, 0.5), stage("preprocess", 4, 3.8, cpu=3.7), COLLATE),
        "cpu-bound",
        "using 3.8 of 4 cores",
        "All cores are taken: do less per sample, or do some of it on the device.",
    ),
    "iterating without all cores": (
        verdict(stage("iterate", 4, 3.8, cpu=1.9, queued=0.2), COLLATE),
        "cpu-bound",
        "using 2.0 of 4 cores",
        "Do less per sample, or do some of it on the device.",
    ),
    "decoding beside another program": (
        verdict(stage("preprocess", 4, 3.8, cpu=1.5, queued=2.2), COLLATE),
        "cpu-bound",
        "using 1.6 of 4 cores",
        "They waited 56 % of their time for a core",
    ),
    "reading and decoding on all cores": (
        verdict(stage("preprocess", 8, 7.8, cpu=3.2, queued=3.4), COLLATE, wake_seconds=0.001),
        "cpu-bound",
        "using 3.3 of 4 cores",
        "All cores are taken",
    ),
    "computing in load": (
        verdict(stage("load", 4, 3.9, cpu=3.8), stage("preprocess", 4, 0.1, cpu=0.1), COLLATE),
        "cpu-bound",
        "3.9 of 4 load workers busy",
        "Move computation from load to preprocess",
    ),
    "holding the GIL": (
        verdict(stage("preprocess", 4, 3.9, cpu=0.9, queued=0.1), COLLATE, wake_seconds=0.006),
        "gil-bound",
        "4.0 of 4 preprocess workers busy, but they use 1.0 cores",
        "Leave out num_processes, or set it to num_workers (4) to have a GIL for each;",
    ),
    "making batches while the samples hold the GIL": (
        verdict(
            stage("preprocess", 4, 1.8, cpu=0.9),
            stage("collate", 4, 2.0, cpu=0.05),
            wake_seconds=0.006,
        ),
        "gil-bound",
        "3.8 of 4 preprocess workers busy, but they use 0.9 cores",
        "Leave out num_processes, or set it to num_workers (4) to have a GIL for each;",
    ),
    "batches that hold the GIL": (
        verdict(
            stage("preprocess", 4, 0.3, cpu=0.05),
            stage("collate", 4, 3.4, cpu=0.9),
            wake_seconds=0.006,
        ),
        "collate-bound",
        "3.4 of 4 workers collate batches",
        "do less in collate_fn",
    ),
    "as many cores, but woken at once": (
        verdict(stage("preprocess", 4, 3.9, cpu=0.9, queued=0.1), COLLATE, wake_seconds=0.0001),
        "io-bound",
        "they waited 72 % of that",
        "Raise num_workers",
    ),
    "too many threads": (
        verdict(stage("preprocess", 32, 31.0, cpu=3.8, queued=27.2), COLLATE),
        "oversubscribed",
        "on 4 cores, 31.1 of them with a core or waiting for one.",
        "Set num_workers=4:",
    ),
    "too many threads, though they read too": (
        verdict(stage("preprocess", 32, 31.0, cpu=3.8, queued=20.0), COLLATE),
        "oversubscribed",
        "on 4 cores, 23.9 of them with a core or waiting for one.",
        "Set num_workers=12:",
    ),
    "too many threads, which wait for each other": (
        verdict(stage("preprocess", 32, 31.0, cpu=3.8, queued=20.0), COLLATE, wake_seconds=0.02),
        "oversubscribed",
        "on 4 cores, 23.9 of them with a core or waiting for one.",
        "Set num_workers=4:",
    ),
    "as many threads as reading and decoding have use for": (
        verdict(stage("preprocess", 16, 15.5, cpu=3.6, queued=3.0), COLLATE),
        "io-bound",
        "15.6 of 16 preprocess workers busy",
        "Raise num_workers (now 16)",
    ),
    "the thread of an event loop": (
        verdict(stage("load", 64, 40.0, cpu=0.9, workers="async"), stage("preprocess", 4, 0.5)),
        "cpu-bound",
        "the thread of the event loop computes 90 % of the time",
        "Move computation from load to preprocess",
    ),
    "holding the GIL in load": (
        verdict(stage("load", 8, 7.9, cpu=1.0), COLLATE, wake_seconds=0.006),
        "gil-bound",
        "7.9 of 8 load workers busy",
        "Leave out num_processes",
    ),
    "holding the GIL in an iterable dataset": (
        verdict(stage("iterate", 4, 3.8, cpu=1.0), COLLATE, wake_seconds=0.006),
        "gil-bound",
        "3.9 of 4 iterate workers busy",
        "Leave out num_processes",
    ),
    "holding the GIL of a child": (
        verdict(
            stage("preprocess", 4, 3.9, cpu=0.9, queued=0.1, wake_seconds=0.006),
            COLLATE,
            num_processes=1,
        ),
        "gil-bound",
        "4.0 of 4 preprocess workers busy, but they use 1.0 cores: they wait",
        "Set num_processes=4, so that each worker has a GIL of its own;",
    ),
    "holding the GILs of two children": (
        verdict(
            stage("preprocess", 4, 3.9, cpu=1.9, queued=0.1, wake_seconds=0.006),
            COLLATE,
            num_processes=2,
        ),
        "gil-bound",
        "but they use 2.0 cores in 2 child processes: they wait for each other",
        "Set num_processes=4",
    ),
    "holding the GIL in the load stage of each child": (
        verdict(
            stage("load", 8, 7.9, cpu=1.9, wake_seconds=0.006),
            stage("collate", 2, 0.1, cpu=0.1),
            num_processes=2,
        ),
        "gil-bound",
        "7.9 of 8 load workers busy",
        "Move computation from load to preprocess;",
    ),
    "reading in a child, while the loop is woken slowly": (
        verdict(
            stage("preprocess", 4, 3.9, cpu=0.9, queued=0.1, wake_seconds=0.0001),
            COLLATE,
            num_processes=1,
            wake_seconds=0.01,
        ),
        "io-bound",
        "they waited 72 % of that",
        "Raise num_workers",
    ),
    "holding the GIL beside an executor": (
        verdict(stage("load", 8, 7.9, cpu=1.0), IDLE_EXECUTOR, COLLATE, wake_seconds=0.006),
        "gil-bound",
        "7.9 of 8 load workers busy",
        "Leave the computation to the executor, which should have processes;",
    ),
    "an idle executor of an unknown size": (
        verdict(stage("load", 8, 7.9, cpu=0.1), stage("preprocess", None, 0.2, workers="executor")),
        "io-bound",
        "7.9 of 8 load workers busy",
        "Raise num_io_workers",
    ),
    "decoding beside a model": (
        verdict(
            stage("preprocess", 4, 3.8, cpu=1.5, queued=2.2), COLLATE, process_cpu_seconds=36.0
        ),
        "cpu-bound",
        "using 1.6 of 4 cores",
        "the rest of this process, with the training loop, uses 2.0",
    ),
    "batches that were loaded beside the first": (
        verdict(waited=0.99, first_wait=0.98, num_batches=4),
        "unknown",
        "98 % of the time went into the first of 4 batches",
        "more batches than are prefetched (8)",
    ),
    "the loop at the threshold": (
        verdict(stage("preprocess", 4, 4.0, cpu=4.0), COLLATE, waited=0.06),
        "cpu-bound",
        "4.0 of 4 preprocess workers busy",
        "All cores are taken",
    ),
    "fewer than too many threads": (
        verdict(stage("preprocess", 8, 5.9, cpu=3.6, queued=1.9), COLLATE),
        "cpu-bound",
        "6.0 of 8 preprocess workers busy",
        "All cores are taken",
    ),
    "batches that wait for a core": (
        verdict(stage("preprocess", 4, 0.2), stage("collate", 4, 3.6, cpu=1.0, queued=2.4)),
        "collate-bound",
        "3.6 of 4 workers collate batches",
        "default collate",
    ),
    "too many threads, without queued seconds": (
        verdict(stage("preprocess", 32, 31.0, cpu=3.8), COLLATE),
        "oversubscribed",
        "31.1 of 32 preprocess workers busy",
        "Set num_workers=4",
    ),
    "batches": (
        verdict(stage("preprocess", 4, 0.5, cpu=0.5), stage("collate", 4, 3.3, cpu=3.3)),
        "collate-bound",
        "3.3 of 4 workers collate batches, 33.0 ms each",
        "default collate",
    ),
    "batches behind an executor": (
        verdict(IDLE_EXECUTOR, stage("collate", 2, 1.9, cpu=1.9)),
        "collate-bound",
        "1.9 of 2 workers collate batches",
        "default collate",
    ),
    "an executor": (
        verdict(stage("preprocess", 2, 1.9, cpu=1.8, workers="executor"), stage("collate", 2, 0.1)),
        "cpu-bound",
        "1.9 of 2 preprocess workers busy",
        "Raise the number of the executor's workers to 4, the number of cores.",
    ),
    "an executor with a worker for each core": (
        verdict(
            stage("load", 2, 0.1),
            stage("preprocess", 4, 3.9, cpu=3.8, workers="executor"),
            stage("collate", 2, 0.1),
        ),
        "cpu-bound",
        "3.9 of 4 preprocess workers busy",
        "All cores are taken: do less per sample",
    ),
    "an executor of an unknown size": (
        verdict(stage("preprocess", None, 3.0, cpu=2.9, workers="executor")),
        "cpu-bound",
        "3.0 preprocess workers busy",
        "Raise the number of the executor's workers, up to",
    ),
    "an executor of an unknown size that waits": (
        verdict(stage("preprocess", None, 3.0, cpu=0.3, workers="executor")),
        "io-bound",
        "3.0 preprocess workers busy",
        "Raise the number of the executor's workers, or split",
    ),
    "an executor of an unknown size, one of whose workers is busy": (
        verdict(stage("preprocess", None, 0.9, cpu=0.9, workers="executor")),
        "cpu-bound",
        "0.9 preprocess workers busy",
        "Raise the number of the executor's workers",
    ),
    "an executor of an unknown size that is not busy": (
        verdict(stage("preprocess", None, 0.7, cpu=0.6, workers="executor")),
        "window-bound",
        "but only 0.7 preprocess workers busy: few batches may be in flight (8), or sending",
        "Raise buffer_size.",
    ),
    "batches that are made in no time": (
        verdict(stage("preprocess", 2, 0.2), stage("collate", 2, 0.2), num_batches=10_000),
        "overhead-bound",
        "the loop waited 90 % of its time for batches that take 0.4 ms to make",
        "Make larger batches, or set num_workers=0.",
    ),
    "batches that take their time": (
        verdict(stage("preprocess", 2, 0.3), stage("collate", 2, 0.3), num_batches=10_000),
        "window-bound",
        "only 0.6 of 2 preprocess workers busy",
        "Raise prefetch_factor",
    ),
    "the copy to the device": (
        verdict(stage("preprocess", 4, 1.0, cpu=1.0), COLLATE, stage("transfer", 1, 0.9)),
        "transfer-bound",
        "copying a batch to the device takes 9.0 ms, preprocess idle 72 %.",
        "Copy less",
    ),
    "no stage is busy": (
        verdict(stage("load", 16, 2.0), stage("preprocess", 4, 0.5, cpu=0.5), COLLATE),
        "window-bound",
        "the loop waited 90 % of its time, but only 0.6 of 4 preprocess workers busy",
        "Raise prefetch_factor",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_makes_verdict(name):
    """A verdict has a sentence with the figures and one piece of advice."""
    found, kind, words, advice = CASES[name]
    assert found.kind == kind
    assert found.sentence.startswith(f"{kind}: ")
    assert words in found.sentence
    assert advice in found.advice
    assert str(found) == f"{found.sentence} {found.advice}"
