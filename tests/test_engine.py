"""The engine by itself: plain functions, no tensors."""

from __future__ import annotations

import threading

import pytest

from spdl_torch._engine import NotInTime, PendingBatch, Pipeline, ThreadStage
from spdl_torch._engine._batch import Epoch
from spdl_torch._engine._clock import ConsumerClock
from spdl_torch._engine._threads import TaskQueue
from spdl_torch._engine._window import Window

from .conftest import own_thread_names
from .datasets import PATIENCE_SECONDS


def fused(operation, collate=list, width=2):
    return ThreadStage(
        "preprocess", range(width), lambda worker_id, cursor: (operation, collate), is_first=True
    )


def pipeline_of(*stages, capacity=4, in_order=True):
    pipeline = Pipeline(stages[0], stages, capacity=capacity, in_order=in_order, batched=True)
    pipeline.start()
    return pipeline


def batches_of(pipeline, source):
    window = pipeline.begin(iter(source))
    found = []
    while (batch := window.next(None)) is not None:
        found.append(batch.result())
    return found


def test_batches_keep_their_order():
    """Batches come in the order of the draws."""
    pipeline = pipeline_of(fused(lambda index: -index))
    assert batches_of(pipeline, [[1, 2], [3], [4, 5, 6]]) == [[-1, -2], [-3], [-4, -5, -6]]
    pipeline.lifetime.close()


def test_threads_serve_several_epochs():
    """The same threads serve one epoch after the other."""
    pipeline = pipeline_of(fused(lambda index: threading.get_ident()))
    idents = {i for _ in range(3) for batch in batches_of(pipeline, [[1] * 5] * 9) for i in batch}
    assert idents <= {thread.ident for thread in pipeline.threads}
    pipeline.lifetime.close()


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_samples_meet_at_a_barrier(width, capacity):
    """Workers claim single samples, so no sample waits behind another."""

    def meet(index):
        barrier.wait(PATIENCE_SECONDS)
        return index

    barrier = threading.Barrier(width)
    pipeline = pipeline_of(fused(meet, width=width), capacity=capacity)
    source = [list(range(width))] * 10
    # More than one epoch: the second begins with an estimate of how cheap the samples are.
    for _ in range(3):
        assert batches_of(pipeline, source) == source
    pipeline.lifetime.close()


def test_idle_workers_take_over():
    """A worker stuck on work that seemed cheap does not keep the rest of it from the others."""

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
    pipeline.lifetime.close()


def test_error_stays_in_its_batch():
    """Only the batch of a failed sample fails."""

    def sample(index):
        if index == 3:
            raise LookupError(index)
        return index

    pipeline = pipeline_of(fused(sample))
    window = pipeline.begin(iter([[1, 2], [3, 4], [5, 6]]))
    assert window.next(None).result() == [1, 2]
    failed = window.next(None)
    assert window.next(None).result() == [5, 6]
    with pytest.raises(LookupError):
        failed.result()
    pipeline.lifetime.close()


def test_timeout_can_be_repeated():
    """After a timeout the same batch can be asked for again."""
    gate = threading.Event()
    pipeline = pipeline_of(fused(lambda index: gate.wait(PATIENCE_SECONDS)))
    window = pipeline.begin(iter([[1], [2]]))
    for _ in range(3):
        with pytest.raises(NotInTime):
            window.next(0.01)
    gate.set()
    assert window.next(None).result() == [True]
    pipeline.lifetime.close()


def test_stuck_worker_warns_on_close(monkeypatch):
    """Closing warns about a worker that stays inside the user's code for longer than the grace."""
    monkeypatch.setattr("spdl_torch._engine._threads._GRACE_SECONDS", 0.01)
    gate, is_waiting = threading.Event(), threading.Event()

    def wait(index):
        is_waiting.set()
        gate.wait(PATIENCE_SECONDS)

    pipeline = pipeline_of(fused(wait, width=1))
    window = pipeline.begin(iter([[1], [2]]))
    with pytest.raises(NotInTime):
        window.next(0.01)
    assert is_waiting.wait(PATIENCE_SECONDS)
    with pytest.warns(RuntimeWarning, match="still inside the dataset's code") as told:
        pipeline.lifetime.close()
    assert told[0].filename == __file__
    gate.set()
    for thread in pipeline.threads:
        thread.join(PATIENCE_SECONDS)
    assert own_thread_names() == []


class Closing(ThreadStage):
    """Another thread closes the pipeline just before an epoch is broken off."""

    def close_before_it_is_abandoned(self, pipeline):
        [group] = self.groups
        abandon = group.abandon

        def close_and_abandon():
            closer = threading.Thread(target=pipeline.lifetime.close_quickly)
            closer.start()
            closer.join(PATIENCE_SECONDS)
            abandon()

        group.abandon = close_and_abandon


