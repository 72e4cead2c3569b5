"""The stage behind collate: which batches it takes on, and when."""

from __future__ import annotations

import threading

import pytest

from spdl_torch._pipeline import Pipeline, Place, Record, ThreadStage, TransferStage
from spdl_torch._pipeline._signal import Signal
from spdl_torch._pipeline._transfer_stage import Taken

from .datasets import PATIENCE_SECONDS


class ByHand:
    """A transfer stage, called by hand, that remembers what it takes on."""

    def __init__(self, *, in_order, num_ahead=2):
        self.stage = TransferStage("transfer", lambda: None, num_ahead=num_ahead, in_order=in_order)
        self.signal = Signal()
        self.batches = []

    def operation(self, batch):
        self.batches.append(batch)
        return batch

    def arrive(self, number):
        record = Record(number, [number], [number], self.signal)
        record.hold(number)
        self.stage.work(record, self.operation)
        return record

    def advance(self, num_taken):
        self.stage.work(Taken(self.signal, num_taken), self.operation)


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


def test_nothing_of_one_epoch_gets_into_the_next():
    by_hand = ByHand(in_order=True)
    before = [by_hand.arrive(number) for number in range(4)]
    by_hand.advance(1)
    by_hand.signal.close()
    left_behind = by_hand.signal
    by_hand.signal = Signal()
    for number in range(4):
        by_hand.arrive(number)
    assert by_hand.batches == [0, 1, 2, 0, 1]
    by_hand.signal, current = left_behind, by_hand.signal
    by_hand.advance(4)
    by_hand.signal = current
    assert by_hand.batches == [0, 1, 2, 0, 1]
    assert not before[3].is_finished


def test_an_error_takes_up_no_room_after_it_was_delivered():
    by_hand = ByHand(in_order=False)

    def fail(batch):
        raise KeyError(batch)

    record = Record(0, [0], [0], by_hand.signal)
    record.hold(0)
    by_hand.stage.work(record, fail)
    by_hand.arrive(1)
    by_hand.arrive(2)
    assert by_hand.batches == [1]
    with pytest.raises(KeyError):
        record.take()
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

    def set_up(_worker_id, _place: Place):
        return (lambda index: index), collate

    last = TransferStage("transfer", lambda: transfer, num_ahead=num_ahead, in_order=in_order)
    first = ThreadStage("preprocess", [0], set_up, is_first=True, transfer_stage=last)
    pipeline = Pipeline(
        first, [first, last], last_stage=last, capacity=num_batches, in_order=in_order, batched=True
    )
    pipeline.begin(iter([[n] for n in range(num_batches)]))
    pipeline.start()
    batches = []
    while (record := pipeline.next(PATIENCE_SECONDS)) is not None:
        if not batches:
            for _ in range(num_batches):
                assert made.acquire(timeout=PATIENCE_SECONDS)
        num_taken += 1
        batches.append(record.take())
    pipeline.close()
    assert batches == list(range(num_batches))
    # It may be told that one was taken before the loop that counts here has it.
    assert most_ahead <= num_ahead + 1
