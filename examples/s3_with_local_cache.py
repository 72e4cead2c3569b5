"""Keep what was loaded from S3 on a local disk: the next epochs and runs send no requests.

    pip install obstore 'moto[server]'
    python examples/s3_with_local_cache.py

Each run is a process of its own, as two trainings are. They load from a local server that answers
after 100 ms, and share a cache directory. The crops are random, so the bytes of the files are kept.
"""

from __future__ import annotations

import asyncio
import io
import logging
import multiprocessing
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import PIL.Image
from obstore.store import S3Store
from torch import Tensor

from spdl_torch import Cache, DataLoader, ImageLoader, StagedDataset

NUM_IMAGES = 512
LATENCY_SECONDS = 0.1
Sample = tuple[Tensor, int]


class Photos(StagedDataset[Sample]):
    """Labelled images in a store, cropped at random."""

    def __init__(self, store: S3Store, keys: list[str]) -> None:
        self.store, self.keys = store, keys
        self.images = ImageLoader(size=64, crop="random", horizontal_flip=0.5)

    def __len__(self) -> int:
        return len(self.keys)

    async def load(self, index: int) -> tuple[str, bytes]:
        key = self.keys[index]
        answer = await self.store.get_async(key)
        return key, bytes(await answer.bytes_async())

    def preprocess(self, raw: tuple[str, bytes]) -> Sample:
        key, data = raw
        return self.images.decode(data, key), int(PurePosixPath(key).stem.rpartition("_")[2])


def run(name: str, server: Server, directory: str) -> None:
    """Load two epochs, and print what each of them took."""
    store = server.store()
    keys = sorted(meta["path"] for chunk in store.list("train/") for meta in chunk)
    loader: DataLoader[Any] = DataLoader(
        Photos(store, keys),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        num_io_workers=8,
        num_processes=0,  # The client's threads do not survive a fork.
        # Change the token when the objects behind the keys or the code of Photos change.
        cache=Cache("1GB", directory=directory, token="train, version 1"),
    )
    with loader:
        for epoch in (1, 2):
            num_before, started = server.num_requests.value, time.perf_counter()
            num_images = sum(len(labels) for _, labels in loader)
            seconds = time.perf_counter() - started
            num_requests = server.num_requests.value - num_before
            print(
                f"{name}, epoch {epoch}: {num_images} images, {seconds:.2f} s, "
                f"{num_requests} requests"
            )
        print(loader.stats().cache)


# -- a local store --------------------------------------------------------------------------------


@dataclass
class Server:
    """Where the store is, and how many objects were asked for."""

    endpoint: str
    num_requests: Any

    def store(self) -> S3Store:
        return S3Store(
            "photos",
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="any",
            secret_access_key="any",
            client_options={"allow_http": True},
        )


def serve(port: Connection, num_requests: Any) -> None:
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 (only the server needs it)
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = DomainDispatcherApplication(create_backend_app)

    def far_away(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".jpg"):
            with num_requests.get_lock():
                num_requests.value += 1
            time.sleep(LATENCY_SECONDS)
        return store(environ, start_response)

    server = make_server("127.0.0.1", 0, far_away, threaded=True)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def local_server() -> Iterator[Server]:
    num_requests = multiprocessing.get_context("spawn").Value("Q", 0)
    ours, theirs = multiprocessing.Pipe()
    # A fork is fast, and safe because no threads exist yet.
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(theirs, num_requests), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield Server(f"http://127.0.0.1:{ours.recv()}", num_requests)
    finally:
        process.kill()
        process.join()


async def fill(store: S3Store) -> None:
    """Images of two kinds: reddish with label 0, bluish with label 1."""
    random = np.random.default_rng(0)

    async def put(number: int) -> None:
        pixels = random.integers(0, 128, (96, 96, 3), np.uint8)
        pixels[:, :, 2 * (number % 2)] += 100
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "JPEG")
        await store.put_async(f"train/{number:04}_{number % 2}.jpg", file.getvalue())

    await asyncio.gather(*(put(number) for number in range(NUM_IMAGES)))


def main() -> None:
    with local_server() as server, tempfile.TemporaryDirectory() as directory:
        bucket = urllib.request.Request(f"{server.endpoint}/photos", method="PUT")
        urllib.request.urlopen(bucket).close()
        asyncio.run(fill(server.store()))
        for name in ("first run", "second run"):
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(name, server, directory)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