@pytest.mark.filterwarnings("ignore:.* still inside")
def test_close_during_begin():
    """An epoch that begins while another thread closes the pipeline leaves no worker."""
    stage = Closing("preprocess", range(2), lambda *_: (abs, list), is_first=True)
    pipeline = pipeline_of(stage)
    pipeline.begin(iter([[1]]))
    stage.close_before_it_is_abandoned(pipeline)
    pipeline.begin(iter([[1]]))
    for thread in pipeline.threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_started", [0, 1])
def test_close_during_set_up(num_started):
    """Closing while workers are being set up ends them."""

    def set_up(worker_id, cursor):
        if worker_id == num_started:
            in_set_up.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
        return (lambda index: index), list

    in_set_up, may_go_on = threading.Event(), threading.Event()
    stage = ThreadStage("preprocess", range(2), set_up, is_first=True)
    pipeline = Pipeline(stage, [stage], capacity=4, in_order=True, batched=True)
    window = pipeline.begin(iter([[1]]))
    outcome = []

    def consume():
        try:
            pipeline.start()
            window.next(None)
        except RuntimeError as error:
            outcome.append(error)

    consumer = threading.Thread(target=consume)
    closer = threading.Thread(target=pipeline.lifetime.close)
    consumer.start()
    assert in_set_up.wait(PATIENCE_SECONDS)
    closer.start()
    may_go_on.set()
    for thread in (consumer, closer):
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert len(outcome) == 1
    assert own_thread_names() == []


def test_stages_pass_samples_once():
    """Two stages pass on every sample exactly once."""
    loaded, preprocessed = [], []
    preprocess = ThreadStage(
        "preprocess",
        range(3),
        lambda worker_id, cursor: (lambda raw: preprocessed.append(raw) or -raw, list),
        is_first=False,
    )
    load = ThreadStage(
        "load",
        range(3, 8),
        lambda worker_id, cursor: (lambda index: loaded.append(index) or index, None),
        is_first=True,
        next_stage=preprocess,
        collate_stage=preprocess,
    )
    pipeline = pipeline_of(load, preprocess)
    source = [list(range(n, n + 11)) for n in range(0, 1100, 11)]
    assert batches_of(pipeline, source) == [[-n for n in indices] for indices in source]
    assert sorted(loaded) == sorted(preprocessed) == list(range(1100))
    pipeline.lifetime.close()


# -- how many workers load a batch -----------------------------------------------------------------


def staged(load, preprocess, num_load_workers=4, num_workers=2):
    preprocess_stage = ThreadStage(
        "preprocess",
        range(num_workers),
        lambda worker_id, cursor: (preprocess, list),
        is_first=False,
    )
    load_stage = ThreadStage(
        "load",
        range(num_workers, num_workers + num_load_workers),
        lambda worker_id, cursor: (load, None),
        is_first=True,
        next_stage=preprocess_stage,
        collate_stage=preprocess_stage,
    )
    return load_stage, preprocess_stage


CHEAP = [[0] * 64] * 8
"""An epoch of these tells the engine that samples are cheap, and one worker enough for a batch."""


def test_starved_stage_wakes_loaders():
    """All workers load what an idle next stage waits for."""
    barrier = threading.Barrier(4)

    def load(index):
        if index > 0:
            barrier.wait(PATIENCE_SECONDS)
        return index

    pipeline = pipeline_of(*staged(load, lambda index: index))
    batches_of(pipeline, CHEAP)
    window = pipeline.begin(iter([[1, 2, 3, 4]]))
    # Sooner than the consumer wakes all idle workers in any case.
    assert window.next(0.4).result() == [1, 2, 3, 4]
    pipeline.lifetime.close()


def test_dependent_samples_do_not_deadlock():
    """Samples that wait for each other are loaded although the next stage is busy."""
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
    pipeline.lifetime.close()


def test_oldest_batch_goes_first():
    """A late sample of the oldest batch is preprocessed before all samples of later batches."""
    second_batch_is_begun, late_one_has_arrived = threading.Event(), threading.Event()
    order = []

    def load(index):
        if index == 0:
            assert second_batch_is_begun.wait(PATIENCE_SECONDS)
        if index == 5:  # Leaves 6 to the worker that has loaded 0, after it has passed that on.
            assert late_one_has_arrived.wait(PATIENCE_SECONDS)
        if index == 6:
            late_one_has_arrived.set()
        return index

    def preprocess(index):
        if index == 2:
            second_batch_is_begun.set()
            assert late_one_has_arrived.wait(PATIENCE_SECONDS)
        order.append(index)
        return index

    pipeline = pipeline_of(*staged(load, preprocess, num_load_workers=2, num_workers=1))
    source = [[0], [2, 3], [4, 5], [6, 7]]
    assert batches_of(pipeline, source) == source
    assert order[:3] == [2, 0, 3]
    pipeline.lifetime.close()


