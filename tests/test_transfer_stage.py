"""The stage behind collate: which batches it takes on, and when."""

from __future__ import annotations

import threading

import pytest

from spdl_torch._engine import PendingBatch, Pipeline, ThreadStage, TransferStage, WorkerCursor
from spdl_torch._engine._batch import Epoch
from spdl_torch._engine._transfer_stage import Taken

from .datasets import PATIENCE_SECONDS


class ByHand:
    """A transfer stage, called by hand, that remembers what it takes on."""

    def __init__(self, *, in_order, num_ahead=2):
        self.stage = TransferStage("transfer", lambda: None, num_ahead=num_ahead, in_order=in_order)
        self.epoch = Epoch()
        self.batches = []

    def operation(self, batch):
        self.batches.append(batch)
        return batch

    def arrive(self, number):
        batch = PendingBatch(self.epoch, number, [number], [number])
        batch.output = number
        self.stage.work(batch, self.operation)
        return batch

    def advance(self, num_taken):
        self.stage.work(Taken(self.epoch, num_taken), self.operation)


def test_batches_are_taken_on_a_few_ahead_of_the_consumer():
    by_hand = ByHand(in_order=True)
    for number in range(5):
        by_hand.arrive(number)
    assert by_hand.batches == [0, 1]
    by_hand.advance(1)
    assert by_hand.batches == [0, 1, 2]
    by_hand.advance(4)
    assert by_hand.batches == [0, 1, 2, 3, 4]


def test_in_order_later_batches_do_not_take_the_room_of_the_next():
    by_hand = ByHand(in_order=True)
    for number in (4, 3, 2, 1):
        by_hand.arrive(number)
    assert by_hand.batches == [1]
    by_hand.arrive(0)
    assert by_hand.batches == [1, 0]
    by_hand.advance(3)
    assert by_hand.batches == [1, 0, 2, 3, 4]


def test_in_order_batches_that_never_come_do_not_hold_up_the_others():
    by_hand = ByHand(in_order=True)
    by_hand.arrive(7)
    by_hand.advance(6)
    assert by_hand.batches == [7]


def test_without_order_batches_are_taken_on_as_they_come():
    by_hand = ByHand(in_order=False)
    for number in (4, 3, 2, 1):
        by_hand.arrive(number)
    assert by_hand.batches == [4, 3]
    by_hand.advance(1)
    assert by_hand.batches == [4, 3, 2]
    by_hand.advance(2)
    by_hand.arrive(0)
    assert by_hand.batches == [4, 3, 2, 1]


@pytest.mark.parametrize("in_order", [True, False])
def test_nothing_of_one_epoch_gets_into_the_next(in_order):
    by_hand = ByHand(in_order=in_order)
    first_epoch = by_hand.epoch
    before = [by_hand.arrive(number) for number in range(10, 14)]
    assert by_hand.batches == ([] if in_order else [10, 11])
    first_epoch.close()
    by_hand.epoch, by_hand.batches = Epoch(), []
    for number in range(2):
        by_hand.arrive(number)
    by_hand.advance(1)
    # What is said late of the first epoch is no news.
    by_hand.stage.work(Taken(first_epoch, 0), by_hand.operation)
    by_hand.arrive(2)
    assert by_hand.batches == [0, 1, 2]
    by_hand.advance(20)
    assert by_hand.batches == [0, 1, 2]
    assert not before[3].is_finished


def test_an_error_takes_up_no_room_after_it_was_delivered():
    by_hand = ByHand(in_order=False)

    def fail(batch):
        raise KeyError(batch)

    batch = PendingBatch(by_hand.epoch, 0, [0], [0])
    batch.output = 0
    by_hand.stage.work(batch, fail)
    by_hand.arrive(1)
    by_hand.arrive(2)
    assert by_hand.batches == [1]
    with pytest.raises(KeyError):
        batch.result()
    by_hand.advance(1)
    assert by_hand.batches == [1, 2]


