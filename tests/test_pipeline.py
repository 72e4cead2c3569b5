"""The engine by itself: plain functions, no tensors."""

from __future__ import annotations

import threading

import pytest

from spdl_torch._engine import NotInTime, PendingBatch, Pipeline, ThreadStage
from spdl_torch._engine._meter import ConsumerMeter
from spdl_torch._engine._signal import Signal
from spdl_torch._engine._window import Window

from .conftest import own_thread_names
from .datasets import PATIENCE_SECONDS


def fused(operation, collate=list, width=2):
    return ThreadStage(
        "preprocess", range(width), lambda worker_id, place: (operation, collate), is_first=True
    )


def pipeline_of(*stages, capacity=4, in_order=True):
    pipeline = Pipeline(stages[0], stages, capacity=capacity, in_order=in_order, batched=True)
    pipeline.start()
    return pipeline


def batches_of(pipeline, source):
    pipeline.begin(iter(source))
    found = []
    while (record := pipeline.next(None)) is not None:
        found.append(record.take())
    return found


def test_batches_come_in_the_order_of_the_source():
    pipeline = pipeline_of(fused(lambda index: -index))
    assert batches_of(pipeline, [[1, 2], [3], [4, 5, 6]]) == [[-1, -2], [-3], [-4, -5, -6]]
    pipeline.close()


def test_the_same_threads_serve_one_epoch_after_the_other():
    pipeline = pipeline_of(fused(lambda index: threading.get_ident()))
    idents = {i for _ in range(3) for batch in batches_of(pipeline, [[1] * 5] * 9) for i in batch}
    assert idents <= {thread.ident for thread in pipeline.threads}
    pipeline.close()


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_all_samples_of_all_batches_meet_at_a_barrier_of_all_workers(width, capacity):
    """Whoever is called to a job takes single samples, so no sample waits behind another."""

    def meet(index):
        barrier.wait(PATIENCE_SECONDS)
        return index

    barrier = threading.Barrier(width)
    pipeline = pipeline_of(fused(meet, width=width), capacity=capacity)
    source = [list(range(width))] * 10
    # More than one epoch: the second begins with an estimate of how cheap the samples are.
    for _ in range(3):
        assert batches_of(pipeline, source) == source
    pipeline.close()


def test_a_worker_that_takes_long_over_cheap_looking_work_does_not_keep_it_from_the_others():
    def sample(index):
        if index == "slow":
            assert others_are_done.wait(PATIENCE_SECONDS)
        if index == "last":
            others_are_done.set()
        return index

    others_are_done = threading.Event()
    pipeline = pipeline_of(fused(sample), capacity=8)
    cheap = [[n] * 50 for n in range(200)]
    assert batches_of(pipeline, cheap) == cheap
    # By now several batches are handed to one worker at a time. The first of these blocks it
    # until another worker has come to the last.
    source = [["slow", 1], [2, 3], [4, 5], [6, "last"]]
    assert batches_of(pipeline, source) == source
    pipeline.close()


def test_only_the_batch_of_a_failed_sample_fails():
    def sample(index):
        if index == 3:
            raise LookupError(index)
        return index

    pipeline = pipeline_of(fused(sample))
    pipeline.begin(iter([[1, 2], [3, 4], [5, 6]]))
    assert pipeline.next(None).take() == [1, 2]
    failed = pipeline.next(None)
    assert pipeline.next(None).take() == [5, 6]
    with pytest.raises(LookupError):
        failed.take()
    pipeline.close()


def test_not_in_time_can_be_asked_again():
    gate = threading.Event()
    pipeline = pipeline_of(fused(lambda index: gate.wait(PATIENCE_SECONDS)))
    pipeline.begin(iter([[1], [2]]))
    for _ in range(3):
        with pytest.raises(NotInTime):
            pipeline.next(0.01)
    gate.set()
    assert pipeline.next(None).take() == [True]
    pipeline.close()


def test_a_worker_that_does_not_come_back_is_left_behind_with_a_warning():
    gate, is_waiting = threading.Event(), threading.Event()

    def wait(index):
        is_waiting.set()
        gate.wait(PATIENCE_SECONDS)

    pipeline = pipeline_of(fused(wait, width=1))
    pipeline.begin(iter([[1], [2]]))
    with pytest.raises(NotInTime):
        pipeline.next(0.01)
    assert is_waiting.wait(PATIENCE_SECONDS)
    with pytest.warns(RuntimeWarning, match="still inside the dataset's code"):
        pipeline.lifetime.close(grace_seconds=0.0)
    gate.set()
    for thread in pipeline.threads:
        thread.join(PATIENCE_SECONDS)
    assert own_thread_names() == []


