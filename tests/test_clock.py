"""The clocks of the engine, with a time that stands still until it is told to go on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spdl_torch._engine import _clock
from spdl_torch._engine._child_clock import ChildClock, Figures, added_up
from spdl_torch._engine._clock import (
    ConsumerClock,
    EpochClock,
    FutureClock,
    Reading,
    TaskClock,
    ThreadStageClock,
    WorkerClock,
)


class Time:
    """All the times that clocks read."""

    def __init__(self):
        self.now = 1000.0
        self.cpu = self.queued = self.process_cpu = 0.0
        self.sleeps = 0

    def go(self, seconds, *, cpu=0.0, queued=0.0, sleeps=0):
        self.now += seconds
        self.cpu += cpu
        self.queued += queued
        self.sleeps += sleeps


@pytest.fixture
def time(monkeypatch):
    time = Time()
    stopped = SimpleNamespace(
        monotonic=lambda: time.now,
        thread_time=lambda: time.cpu,
        process_time=lambda: time.process_cpu,
    )
    monkeypatch.setattr(_clock, "time", stopped)
    monkeypatch.setattr(_clock, "_seconds_in_queue", lambda: time.queued)
    monkeypatch.setattr(_clock, "_num_sleeps", lambda: time.sleeps)
    return time


@pytest.fixture
def worker(time):
    worker = WorkerClock("w")
    worker.start()
    return worker


def readings(worker):
    return ThreadStageClock([worker], "preprocess", "collate").read(_clock.time.monotonic())


# -- a worker thread ------------------------------------------------------------------------------


def test_worker_counts_samples_and_batches(time, worker):
    """Work on samples and on batches is counted apart, and idle time not at all."""
    time.go(1.0)
    worker.begin()
    time.go(2.0, cpu=0.5, queued=0.25)
    worker.lap("preprocess", 0, 1, 7)
    worker.current = worker.batches
    time.go(4.0, cpu=3.0, queued=0.5)
    worker.lap("collate", 0, 1)
    worker.current = None
    time.go(8.0)
    samples, batches = (reading.counter for reading in readings(worker))
    assert (samples.num_samples, batches.num_samples) == (1, 1)
    assert (samples.busy_seconds, batches.busy_seconds) == (2.0, 4.0)
    assert (samples.cpu_seconds, batches.cpu_seconds) == (0.5, 3.0)
    assert (samples.queued_seconds, batches.queued_seconds) == (0.25, 0.5)
    assert [reading.num_in_flight for reading in readings(worker)] == [0, 0]


def test_work_in_progress_counts(time, worker):
    """What a worker is doing now counts as busy time and as in flight."""
    worker.begin()
    time.go(2.0)
    samples, batches = readings(worker)
    assert (samples.counter.busy_seconds, samples.num_in_flight) == (2.0, 1)
    assert batches.num_in_flight == 0
    worker.lap("preprocess", 0, 5)
    worker.current = worker.batches
    time.go(3.0)
    samples, batches = readings(worker)
    assert (samples.counter.busy_seconds, samples.num_in_flight) == (2.0, 0)
    assert (batches.counter.busy_seconds, batches.num_in_flight) == (3.0, 1)


def test_histogram_has_the_mean_of_a_batch(time, worker):
    """Samples that are timed together count with their mean."""
    worker.begin()
    time.go(0.0001)
    worker.lap("preprocess", 0, 10)
    ((upper_seconds, count),) = readings(worker)[0].counter.histogram()
    assert count == 10
    assert 0.9e-5 <= upper_seconds <= 1.1e-5


def test_recorder_receives_spans(time, worker):
    """Every span of work is passed on with its worker, batch and sample."""
    spans = []
    ThreadStageClock([worker], "preprocess").record_spans(spans.append)
    worker.begin()
    time.go(2.0)
    worker.lap("preprocess", 3, 1, "cat.jpg")
    (span,) = spans
    assert (span.stage, span.worker, span.batch, span.index) == (
        "preprocess",
        "w",
        3,
        "'cat.jpg'",
    )
    assert (span.started_seconds, span.seconds) == (1000.0, 2.0)


# -- others ---------------------------------------------------------------------------------------


def test_event_loop_counts_all_calls(time):
    """All calls in flight on an event loop count as busy at the same time."""
    clock = TaskClock("load", 4)
    clock.start()
    first = clock.begin()
    second = clock.begin()
    time.go(1.0, cpu=0.3)
    clock.end(1, first, 0, 0)
    time.go(2.0, cpu=0.3)
    (reading,) = clock.read(time.now)
    assert (reading.counter.busy_seconds, reading.num_in_flight) == (4.0, 1)
    clock.end(0, second, 0, 1)  # It failed.
    (reading,) = clock.read(time.now)
    assert (reading.counter.busy_seconds, reading.num_in_flight) == (4.0, 0)
    assert reading.counter.num_samples == sum(reading.counter.buckets.values()) == 1
    assert reading.counter.cpu_seconds == pytest.approx(0.6)


def test_executor_reports_its_time(time):
    """An executor's workers say how long they took."""
    clock = FutureClock("preprocess", 2)
    clock.count_in_flight(3)
    clock.add(3, 6.0, 4.5, 0)
    (reading,) = clock.read(time.now)
    assert (reading.counter.busy_seconds, reading.counter.cpu_seconds) == (6.0, 4.5)
    assert reading.num_in_flight == 3
    clock.count_in_flight(-3)
    assert clock.read(time.now)[0].num_in_flight == 0