@pytest.mark.parametrize("in_order", [True, False])
def test_the_consumer_makes_room_by_taking_batches(in_order):
    """The whole pipeline, with all batches made before the first is by_hand."""
    num_batches, num_ahead = 8, 2
    made = threading.Semaphore(0)
    num_taken = 0
    most_ahead = 0

    def transfer(batch):
        nonlocal most_ahead
        most_ahead = max(most_ahead, batch + 1 - num_taken)
        return batch

    def collate(samples):
        made.release()
        return samples[0]

    def set_up(_worker_id, _cursor: WorkerCursor):
        return (lambda index: index), collate

    last = TransferStage("transfer", lambda: transfer, num_ahead=num_ahead, in_order=in_order)
    first = ThreadStage("preprocess", [0], set_up, is_first=True, transfer_stage=last)
    pipeline = Pipeline(
        first, [first, last], last_stage=last, capacity=num_batches, in_order=in_order, batched=True
    )
    window = pipeline.begin(iter([[n] for n in range(num_batches)]))
    pipeline.start()
    batches = []
    while (batch := window.next(PATIENCE_SECONDS)) is not None:
        if not batches:
            for _ in range(num_batches):
                assert made.acquire(timeout=PATIENCE_SECONDS)
        num_taken += 1
        batches.append(batch.result())
    pipeline.lifetime.close()
    assert batches == list(range(num_batches))
    # It may be told that one was taken before the loop that counts here has it.
    assert most_ahead <= num_ahead + 1


def test_an_error_waits_for_its_turn_and_is_not_taken_on():
    """Overtaking the batches of its worker, it would be delivered before them."""
    by_hand = ByHand(in_order=False, num_ahead=1)
    by_hand.arrive(0)
    by_hand.arrive(1)
    failed = PendingBatch(by_hand.epoch, 2, [2], [2])
    failed.fail(0, KeyError(2))
    by_hand.stage.work(failed, by_hand.operation)
    assert not failed.is_finished
    by_hand.advance(2)
    assert failed.is_finished
    assert by_hand.batches == [0, 1]


def test_a_worker_that_ends_keeps_no_batch():
    by_hand = ByHand(in_order=True)
    batch = by_hand.arrive(7)
    by_hand.stage.dismiss_worker(0)
    by_hand.advance(7)
    assert not batch.is_finished


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_an_error_in_the_transfer_is_its_batchs_without_our_frames(error):
    by_hand = ByHand(in_order=True)

    def fail(batch):
        raise error(batch)

    batch = PendingBatch(by_hand.epoch, 0, [0], [0])
    batch.output = 0
    by_hand.stage.work(batch, fail)
    assert type(batch.error) is error
    assert batch.error.__traceback__.tb_frame.f_code is fail.__code__


class Waking:
    """A pipeline whose consumer stands still, until it is told to go on."""

    def __init__(self, *, in_order, operation=lambda index: index, num_batches=8):
        self.begun = threading.Semaphore(0)
        self.num_begun = 0

        def transfer(batch):
            self.num_begun += 1
            self.begun.release()
            return batch

        def set_up(_worker_id, _cursor):
            return operation, lambda samples: samples[0]

        last = TransferStage("transfer", lambda: transfer, num_ahead=2, in_order=in_order)
        first = ThreadStage("preprocess", [0, 1], set_up, is_first=True, transfer_stage=last)
        self.pipeline = Pipeline(
            first, [first, last], last_stage=last, capacity=8, in_order=in_order, batched=True
        )
        self.window = self.pipeline.begin(iter([[n] for n in range(num_batches)]))
        self.pipeline.start()

    def wait_until_begun(self, number):
        for _ in range(number):
            assert self.begun.acquire(timeout=PATIENCE_SECONDS)

    def next(self):
        return self.window.next(PATIENCE_SECONDS).result()


@pytest.mark.parametrize("in_order", [True, False])
def test_taking_a_batch_lets_another_on_before_the_next_is_asked_for(in_order):
    waking = Waking(in_order=in_order)
    waking.next()
    waking.wait_until_begun(3)
    waking.pipeline.lifetime.close()
    assert waking.num_begun == 3


def test_without_order_a_slow_batch_does_not_hold_up_the_transfer_of_others():
    go_on = threading.Event()

    def operation(index):
        if index == 0:
            assert go_on.wait(PATIENCE_SECONDS)
        return index

    waking = Waking(in_order=False, operation=operation)
    assert sorted(waking.next() for _ in range(7)) == list(range(1, 8))
    go_on.set()
    assert waking.next() == 0
    waking.pipeline.lifetime.close()