class Interrupted(ThreadStage):
    """Ctrl-C is pressed when the first batches have been handed out."""

    was_interrupted = False

    def open(self, records):
        num_opened = super().open(records)
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return num_opened


def test_workers_can_go_on_with_batches_that_an_interrupted_loop_has_given_up():
    """They are at them already, and must not take their own errors for those of the samples."""
    gate = threading.Event()
    failed = []

    def load(index):
        assert gate.wait(PATIENCE_SECONDS)
        return index

    def remedy(record, slot, stage, error):
        failed.append(error)
        return error

    behind = fused(lambda index: index)
    first = Interrupted(
        "load",
        range(2),
        lambda worker_id, place: (load, None),
        is_first=True,
        next_stage=behind,
        on_sample_error=remedy,
    )
    pipeline = pipeline_of(first, behind, capacity=2)
    pipeline.begin(iter([[1, 2], [3, 4], [5, 6], [7, 8]]))
    with pytest.raises(KeyboardInterrupt):
        pipeline.next(None)
    gate.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted"):
            pipeline.next(None).take()
    assert [pipeline.next(None).take() for _ in range(2)] == [[5, 6], [7, 8]]
    pipeline.close()
    assert failed == []


class Closing(ThreadStage):
    """Another thread closes the pipeline just before an epoch is broken off."""

    def close_before_it_is_abandoned(self, pipeline):
        [group] = self.workers
        abandon = group.abandon

        def close_and_abandon():
            closer = threading.Thread(target=pipeline.lifetime.close, kwargs={"grace_seconds": 0.0})
            closer.start()
            closer.join(PATIENCE_SECONDS)
            abandon()

        group.abandon = close_and_abandon


@pytest.mark.filterwarnings("ignore:.* still inside")
def test_an_epoch_that_begins_while_the_pipeline_is_closed_leaves_no_worker():
    stage = Closing("preprocess", range(2), lambda *_: (abs, list), is_first=True)
    pipeline = pipeline_of(stage)
    pipeline.begin(iter([[1]]))
    stage.close_before_it_is_abandoned(pipeline)
    pipeline.begin(iter([[1]]))
    for thread in pipeline.threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_started", [0, 1])
def test_closing_while_workers_are_being_set_up_ends_them(num_started):
    def set_up(worker_id, place):
        if worker_id == num_started:
            in_set_up.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
        return (lambda index: index), list

    in_set_up, may_go_on = threading.Event(), threading.Event()
    stage = ThreadStage("preprocess", range(2), set_up, is_first=True)
    pipeline = Pipeline(stage, [stage], capacity=4, in_order=True, batched=True)
    pipeline.begin(iter([[1]]))
    outcome = []

    def consume():
        try:
            pipeline.start()
            pipeline.next(None)
        except RuntimeError as error:
            outcome.append(error)

    consumer, closer = threading.Thread(target=consume), threading.Thread(target=pipeline.close)
    consumer.start()
    assert in_set_up.wait(PATIENCE_SECONDS)
    closer.start()
    may_go_on.set()
    for thread in (consumer, closer):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert len(outcome) == 1
    assert own_thread_names() == []


def test_two_stages_hand_over_every_sample_once():
    loaded, preprocessed = [], []
    preprocess = ThreadStage(
        "preprocess",
        range(3),
        lambda worker_id, place: (lambda raw: preprocessed.append(raw) or -raw, list),
        is_first=False,
    )
    load = ThreadStage(
        "load",
        range(3, 8),
        lambda worker_id, place: (lambda index: loaded.append(index) or index, None),
        is_first=True,
        next_stage=preprocess,
        collate_stage=preprocess,
    )
    pipeline = pipeline_of(load, preprocess)
    source = [list(range(n, n + 11)) for n in range(0, 1100, 11)]
    assert batches_of(pipeline, source) == [[-n for n in indices] for indices in source]
    assert sorted(loaded) == sorted(preprocessed) == list(range(1100))
    pipeline.close()


# -- how many workers load a batch -----------------------------------------------------------------


def staged(load, preprocess, num_load_workers=4):
    preprocess_stage = ThreadStage(
        "preprocess", range(2), lambda worker_id, place: (preprocess, list), is_first=False
    )
    load_stage = ThreadStage(
        "load",
        range(2, 2 + num_load_workers),
        lambda worker_id, place: (load, None),
        is_first=True,
        next_stage=preprocess_stage,
        collate_stage=preprocess_stage,
    )
    return load_stage, preprocess_stage


CHEAP = [[0] * 64] * 8
"""An epoch of these tells the engine that samples are cheap, and one worker enough for a batch."""


