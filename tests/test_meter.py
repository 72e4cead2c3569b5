"""The meters, with a clock that stands still until it is told to go on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from spdl_torch._engine import _measurement, _meter
from spdl_torch._engine._measurement import Measurement
from spdl_torch._engine._meter import (
    ConsumerMeter,
    FlightMeter,
    FutureMeter,
    StageMeter,
    WorkerMeter,
)


class Clock:
    """All the clocks there are."""

    def __init__(self):
        self.now = 1000.0
        self.cpu = self.queued = self.process_cpu = 0.0

    def go(self, seconds, *, cpu=0.0, queued=0.0):
        self.now += seconds
        self.cpu += cpu
        self.queued += queued

    def sleep(self, seconds):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    time = SimpleNamespace(
        monotonic=lambda: clock.now,
        thread_time=lambda: clock.cpu,
        process_time=lambda: clock.process_cpu,
        sleep=clock.sleep,
    )
    monkeypatch.setattr(_meter, "time", time)
    monkeypatch.setattr(_measurement, "time", time)
    monkeypatch.setattr(_meter, "seconds_in_queue", lambda: clock.queued)
    return clock


def started(*meters):
    for meter in meters:
        meter.start()
    return meters


# -- a worker thread ------------------------------------------------------------------------------


def test_a_worker_is_at_samples_at_a_batch_or_without_work(clock):
    (worker,) = started(WorkerMeter("w"))
    stage = StageMeter("preprocess", [worker], has_batches=True)
    clock.go(1.0)
    worker.begin()
    clock.go(2.0, cpu=0.5, queued=0.25)
    worker.lap("preprocess", 0, 1, 7)
    worker.begin_batch(0)
    clock.go(4.0, cpu=3.0, queued=0.5)
    worker.end_batch("collate", 0)
    worker.end()
    clock.go(8.0)
    samples, batches = stage.readings(clock.now)
    assert (samples.num_samples, batches.num_samples) == (1, 1)
    assert (samples.busy_seconds, batches.busy_seconds) == (2.0, 4.0)
    assert (samples.cpu_seconds, batches.cpu_seconds) == (0.5, 3.0)
    assert (samples.queued_seconds, batches.queued_seconds) == (0.25, 0.5)
    assert (samples.blocked_seconds, samples.starved_seconds) == (9.0, 0.0)
    assert (samples.num_in_flight, batches.num_in_flight) == (0, 0)


def test_what_it_is_at_now_counts_too(clock):
    (worker,) = started(WorkerMeter("w"))
    stage = StageMeter("preprocess", [worker], has_batches=True)
    worker.begin()
    clock.go(2.0)
    samples, batches = stage.readings(clock.now)
    assert (samples.busy_seconds, samples.num_in_flight, batches.num_in_flight) == (2.0, 1, 0)
    worker.begin_batch(5)
    clock.go(3.0)
    samples, batches = stage.readings(clock.now)
    assert (samples.busy_seconds, samples.num_in_flight) == (2.0, 0)
    assert (batches.busy_seconds, batches.num_in_flight) == (3.0, 1)


def test_of_cheap_batches_one_in_sixteen_says_how_long_samples_take(clock):
    (worker,) = started(WorkerMeter("w"))
    stage = StageMeter("preprocess", [worker], has_batches=True)
    for _ in range(32):
        worker.begin()
        clock.go(0.00010)
        worker.begin_batch(10)
        clock.go(0.00005)
        worker.end_batch("collate", 0)
        worker.end()
    samples, batches = stage.readings(clock.now)
    assert (samples.num_samples, batches.num_samples) == (320, 32)
    assert samples.busy_seconds == pytest.approx(0.0032)
    assert batches.busy_seconds == pytest.approx(0.0016)
    for reading, seconds in ((samples, 0.00001), (batches, 0.00005)):
        (bucket,) = [n for n, count in enumerate(reading.counts) if count]
        assert reading.counts[bucket] == reading.num_samples
        assert 0.9 * seconds <= _meter.upper_seconds(bucket) <= 1.1 * seconds


def test_without_work_it_is_starved_for_as_long_as_its_feeder_is_at_work(clock):
    load, preprocess = started(WorkerMeter("l"), WorkerMeter("p"))
    stage = StageMeter("preprocess", [preprocess])
    stage.feed_from(StageMeter("load", [load]))
    clock.go(1.0)  # Nobody has anything to do.
    load.begin()
    clock.go(2.0)  # It loads.
    (reading,) = stage.readings(clock.now)
    assert (reading.blocked_seconds, reading.starved_seconds) == (1.0, 2.0)
    load.lap("load", 0, 1)
    preprocess.begin()
    clock.go(4.0)
    preprocess.end()
    load.end()
    clock.go(8.0)  # The loop is slow.
    (reading,) = stage.readings(clock.now)
    assert (reading.blocked_seconds, reading.starved_seconds) == (9.0, 2.0)


def test_short_tasks_one_after_the_other_are_one_stretch_of_work(clock):
    load, preprocess = started(WorkerMeter("l"), WorkerMeter("p"))
    preprocess.feeder = StageMeter("load", [load])
    for _ in range(10):
        load.begin()
        clock.go(0.1)
        load.end()
        clock.go(0.0001)
    preprocess.begin()
    (reading,) = StageMeter("preprocess", [preprocess]).readings(clock.now)
    assert reading.starved_seconds == pytest.approx(1.001)


def test_an_epoch_is_the_difference_of_two_readings(clock):
    (worker,) = started(WorkerMeter("w"))
    stage = StageMeter("preprocess", [worker])
    readings = []
    for seconds in (1.0, 3.0):
        before = stage.readings(clock.now)[0]
        worker.begin()
        clock.go(seconds, cpu=seconds / 2, queued=seconds / 4)
        worker.lap("preprocess", 0, 1)
        worker.end()
        readings.append(stage.readings(clock.now)[0].since(before))
    assert [reading.busy_seconds for reading in readings] == [1.0, 3.0]
    assert [reading.cpu_seconds for reading in readings] == [0.5, 1.5]
    assert [reading.queued_seconds for reading in readings] == [0.25, 0.75]
    assert [sum(reading.counts) for reading in readings] == [1, 1]


def test_a_worker_in_the_middle_of_a_step_is_looked_at_again(clock):
    """The step is done while the reader looks: with the first look alone it would count twice."""
    (worker,) = started(WorkerMeter("w"))
    worker.begin()
    clock.go(2.0)
    worker._num_steps += 1  # In the middle: the time is added, but it is at its old place.
    worker.samples.busy_seconds += 2.0

    def go_on(_):
        worker._at = clock.now
        worker._num_steps += 1

    _meter.time.sleep = go_on
    (reading,) = StageMeter("preprocess", [worker]).readings(clock.now)
    assert reading.busy_seconds == 2.0


# -- others ---------------------------------------------------------------------------------------


def test_in_an_event_loop_all_that_are_in_flight_count(clock):
    meter = FlightMeter("load", 4)
    meter.start()
    first = meter.begin()
    second = meter.begin()
    clock.go(1.0, cpu=0.3)  # Two of four.
    meter.end(1, first, 0, 0)
    clock.go(2.0, cpu=0.3)  # One of four.
    (reading,) = meter.readings(clock.now)
    assert (reading.busy_seconds, reading.blocked_seconds, reading.num_in_flight) == (4.0, 8.0, 1)
    meter.end(0, second, 0, 1)  # It has failed.
    (reading,) = meter.readings(clock.now)
    assert (reading.busy_seconds, reading.blocked_seconds, reading.num_in_flight) == (4.0, 8.0, 0)
    assert reading.num_samples == sum(reading.counts) == 1
    assert reading.cpu_seconds == pytest.approx(0.6)


def test_an_executors_workers_are_believed(clock):
    meter = FutureMeter("preprocess", 2)
    meter.begin(3)
    meter.add(3, 6.0, 4.5, 0)
    (reading,) = meter.readings(clock.now)
    assert (reading.busy_seconds, reading.cpu_seconds, reading.num_in_flight) == (6.0, 4.5, 3)
    meter.end(3)
    assert meter.readings(clock.now)[0].num_in_flight == 0


@pytest.mark.timeout(20)
def test_an_iterator_may_be_collected_while_its_executors_meter_is_read(clock, monkeypatch):
    meter = FutureMeter("preprocess", 2)
    meter.begin(3)

    def add_and_collect(reading, tally):
        meter.end(3)  # A future is cancelled by a finaliser, in this thread.

    monkeypatch.setattr(_meter.Reading, "add", add_and_collect)
    assert meter.readings(clock.now)[0].num_in_flight == 0


# -- the loop -------------------------------------------------------------------------------------


def take(consumer, clock, waited, step):
    consumer.ask()
    clock.go(waited)
    consumer.get()
    consumer.count(10)
    clock.go(step)


def test_the_loop_waits_and_steps(clock):
    consumer = ConsumerMeter()
    take(consumer, clock, 5.0, 1.0)
    take(consumer, clock, 0.5, 2.0)
    consumer.ask()
    clock.go(0.25)
    reading = consumer.reading(clock.now)
    assert (reading.num_batches, reading.num_bytes) == (2, 20)
    assert (reading.waited_seconds, reading.first_wait_seconds) == (5.75, 5.0)
    assert reading.step_seconds == 3.0


def test_a_wake_is_measured_by_itself(clock):
    consumer = ConsumerMeter()
    consumer.num_wakes, consumer.wake_seconds = 4, 0.02
    assert consumer.reading(clock.now).wake_seconds == 0.005


def test_what_comes_after_an_interrupt_is_no_waiting(clock):
    consumer = ConsumerMeter()
    consumer.ask()
    clock.go(1.0)
    consumer.get()  # Nothing: it was interrupted.
    clock.go(60.0)
    take(consumer, clock, 2.0, 0.0)
    reading = consumer.reading(clock.now)
    assert (reading.waited_seconds, reading.first_wait_seconds) == (3.0, 3.0)


# -- an epoch -------------------------------------------------------------------------------------


def test_a_loop_that_has_left_is_not_at_a_long_step(clock):
    (worker,) = started(WorkerMeter("w"))
    measurement = Measurement("thread", [StageMeter("preprocess", [worker])])
    measurement.begin()
    for _ in range(10):
        take(measurement.consumer, clock, 0.5, 0.1)
    before = measurement.read()
    clock.go(3600.0)
    after = measurement.read()
    assert measurement.is_running
    assert after.consumer == before.consumer
    assert after.seconds == pytest.approx(before.seconds, abs=0.2)
    assert after.stages[0].blocked_seconds == pytest.approx(after.seconds)


def test_what_is_over_stays_as_it_was(clock):
    measurement = Measurement("caller")
    measurement.begin()
    take(measurement.consumer, clock, 0.5, 0.1)
    measurement.end()
    last = measurement.read()
    clock.go(5.0)
    take(measurement.consumer, clock, 1.0, 1.0)
    measurement.end()
    assert measurement.read() == last
    assert last.seconds == pytest.approx(0.6)


def test_time_counts_from_the_first_question(clock):
    (worker,) = started(WorkerMeter("w"))
    clock.go(100.0)
    measurement = Measurement("thread", [StageMeter("preprocess", [worker])])
    clock.go(100.0)
    assert measurement.read() == (0.0, 0.0, measurement.consumer.reading(clock.now), [])
    clock.process_cpu = 7.0
    measurement.begin()
    clock.go(2.0)
    clock.process_cpu = 8.5
    found = measurement.read()
    assert (found.seconds, found.cpu_seconds) == (2.0, 1.5)
    assert found.stages[0].blocked_seconds == 2.0


def test_readers_never_see_less_than_before():
    """With the real clock: a worker that takes steps all the time, and one who reads."""
    worker = WorkerMeter("w")
    stage = StageMeter("preprocess", [worker], has_batches=True)
    is_over = threading.Event()

    def work():
        worker.start()
        while not is_over.is_set():
            worker.begin()
            worker.lap("preprocess", 0, 1)
            worker.begin_batch(3)
            worker.end_batch("collate", 0)
            worker.end()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        before = 0.0
        for _ in range(300):
            now = _meter.time.monotonic()
            samples, batches = stage.readings(now)
            total = samples.busy_seconds + samples.blocked_seconds + batches.busy_seconds
            assert total >= before - 0.001
            before = total
    finally:
        is_over.set()
        thread.join()