# -- which finished batch is delivered -------------------------------------------------------------


class Watched:
    """A first stage without threads: its workers go on when the consumer finds nothing finished.

    Args:
        finished_by: which batches are finished, in this order, just after the consumer has seen
            for the nth time that a batch is not: {(number, n): numbers}.

    """

    def __init__(self, finished_by):
        self.finished_by = dict(finished_by)
        self.batches = {}
        self.num_looks = {}

    def open(self, batch):
        batch.__class__ = WatchedBatch
        batch.drawn = self
        self.batches[batch.number] = batch
        return True

    def wake(self, **_):
        pass

    def wake_idle(self, **_):
        pass

    def go_on_after_look(self, number):
        self.num_looks[number] = num_looks = self.num_looks.get(number, 0) + 1
        for finished in self.finished_by.pop((number, num_looks), ()):
            self.batches[finished].finish(finished)
            self.batches[finished].epoch.wake_consumer()


class WatchedBatch(PendingBatch):
    @property
    def is_finished(self):
        is_finished = self.__dict__["is_finished"]
        if not is_finished:
            self.drawn.go_on_after_look(self.number)
        return is_finished

    @is_finished.setter
    def is_finished(self, is_finished):
        self.__dict__["is_finished"] = is_finished


@pytest.mark.parametrize(
    "finished_by",
    [
        pytest.param({(0, 2): [0, 1, 2]}, id="while the consumer looks"),
        # It has found batch 2, of another worker, when it looks whether one before it is finished.
        pytest.param({(1, 1): [2], (0, 3): [0, 1]}, id="while it looks once more"),
    ],
)
def test_unordered_keeps_worker_order(finished_by):
    """Batches 0 and 1 are of one worker, which finishes them one after the other."""
    stage = Watched(finished_by)
    window = Window(
        iter([[0], [1], [2]]),
        stage,
        Epoch(),
        ConsumerClock(),
        last_stage=None,
        capacity=3,
        in_order=False,
        batched=True,
        locate=None,
    )
    delivered = []
    while (batch := window.next(PATIENCE_SECONDS)) is not None:
        delivered.append(batch.result())
    assert stage.finished_by == {}
    assert sorted(delivered) == [0, 1, 2]
    assert delivered.index(0) < delivered.index(1)


class ExhaustedBatch(PendingBatch):
    """Is exhausted and finished just after the consumer has seen that it is not finished."""

    @property
    def is_finished(self):
        is_finished = self.__dict__["is_finished"]
        if not is_finished:
            self.is_exhausted = True
            self.finish()
            self.epoch.wake_consumer()
        return is_finished

    @is_finished.setter
    def is_finished(self, is_finished):
        self.__dict__["is_finished"] = is_finished


class Exhausted:
    """A first stage that has nothing to make batches of."""

    def open(self, batch):
        batch.__class__ = ExhaustedBatch
        return True

    def wake(self, **_):
        pass

    def wake_idle(self, **_):
        pass


@pytest.mark.parametrize("in_order", [True, False])
def test_exhausted_batch_is_skipped(in_order):
    """A batch that a worker has nothing left for is not delivered."""
    window = Window(
        iter([[0], [1]]),
        Exhausted(),
        Epoch(),
        ConsumerClock(),
        last_stage=None,
        capacity=2,
        in_order=in_order,
        batched=True,
        locate=None,
    )
    assert window.next(PATIENCE_SECONDS) is None


# -- wake-ups --------------------------------------------------------------------------------------


def test_queue_loses_no_wakeup():
    """Every task is taken although workers go to sleep between any two of them."""
    queue, taken = TaskQueue(), []

    def serve():
        wakeup = threading.Lock()
        wakeup.acquire()
        while (task := queue.get(wakeup)) is not None:
            taken.append(task)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for task in range(5000):
        queue.put(task)
        if task % 7 == 0:
            while len(taken) <= task:  # All workers go to sleep.
                threading.Event().wait(0)
    while len(taken) < 5000:
        threading.Event().wait(0)
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert sorted(taken) == list(range(5000))


def test_lowest_slot_error_wins():
    """The error of a batch does not depend on which worker was quicker."""
    batch = PendingBatch(Epoch(), 0, [1, 2, 3], [1, 2, 3])
    for slot in (2, 0, 1):
        batch.fail(slot, KeyError(slot))
    with pytest.raises(KeyError, match="0"):
        batch.result()


def test_slot_settles_the_batch_once():
    """Exactly one of many concurrent callers settles the last slot."""
    for _ in range(50):
        batch = PendingBatch(Epoch(), 0, None, list(range(16)))
        start, last = threading.Barrier(16), []

        def settle(batch=batch, start=start, last=last):
            start.wait()
            if batch.settle(1):
                last.append(1)

        threads = [threading.Thread(target=settle) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert last == [1]