@pytest.mark.timeout(20)
def test_executor_clock_is_reentrant(time, monkeypatch):
    """A finaliser may cancel a future in the thread that reads the clock."""
    clock = FutureClock("preprocess", 2)
    clock.count_in_flight(3)
    monkeypatch.setattr(_clock.Counter, "combine", lambda *_: clock.count_in_flight(-3))
    assert clock.read(time.now)[0].num_in_flight == 0


# -- the loop -------------------------------------------------------------------------------------


def take(consumer, time, waited, step):
    consumer.ask()
    time.go(waited)
    consumer.get(10)
    time.go(step)


def started(epoch):
    epoch.start()
    return epoch


def test_loop_waits_and_steps(time):
    """Waiting for batches and working with them are counted apart."""
    consumer = ConsumerClock()
    take(consumer, time, 5.0, 1.0)
    take(consumer, time, 0.5, 2.0)
    consumer.ask()
    time.go(0.25)
    reading = consumer.read(time.now)
    assert (reading.num_batches, consumer.num_bytes) == (2, 20)
    assert (reading.waited_seconds, reading.first_wait_seconds) == (5.75, 5.0)
    assert reading.step_seconds == 3.0


def test_steps_are_looked_at(time):
    """What the loop's thread waits for in a step is told apart; its wait for a batch is not it."""
    consumer = ConsumerClock()
    for _ in range(3):
        consumer.ask()
        time.go(1.0, queued=0.5, sleeps=7)
        consumer.get(10)
        time.go(2.0, cpu=0.5, queued=0.25, sleeps=4)
    consumer.ask()
    loop = consumer.read(time.now)
    assert (loop.step_seconds, loop.step_cpu_seconds, loop.step_queued_seconds) == (6.0, 1.5, 0.75)
    assert (loop.step_asleep_seconds, loop.sleeps_per_step) == (3.75, 4.0)


def test_few_cheap_steps_are_looked_at(time, monkeypatch):
    """The queue is not read for every cheap step, and its share is that of the others."""
    reads = []
    monkeypatch.setattr(_clock, "_seconds_in_queue", lambda: reads.append(0) or time.queued)
    consumer = ConsumerClock()
    for _ in range(1000):
        consumer.ask()
        consumer.get(10)
        time.go(0.001, queued=0.0005)
    consumer.ask()
    assert 20 <= len(reads) / 2 <= 21  # A second has so many times 50 ms.
    assert consumer.read(time.now).step_queued_seconds == pytest.approx(0.5)


def test_wakeups_are_averaged(time):
    """The time from a wake-up to going on is reported as a mean."""
    consumer = ConsumerClock()
    consumer.num_wakeups, consumer.wake_seconds = 2, 0.01
    assert consumer.read(time.now).wake_seconds == 0.005


def test_pause_after_interrupt_is_no_wait(time):
    """After a call without a batch, the time until the next call does not count as waiting."""
    consumer = ConsumerClock()
    consumer.ask()
    time.go(1.0)
    consumer.get(None)
    time.go(60.0)
    take(consumer, time, 2.0, 0.0)
    reading = consumer.read(time.now)
    assert (reading.waited_seconds, reading.first_wait_seconds) == (3.0, 3.0)


# -- child processes ------------------------------------------------------------------------------


def sent(epoch_id, read_at, num_samples, *, width=2, num_in_flight=0):
    counter = _clock.Counter()
    counter.add(num_samples, float(num_samples))
    return Figures(epoch_id, read_at, [Reading("load", width, counter, num_in_flight, "thread")])


def seen(clock, now, *, has_work=False):
    ((_, width, counter, num_in_flight, _),) = clock.read(now, has_work=has_work)
    return width, counter.num_samples, counter.busy_seconds, num_in_flight