def test_all_workers_are_called_to_load_what_the_next_stage_has_to_wait_for():
    barrier = threading.Barrier(4)

    def load(index):
        if index > 0:
            barrier.wait(PATIENCE_SECONDS)
        return index

    pipeline = pipeline_of(*staged(load, lambda index: index))
    batches_of(pipeline, CHEAP)
    pipeline.begin(iter([[1, 2, 3, 4]]))
    # Sooner than the consumer calls everybody, waited for or not.
    assert pipeline.next(0.9).take() == [1, 2, 3, 4]
    pipeline.close()


def test_samples_that_wait_for_each_other_are_loaded_though_the_next_stage_is_busy():
    second_is_loaded = threading.Event()

    def load(index):
        if index == 3:
            assert second_is_loaded.wait(PATIENCE_SECONDS)
        if index == 4:
            second_is_loaded.set()
        return index

    def preprocess(index):
        if index in {1, 2}:  # Both workers of the next stage.
            assert second_is_loaded.wait(PATIENCE_SECONDS)
        return index

    pipeline = pipeline_of(*staged(load, preprocess))
    batches_of(pipeline, CHEAP)
    assert batches_of(pipeline, [[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    pipeline.close()


# -- which finished batch is delivered -------------------------------------------------------------


class Watched:
    """A first stage without threads: its workers go on whenever the consumer looks in vain.

    Args:
        finished_by: which batches are finished, in this order, just after the consumer has seen
            for the nth time that a batch is not: {(number, n): numbers}.

    """

    def __init__(self, finished_by):
        self.finished_by = dict(finished_by)
        self.records = {}
        self.num_looks = {}

    def open(self, records):
        for record in records:
            record.__class__ = WatchedRecord
            record.drawn = self
            self.records[record.number] = record
        return len(records)

    def num_samples_per_task(self):
        return 1

    def go_on_after_look(self, number):
        self.num_looks[number] = num_looks = self.num_looks.get(number, 0) + 1
        for finished in self.finished_by.pop((number, num_looks), ()):
            self.records[finished].finish(finished)
            self.records[finished].signal.set()


class WatchedRecord(PendingBatch):
    __slots__ = ()

    @property
    def is_finished(self):
        is_finished = PendingBatch.is_finished.__get__(self)
        if not is_finished:
            self.drawn.go_on_after_look(self.number)
        return is_finished

    @is_finished.setter
    def is_finished(self, is_finished):
        PendingBatch.is_finished.__set__(self, is_finished)


@pytest.mark.parametrize(
    "finished_by",
    [
        pytest.param({(0, 1): [0, 1, 2]}, id="while the consumer looks"),
        # It has found batch 2, of another worker, when it looks whether one before it is finished.
        pytest.param({(1, 1): [2], (0, 2): [0, 1]}, id="while it looks once more"),
    ],
)
def test_without_order_the_batches_of_one_worker_are_not_swapped(finished_by):
    """Batches 0 and 1 are of one worker, which finishes them one after the other."""
    stage = Watched(finished_by)
    window = Window(
        iter([[0], [1], [2]]),
        stage,
        Signal(),
        ConsumerMeter(),
        capacity=3,
        in_order=False,
        batched=True,
    )
    delivered = []
    while (record := window.next(PATIENCE_SECONDS)) is not None:
        delivered.append(record.take())
    assert stage.finished_by == {}
    assert sorted(delivered) == [0, 1, 2]
    assert delivered.index(0) < delivered.index(1)


class ExhaustedRecord(PendingBatch):
    """Turns out to be exhausted just after the consumer has seen that it is not."""

    __slots__ = ()

    @property
    def is_exhausted(self):
        is_exhausted = PendingBatch.is_exhausted.__get__(self)
        if not is_exhausted and not self.is_finished:
            PendingBatch.is_exhausted.__set__(self, True)
            self.finish()
            self.signal.set()
        return is_exhausted

    @is_exhausted.setter
    def is_exhausted(self, is_exhausted):
        PendingBatch.is_exhausted.__set__(self, is_exhausted)


class Exhausted:
    """A first stage that has nothing to make batches of."""

    def open(self, records):
        for record in records:
            record.__class__ = ExhaustedRecord
        return len(records)

    def num_samples_per_task(self):
        return 1


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_there_is_nothing_for_is_not_delivered(in_order):
    window = Window(
        iter([[0], [1]]),
        Exhausted(),
        Signal(),
        ConsumerMeter(),
        capacity=2,
        in_order=in_order,
        batched=True,
    )
    assert window.next(PATIENCE_SECONDS) is None
