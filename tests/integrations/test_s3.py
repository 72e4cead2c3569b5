"""An object store behind a network that is slow and drops things."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

from spdl_torch import DataLoader, RetryLoad, StagedDataset
from tests.integrations import quick
from tests.tiers import sampled

obstore = pytest.importorskip("obstore")
if importlib.util.find_spec("moto") is None:  # It takes seconds to import.
    pytest.skip("needs moto", allow_module_level=True)

from obstore.exceptions import GenericError  # noqa: E402 (not before it is known to be there)
from obstore.store import S3Store  # noqa: E402

LATENCY_SECONDS = 0.03
NUM_OBJECTS = 300
NUM_REQUESTS = 64
RECORD_BYTES = 512
NUM_RECORDS = 256
START_SECONDS = 60


def content_of(number):
    """Some kilobytes that are different for each object."""
    return hashlib.shake_128(number.to_bytes(4)).digest(2000 + number)


class Network:
    """Stands between the client and the server, one request on each connection."""

    def __init__(self, server_port):
        self.server_port = server_port
        self.num_requests = self.num_faults = 0
        self.num_in_flight = self.max_in_flight = 0
        self.has_faults = False
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(
            # As many may wait to be accepted as there are requests.
            asyncio.start_server(self.forward, "127.0.0.1", 0, backlog=256)
        )
        self.port = self.server.sockets[0].getsockname()[1]
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def reset(self, *, has_faults):
        self.num_requests = self.num_faults = self.max_in_flight = 0
        self.has_faults = has_faults

    async def forward(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
            try:
                await self.answer(request, writer)
            finally:
                self.num_in_flight -= 1
                writer.close()

    async def answer(self, request, writer):
        await asyncio.sleep(LATENCY_SECONDS)
        self.num_requests += 1
        number = self.num_requests if self.has_faults else 0
        if number and number % 20 == 0:
            self.num_faults += 1
            writer.write(
                b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return
        answer = await self.answer_of_server(request)
        if number and number % 33 == 0:
            self.num_faults += 1
            writer.write(answer[: len(answer) // 2])
            await writer.drain()
            # Nothing more is sent, and the other side is told so: a reset.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return
        writer.write(answer)
        await writer.drain()

    async def answer_of_server(self, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = await reader.read()  # To the end: it closes the connection.
        writer.close()
        return answer

    def close(self):
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def server_port():
    """Of a filled store, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        create_bucket(port, time.monotonic() + START_SECONDS)
        asyncio.run(fill(store_at(port)))
        yield port
    finally:
        server.kill()
        server.wait()


def create_bucket(port, deadline):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/photos", method="PUT")
    while True:
        try:
            urllib.request.urlopen(request).close()
        except OSError:  # It has not started yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


async def fill(store):
    numbers = range(NUM_OBJECTS)
    await asyncio.gather(*(store.put_async(f"{n:04}", content_of(n)) for n in numbers))
    records = b"".join(bytes([number]) * RECORD_BYTES for number in range(NUM_RECORDS))
    await store.put_async("records", records)


@pytest.fixture
def network(server_port):
    network = Network(server_port)
    yield network
    network.close()


def store_at(port):
    return S3Store(
        "photos",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id="any",
        secret_access_key="any",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


class Objects(StagedDataset):
    """A sample is the number of an object, if its content is right."""

    def __init__(self, store, size=NUM_OBJECTS):
        self.store, self.size = store, size

    def __len__(self):
        return self.size

    async def load(self, index):
        answer = await self.store.get_async(f"{index:04}")
        return index, bytes(await answer.bytes_async())

    def preprocess(self, raw):
        index, content = raw
        assert content == content_of(index)
        return index


class ObjectsByBatch(Objects):
    async def load_many(self, indices):
        return await asyncio.gather(*(self.load(index) for index in indices))


class Records(StagedDataset):
    """The records of one object, those of a batch in one call."""

    def __init__(self, store, size):
        self.store, self.size = store, size

    def __len__(self):
        return self.size

    async def load_many(self, indices):
        return await self.store.get_ranges_async(
            "records",
            starts=[index * RECORD_BYTES for index in indices],
            lengths=[RECORD_BYTES] * len(indices),
        )

    def preprocess(self, raw):
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def loader_of(dataset, **arguments):
    return DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2, **arguments)


# The client has threads of its own, which a fork would not copy.
PLACES = [{"num_processes": 0}, {"num_processes": 1, "multiprocessing_context": "spawn"}]


@quick
@pytest.mark.parametrize("place", sampled(PLACES, 2), ids=str)
def test_dropped_requests_are_retried(network, place):
    """A request that the network drops is sent again; each object comes once and intact."""
    network.reset(has_faults=True)
    loader = loader_of(
        Objects(store_at(network.port)),
        num_io_workers=NUM_REQUESTS,
        on_error=RetryLoad(attempts=8, backoff=0.01, exceptions=(GenericError,)),
        **place,
    )
    got = torch.cat(list(loader))
    assert sorted(got.tolist()) == list(range(NUM_OBJECTS))
    # One request for each object and for each fault, and no others.
    assert network.num_faults >= 20
    assert loader.num_retries == loader.stats().num_retries == network.num_faults
    assert network.num_requests == NUM_OBJECTS + network.num_faults


def test_all_io_workers_send_requests(network):
    """All IO workers have a request in flight."""
    network.reset(has_faults=False)
    loader = loader_of(Objects(store_at(network.port)), num_io_workers=NUM_REQUESTS)
    started = time.perf_counter()
    assert sum(len(batch) for batch in loader) == NUM_OBJECTS
    seconds_each = (time.perf_counter() - started) / NUM_OBJECTS
    assert network.max_in_flight == NUM_REQUESTS

    # One after the other, each takes the latency at least.
    network.reset(has_faults=False)
    few = loader_of(Objects(store_at(network.port), 32), num_io_workers=1)
    started = time.perf_counter()
    assert sum(len(batch) for batch in few) == 32
    seconds_one_by_one = (time.perf_counter() - started) / 32
    assert network.max_in_flight == 1
    assert seconds_one_by_one > LATENCY_SECONDS
    assert seconds_each < seconds_one_by_one / 3


def test_batch_is_fetched_in_one_call(network):
    """load_many fetches a batch in one call."""
    network.reset(has_faults=False)
    loader = loader_of(ObjectsByBatch(store_at(network.port), 64), num_io_workers=4)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(64))
    assert network.max_in_flight > 16


def test_near_records_share_a_request(network):
    """Near records of a batch come in one request."""
    network.reset(has_faults=False)
    loader = loader_of(Records(store_at(network.port), NUM_RECORDS), num_io_workers=4)
    records = torch.cat(list(loader))
    assert (records == records[:, :1]).all()  # Each is whole, and of one kind.
    assert sorted(records[:, 0].tolist()) == list(range(NUM_RECORDS))
    assert network.num_requests == len(loader) == NUM_RECORDS / 16


def test_missing_object_is_not_retried(network):
    """An object that does not exist is an error at once."""
    network.reset(has_faults=False)
    missing = Objects(store_at(network.port), NUM_OBJECTS + 1)
    loader = DataLoader(
        missing,
        sampler=[NUM_OBJECTS],
        num_workers=2,
        on_error=RetryLoad(exceptions=(GenericError,)),
    )
    with pytest.raises(FileNotFoundError, match=str(NUM_OBJECTS)) as caught:
        next(iter(loader))
    assert f"sample index {NUM_OBJECTS}" in caught.value.__notes__[0]
    assert network.num_requests == 1