def test_epochs_of_child_add_up():
    """A child sends what it did in an epoch; leftovers of an epoch before are not of the next."""
    clock = ChildClock()
    clock.begin(7)
    clock.receive(sent(7, 1.0, 3))
    clock.receive(sent(7, 2.0, 10))
    clock.begin(8)
    assert seen(clock, 2.5) == (2, 10, 10.0, 0)
    clock.receive(sent(7, 3.0, 12))
    assert seen(clock, 3.5) == (2, 10, 10.0, 0)
    clock.receive(sent(8, 4.0, 1))
    assert seen(clock, 4.5) == (2, 11, 11.0, 0)


def test_figures_of_dead_child_stay():
    """Another process begins at zero, and what the dead one had sent is not lost."""
    clock = ChildClock()
    clock.begin(7)
    clock.receive(sent(7, 2.0, 10))
    clock.begin(7)
    clock.receive(sent(7, 3.0, 1))
    assert seen(clock, 3.5) == (2, 11, 11.0, 0)


def test_older_figures_are_ignored():
    """Two threads of a child may send in the wrong order."""
    clock = ChildClock()
    clock.begin(7)
    clock.receive(sent(7, 2.0, 10))
    clock.receive(sent(7, 1.0, 9))
    assert seen(clock, 2.0) == (2, 10, 10.0, 0)


def test_busy_workers_stay_busy():
    """Workers in the middle of a sample count as busy while the child has work, for a while."""
    clock = ChildClock()
    clock.begin(7)
    clock.receive(sent(7, 2.0, 10, num_in_flight=2))
    assert seen(clock, 2.25) == (2, 10, 10.0, 0)
    assert seen(clock, 2.25, has_work=True) == (2, 10, 10.5, 2)
    assert seen(clock, 99.0, has_work=True) == (2, 10, 12.0, 2)
    clock.is_abandoned = True
    assert seen(clock, 2.25, has_work=True) == (2, 10, 10.0, 0)


def test_widths_of_children_add_up():
    """The figures of several children are those of one stage, as wide as all of them."""
    clocks = [ChildClock(), ChildClock()]
    for clock in clocks:
        clock.begin(7)
        clock.receive(sent(7, 1.0, 3, num_in_flight=1))
    (reading,) = added_up(clock.read(1.0, has_work=True) for clock in clocks)
    assert (reading.width, reading.counter.num_samples, reading.num_in_flight) == (4, 6, 2)


# -- an epoch -------------------------------------------------------------------------------------


def test_epoch_is_a_difference(time, worker):
    """Each epoch reports only its own work."""
    stage = ThreadStageClock([worker], "preprocess")
    found = []
    for seconds in (1.0, 3.0):
        epoch = started(EpochClock("thread", [stage]))
        epoch.consumer.ask()
        worker.begin()
        time.go(seconds, cpu=seconds / 2, queued=seconds / 4)
        worker.lap("preprocess", 0, 1)
        worker.current = None
        epoch.consumer.get(10)
        epoch.end()
        found += epoch.read().stages
    assert [stats.busy_seconds for stats in found] == [1.0, 3.0]
    assert [stats.cpu_seconds for stats in found] == [0.5, 1.5]
    assert [stats.queued_seconds for stats in found] == [0.25, 0.75]
    assert [stats.num_samples for stats in found] == [1, 1]
    assert [stats.mean_seconds for stats in found] == [1.0, 3.0]
    assert [stats.p50_seconds for stats in found] == pytest.approx([1.0, 3.0], rel=0.1)


def test_abandoned_loop_stops_the_clock(time):
    """A loop that was left is not in a long step."""
    epoch = started(EpochClock("thread"))
    for _ in range(10):
        take(epoch.consumer, time, 0.5, 0.1)
    before = epoch.read()
    time.go(3600.0)
    after = epoch.read()
    assert epoch.is_running
    assert after.loop == before.loop
    assert after.elapsed_seconds == pytest.approx(before.elapsed_seconds, abs=0.2)


def test_finished_epoch_stays_as_it_was(time):
    """After its end an epoch's figures do not change."""
    epoch = started(EpochClock("caller"))
    take(epoch.consumer, time, 0.5, 0.1)
    epoch.end()
    last = epoch.read()
    time.go(5.0)
    take(epoch.consumer, time, 1.0, 1.0)
    epoch.end()
    assert epoch.read() == last
    assert last.elapsed_seconds == pytest.approx(0.6)


def test_time_counts_from_first_batch(time, worker):
    """An epoch begins when its first batch is asked for."""
    time.go(100.0)
    epoch = EpochClock("thread", [ThreadStageClock([worker], "preprocess")])
    time.go(100.0)
    assert epoch.read().elapsed_seconds == 0.0
    time.process_cpu = 7.0
    epoch.start()
    epoch.consumer.ask()
    time.go(2.0)
    time.process_cpu = 8.5
    found = epoch.read()
    assert (found.elapsed_seconds, found.cpu_seconds) == (2.0, 1.5)
    assert found.stages[0].busy_seconds == 0.0
