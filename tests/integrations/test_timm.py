"""timm's transforms, samplers and loops, and torchvision's reference loop, with our loader."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DistributedSampler
from torchvision import datasets
from torchvision.transforms import v2

from spdl_torch import DataLoader
from tests.conftest import own_worker_names
from tests.integrations import quick

SIZE = 20

pytestmark = [
    pytest.mark.children,
    # timm leaves it to the garbage collector to close files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def photos(tmp_path):
    """A folder of pictures in two classes."""
    rng = np.random.default_rng(0)
    for number in range(SIZE):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number:02}.jpg")
    return tmp_path / "photos"


# -- timm -----------------------------------------------------------------------------------------


@pytest.fixture
def timm():
    module = pytest.importorskip("timm")
    for name in ("timm.data", "timm.loss", "timm.optim"):
        pytest.importorskip(name)
    return module


def like(theirs, **arguments):
    """Our loader in the place of the one that timm's create_loader has made."""
    return DataLoader(
        theirs.dataset,
        theirs.batch_size,
        sampler=theirs.sampler,
        drop_last=theirs.drop_last,
        collate_fn=theirs.collate_fn,
        num_workers=theirs.num_workers,
        worker_init_fn=theirs.worker_init_fn,
        **arguments,
    )


def created(timm, photos, **arguments):
    arguments = {"batch_size": 4, "num_workers": 2, "persistent_workers": False} | arguments
    dataset = timm.data.create_dataset("", root=str(photos), is_training=True)
    return timm.data.create_loader(dataset, 32, device=torch.device("cpu"), **arguments)


def test_evaluation_equals_timms_loader(timm, photos):
    """Evaluation has the batches of timm's loader."""
    theirs = created(timm, photos, use_prefetcher=False)
    for ours, expected in zip(like(theirs), theirs, strict=True):
        assert torch.equal(ours[0], expected[0])
        assert torch.equal(ours[1], expected[1])


@quick
def test_prefetcher_takes_our_loader(timm, photos):
    """timm's prefetcher normalises and erases the batches of our loader."""
    prefetching = created(timm, photos)
    expected = list(prefetching)
    prefetching.loader = like(prefetching.loader)
    found = []
    for images, labels in prefetching:
        found.append((images, labels))
        if len(found) == 1:
            assert "spdl_torch-1" in own_worker_names()
    assert len(found) == len(prefetching) == SIZE // 4
    for (images, labels), (their_images, their_labels) in zip(found, expected, strict=True):
        assert images.dtype == torch.float32
        assert torch.equal(images, their_images)
        assert torch.equal(labels, their_labels)


def test_training_with_mixup_and_augmentation(timm, photos):
    """A model of timm trains with mixup and augmentation."""
    mixup = timm.data.FastCollateMixup(mixup_alpha=0.8, num_classes=2)
    loader = created(
        timm,
        photos,
        is_training=True,
        auto_augment="rand-m9-inc1",
        re_prob=0.25,
        collate_fn=mixup,
    )
    loader.loader = like(loader.loader)
    model = timm.create_model("test_resnet", num_classes=2)
    optimizer = timm.optim.create_optimizer_v2(model, "sgd", lr=0.01)
    criterion = timm.loss.SoftTargetCrossEntropy()
    for epoch in range(2):
        if epoch == 1:
            assert loader.mixup_enabled
            loader.mixup_enabled = False
        for images, targets in loader:
            loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_mixed = bool((targets.max(dim=1).values < 0.9).any())
            assert not (is_mixed and epoch == 1)
        assert loss.isfinite()
    assert own_worker_names() == []


def test_set_epoch_reaches_timms_sampler(timm, photos):
    """set_epoch() reaches a distributed sampler of timm."""
    dataset = timm.data.create_dataset("", root=str(photos), is_training=True)
    dataset.transform = timm.data.create_transform(32, is_training=False)
    sampler = timm.data.distributed_sampler.RepeatAugSampler(
        dataset, num_replicas=2, rank=0, selected_round=0
    )
    loader = DataLoader(dataset, 4, sampler=sampler, num_workers=2)
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append([labels.tolist() for _, labels in loader])
        assert [labels.tolist() for _, labels in loader] == orders[-1]
    assert orders[0] != orders[1]


# -- torchvision's references ---------------------------------------------------------------------


class MetricLogger:
    """As in references/classification/utils.py, in short."""

    def __init__(self):
        self.meters = defaultdict(list)
        self.lines = []

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].append(value)

    def log_every(self, iterable, print_freq, header):
        end = time.time()
        for number, item in enumerate(iterable):
            self.update(data=time.time() - end)
            yield item
            self.update(iter_time=time.time() - end)
            if number % print_freq == 0:
                self.lines.append(f"{header} [{number}/{len(iterable)}]")
            end = time.time()


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, print_freq=2):
    model.train()
    logger = MetricLogger()
    header = f"Epoch: [{epoch}]"
    for image, target in logger.log_every(data_loader, print_freq, header):
        start_time = time.time()
        image, target = image.to(device), target.to(device)  # noqa: PLW2901
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_size = image.shape[0]
        logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        logger.update(samples=batch_size, img_s=batch_size / (time.time() - start_time))
    return logger


@torch.inference_mode()
def evaluate(model, criterion, data_loader, device):
    model.eval()
    logger = MetricLogger()
    num_processed_samples = 0
    for image, target in logger.log_every(data_loader, 100, "Test:"):
        image = image.to(device, non_blocking=True)  # noqa: PLW2901
        target = target.to(device, non_blocking=True)  # noqa: PLW2901
        logger.update(loss=criterion(model(image), target).item())
        num_processed_samples += image.shape[0]
    assert num_processed_samples == len(data_loader.dataset)
    return logger


def test_torchvisions_reference_training_runs(photos):
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(16),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
        ]
    )
    dataset = datasets.ImageFolder(photos, transform)
    mixup = v2.MixUp(num_classes=2)

    def collate_fn(batch):
        return mixup(*torch.utils.data.default_collate(batch))

    sampler = DistributedSampler(dataset, num_replicas=2, rank=1)
    # pin_memory=True is theirs too, which warns where there is no accelerator.
    data_loader = DataLoader(
        dataset, batch_size=4, sampler=sampler, num_workers=2, collate_fn=collate_fn
    )
    data_loader_test = DataLoader(
        dataset, batch_size=4, sampler=torch.utils.data.SequentialSampler(dataset), num_workers=2
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        logger = train_one_epoch(model, criterion, optimizer, data_loader, "cpu", epoch)
        assert logger.meters["samples"] == [4, 4, 2]
        assert logger.lines == [f"Epoch: [{epoch}] [0/3]", f"Epoch: [{epoch}] [2/3]"]
        evaluate(model, criterion, data_loader_test, "cpu")
    assert own_worker_names() == []
