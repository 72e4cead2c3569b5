"""Train on images in an S3-compatible store, with 64 requests in flight and retries.

    pip install obstore 'moto[server]'
    python examples/train_from_s3.py
    python examples/train_from_s3.py --endpoint https://HOST --bucket NAME --prefix train/

With an endpoint, keys and region come from the environment (AWS_ACCESS_KEY_ID, …), and the names
of the objects end in their labels, as in `train/0042_1.png`. Without an endpoint, a local server is
started that answers after 30 ms, and now and then after 300 ms or with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import multiprocessing
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.utils.data
from obstore.exceptions import GenericError
from obstore.store import S3Store
from torch import nn

from spdl_torch import DataLoader, ImageLoader, RetryLoad, StagedDataset

NUM_REQUESTS = 64
BATCH_SIZE = 32
Sample = tuple[torch.Tensor, int]


class Photos(StagedDataset[Sample]):
    """Labelled images in a store."""

    def __init__(self, store: S3Store, keys: list[str]) -> None:
        self.store, self.keys = store, keys
        self.images = ImageLoader(size=32)

    def __len__(self) -> int:
        return len(self.keys)

    async def load(self, index: int) -> tuple[str, bytes]:
        key = self.keys[index]
        answer = await self.store.get_async(key)
        return key, bytes(await answer.bytes_async())

    def preprocess(self, raw: tuple[str, bytes]) -> Sample:
        key, data = raw
        label = int(PurePosixPath(key).stem.rpartition("_")[2])
        return self.images.decode(data, key).float() / 255, label


class PhotosByBatch(Photos):
    """The same dataset with all requests of a batch in one call.

    This is the best way in torch's worker processes, each of which has one batch at a time.
    """

    async def load_many(self, indices: list[int]) -> list[tuple[str, bytes]]:
        return await asyncio.gather(*(self.load_again(index) for index in indices))

    async def load_again(self, index: int) -> tuple[str, bytes]:
        for pause_seconds in (0.1, 0.2, 0.4):
            try:
                return await self.load(index)
            except GenericError:
                await asyncio.sleep(pause_seconds)
        return await self.load(index)


Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def train(batches: Batches) -> float:
    """Train two epochs, and return the accuracy of the second."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(2):
        num_samples = num_correct = 0
        for images, labels in batches:
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_samples += len(labels)
            num_correct += int((scores.argmax(1) == labels).sum())
    return num_correct / num_samples


def samples_per_second(batches: Batches) -> float:
    """Return the throughput of an epoch that only loads, without a model."""
    started = time.perf_counter()
    num_samples = sum(len(labels) for _, labels in batches)
    return num_samples / (time.perf_counter() - started)


def compare(store: S3Store, prefix: str) -> None:
    keys = sorted(meta["path"] for chunk in store.list(prefix) for meta in chunk)
    loader: DataLoader[Any] = DataLoader(
        Photos(store, keys),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        num_io_workers=NUM_REQUESTS,
        multiprocessing_context="spawn",  # The client's threads do not survive a fork.
        # Raised by this client for answers like 503 and for broken connections. A missing object is
        # a FileNotFoundError, which a retry would not change.
        on_error=RetryLoad(attempts=5, exceptions=(GenericError,)),
    )
    correct, speed = train(loader), samples_per_second(loader)
    print(f"spdl_torch: {correct:.0%} correct, {speed:.0f} images/s, {loader.num_retries} retries")
    print(loader.stats().verdict)
    loader.close()

    torch_loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        PhotosByBatch(store, keys),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=2,  # 2 × 32 = 64 requests in flight here too.
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    correct, speed = train(torch_loader), samples_per_second(torch_loader)
    print(f"torch: {correct:.0%} correct, {speed:.0f} images/s")


# -- a local store ---------------------------------------------------------------------------


def serve(port: Connection, latency_seconds: float) -> None:
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 (not needed with --endpoint)
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = DomainDispatcherApplication(create_backend_app)
    requests = count(1)

    def far_away(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] == "GET":
            number = next(requests)
            time.sleep(10 * latency_seconds if number % 20 == 0 else latency_seconds)
            if number % 49 == 0:
                start_response("503 Slow Down", [("Content-Length", "0")])
                return []
        return store(environ, start_response)

    server = make_server("127.0.0.1", 0, far_away, threaded=True)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def local_endpoint() -> Iterator[str]:
    ours, servers = multiprocessing.Pipe()
    # A fork is fast, and safe because no threads exist yet.
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(servers, 0.03), daemon=True
    )
    server.start()
    servers.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        server.kill()
        server.join()


async def fill(store: S3Store, num_images: int) -> None:
    """Images of two kinds: reddish with label 0, bluish with label 1."""
    random = np.random.default_rng(0)

    async def put(number: int) -> None:
        pixels = random.integers(0, 128, (48, 48, 3), np.uint8)
        pixels[:, :, 2 * (number % 2)] += 100
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG")
        await store.put_async(f"train/{number:04}_{number % 2}.png", file.getvalue())

    await asyncio.gather(*(put(number) for number in range(num_images)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--endpoint")
    parser.add_argument("--bucket", default="photos")
    parser.add_argument("--prefix", default="train/")
    options = parser.parse_args()
    # No retries by the client: the loader retries, and counts them.
    if options.endpoint is not None:
        store = S3Store(options.bucket, endpoint=options.endpoint, retry_config={"max_retries": 0})
        compare(store, options.prefix)
        return
    with local_endpoint() as endpoint:
        bucket = urllib.request.Request(f"{endpoint}/{options.bucket}", method="PUT")
        urllib.request.urlopen(bucket).close()
        store = S3Store(
            options.bucket,
            endpoint=endpoint,
            region="us-east-1",
            access_key_id="any",
            secret_access_key="any",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        asyncio.run(fill(store, num_images=256))
        compare(store, options.prefix)


if __name__ == "__main__":
    main()
