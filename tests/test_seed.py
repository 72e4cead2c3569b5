"""`seed=`: bit-identical samples with every kind of workers."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchvision.transforms import v2

import spdl_torch
from spdl_torch import DataLoader, DistributedRandomSampler, StagedDataset

from .tiers import pairwise, sampled

SIZE = 11
ALL_WORKERS = [
    pytest.param({"num_workers": 0}, id="calling thread"),
    pytest.param({"num_workers": 1}, id="1 thread"),
    pytest.param({"num_workers": 2}, id="2 threads"),
    pytest.param({"num_workers": 8, "prefetch_factor": 1}, id="8 threads"),
    pytest.param({"num_workers": 32}, id="32 threads"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent threads"),
    pytest.param({"num_workers": 2, "copy_dataset": True}, id="copied dataset"),
    pytest.param({"num_workers": 2, "worker_method": "multiprocessing"}, id="processes"),
    pytest.param(
        {"num_workers": 2, "worker_method": "multiprocessing", "persistent_workers": True},
        id="persistent processes",
    ),
]
all_workers = pytest.mark.parametrize("workers", ALL_WORKERS)
WORKERS = {param.id: param.values[0] for param in ALL_WORKERS}


@pytest.fixture(scope="module")
def executors():
    with ProcessPoolExecutor(2) as processes, ThreadPoolExecutor(3) as threads:
        yield {"processes": processes, "threads": threads}


def epochs(dataset, workers, num_epochs=2, *, batch_size=3, seed=7, shuffle=True, **arguments):
    """The batches of some epochs."""
    with DataLoader(
        dataset, batch_size=batch_size, seed=seed, shuffle=shuffle, **workers, **arguments
    ) as loader:
        return [list(loader) for _ in range(num_epochs)]


def flat(batches):
    """All numbers of some batches, in order."""
    if isinstance(batches, torch.Tensor):
        return batches.flatten().tolist()
    return [number for batch in batches for number in flat(batch)]


@pytest.mark.parametrize("num_batches", [0, 2, 4])
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_copy_continues_with_next_epoch(clone, num_batches):
    """A copy of a loader begins with the epoch that the loader would begin."""
    arguments = {"batch_size": 3, "seed": 7, "shuffle": True, "num_workers": 2}
    expected = epochs(range(SIZE), {"num_workers": 2}, 4)
    loader = DataLoader(range(SIZE), **arguments)
    list(loader)
    iterator = iter(loader)
    for _ in range(num_batches):
        next(iterator)
    next_epoch = 1 if num_batches == 0 else 2
    assert flat(list(clone(loader))) == flat(expected[next_epoch])


# -- what is drawn --------------------------------------------------------------------------------

AUGMENTATIONS = {
    "v1 on PIL": v1.Compose(
        [
            v1.RandomChoice([v1.Pad(padding) for padding in range(4)]),
            v1.RandomOrder([v1.RandomRotation(30), v1.CenterCrop(18)]),
            v1.RandomResizedCrop(12),
            v1.RandomHorizontalFlip(),
            v1.RandomVerticalFlip(),
            v1.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v1.RandAugment(),
            v1.ToTensor(),
            v1.RandomErasing(0.5),
        ]
    ),
    "v2": v2.Compose(
        [
            v2.RandomResizedCrop(12),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandAugment(),
            v2.AugMix(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.5),
        ]
    ),
}


class Augmented(Dataset):
    def __init__(self, transform):
        self.transform = AUGMENTATIONS[transform]
        pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        self.image = Image.fromarray(pixels)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.transform(self.image), index


@pytest.fixture(scope="module", params=AUGMENTATIONS)
def augmented(request):
    """A dataset, and two epochs of it in the calling thread."""
    dataset = Augmented(request.param)
    return dataset, epochs(dataset, {"num_workers": 0})


@all_workers
def test_augmented_images_are_bit_identical(augmented, workers):
    """All kinds of workers make the images of the calling thread."""
    dataset, expected = augmented
    for ours, theirs in zip(epochs(dataset, workers), expected, strict=True):
        for (images, labels), (expected_images, expected_labels) in zip(ours, theirs, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)


def test_unordered_batches_are_bit_identical(augmented):
    """With `in_order=False` the same batches arrive in any order."""
    dataset, expected = augmented
    batches = epochs(dataset, {"num_workers": 8}, in_order=False)
    assert [sorted(map(flat, epoch)) for epoch in batches] == [
        sorted(map(flat, epoch)) for epoch in expected
    ]


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_executors_make_identical_images(augmented, executors, kind):
    """Executors with threads and with processes make the images of the calling thread."""
    dataset, expected = augmented
    workers = {"num_workers": 2, "preprocess_executor": executors[kind]}
    assert flat(epochs(dataset, workers)) == flat(expected)


def test_every_sample_draws_its_own(augmented):
    """Each sample of each epoch is augmented differently, and each epoch has another order."""
    _, expected = augmented
    images = [tuple(image.flatten().tolist()) for e in expected for b, _ in e for image in b]
    assert len(set(images)) == 2 * SIZE
    orders = [[label.item() for _, labels in epoch for label in labels] for epoch in expected]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(SIZE))


def test_another_seed_changes_the_images(augmented):
    """Another seed makes other images."""
    dataset, expected = augmented
    assert flat(epochs(dataset, {"num_workers": 2}, seed=8)) != flat(expected)


@all_workers
def test_global_generators_are_left_alone(workers):
    """An epoch advances torch's global RNG by one draw, as in torch, and no other generator."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    epochs(Augmented("v2"), workers, num_epochs=1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    # torch's constructor draws a seed for workers from its generator, wanted or not.
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()
    after_one_draw = torch.get_rng_state().tolist()
    torch.manual_seed(1)
    epochs(Augmented("v2"), workers, num_epochs=1)
    assert torch.get_rng_state().tolist() == after_one_draw


# -- all kinds of datasets ------------------------------------------------------------------------


class InStages(StagedDataset):
    def __len__(self):
        return SIZE

    def load(self, index):
        return torch.stack([torch.tensor(float(index)), torch.rand(())])

    def preprocess(self, raw):
        return torch.cat([raw, torch.rand(1)])

    def collate(self, samples):
        return torch.stack(samples), torch.rand(())


class InStagesAsync(InStages):
    async def load(self, index):
        import asyncio  # noqa: PLC0415

        first = torch.rand(())
        for _ in range(index % 3):
            await asyncio.sleep(0)
        # Other samples may have drawn meanwhile.
        return torch.stack([torch.tensor(float(index)), first + torch.rand(())])


class Many(InStages):
    def load_many(self, indices):
        return [torch.stack([torch.tensor(float(i)), torch.rand(())]) for i in indices]


class ManyAsync(InStages):
    async def load_many(self, indices):
        return [torch.stack([torch.tensor(float(i)), torch.rand(())]) for i in indices]


class AtOnce(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(())])

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Elsewhere(Dataset):
    """Draws from numpy's and Python's generators, several times."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        first, second = spdl_torch.sample_rng(), spdl_torch.sample_rng()
        return torch.tensor(
            [index, first.numpy.random(), first.random.random(), second.numpy.random()],
            dtype=torch.float64,
        )


class ImageAndMask(Dataset):
    """Seeds torch to do the same to both."""

    transform = v2.RandomCrop(4)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        image = torch.arange(400.0).reshape(1, 20, 20)
        seed = torch.randint(1 << 30, ()).item()
        torch.manual_seed(seed)
        first = self.transform(image)
        torch.manual_seed(seed)
        return first, self.transform(image)


class Forking(Dataset):
    """Draws something twice by putting torch's state back."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        with torch.random.fork_rng():
            first = torch.rand(())
        return torch.stack([first, torch.rand(())])


DATASETS = {
    type(dataset).__name__: dataset
    for dataset in (
        InStages(),
        InStagesAsync(),
        Many(),
        ManyAsync(),
        AtOnce(),
        Subset(InStages(), [9, 3, 1, 4, 10]),
        Elsewhere(),
        ImageAndMask(),
        Forking(),
    )
}


@pytest.fixture(scope="module")
def expected_bits():
    """Two epochs of each dataset in the calling thread."""
    return {name: flat(epochs(dataset, {"num_workers": 0})) for name, dataset in DATASETS.items()}


@pytest.mark.parametrize(
    "case", sampled([f"{name} in {workers}" for name in DATASETS for workers in WORKERS], every=4)
)
def test_all_datasets_draw_identical_bits(expected_bits, case):
    """All kinds of workers make samples of every kind of dataset as the calling thread does."""
    name, _, workers = case.partition(" in ")
    assert flat(epochs(DATASETS[name], WORKERS[workers])) == expected_bits[name]


@pytest.mark.parametrize("name", DATASETS)
def test_executors_draw_identical_bits(expected_bits, executors, name):
    """A process pool makes samples of every kind of dataset as the calling thread does."""
    workers = {"num_workers": 2, "preprocess_executor": executors["processes"]}
    assert flat(epochs(DATASETS[name], workers)) == expected_bits[name]


def test_async_load_draws_in_calling_thread():
    """An async load in the calling thread draws per sample, also after a call outside of any
    loader.
    """
    dataset = InStagesAsync()
    expected = flat(epochs(dataset, {"num_workers": 2}))
    dataset[0]  # Outside of any loader, in an event loop of this thread.
    assert flat(epochs(dataset, {"num_workers": 0})) == expected


@all_workers
def test_unbatched_samples_are_bit_identical(workers):
    """With `batch_size=None` all kinds of workers make the same samples."""
    dataset = AtOnce()
    expected = flat(epochs(dataset, {"num_workers": 0}, batch_size=None))
    assert len(set(expected[1::2])) == 2 * SIZE
    assert flat(epochs(dataset, workers, batch_size=None)) == expected


@all_workers
def test_image_and_mask_are_cropped_alike(workers):
    """`torch.manual_seed()` in a sample repeats what the sample drew."""
    for epoch in epochs(ImageAndMask(), workers):
        for images, masks in epoch:
            assert torch.equal(images, masks)


def test_masks_are_cropped_alike_without_seed():
    """`torch.manual_seed()` in a sample acts on its RNG without a `seed` too."""
    for images, masks in DataLoader(ImageAndMask(), batch_size=3, num_workers=4):
        assert torch.equal(images, masks)


@all_workers
def test_collate_draws_are_bit_identical(workers):
    """A collate function draws the same numbers with all kinds of workers."""
    dataset = TensorDataset(torch.arange(float(SIZE)))
    expected = flat(epochs(dataset, {"num_workers": 0}, collate_fn=_mixed))
    assert flat(epochs(dataset, workers, collate_fn=_mixed)) == expected


def _mixed(samples):
    return torch.stack([sample[0] for sample in samples]) * torch.rand(())


class Streamed(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SIZE, step):
            yield torch.tensor([index, torch.rand(()), spdl_torch.sample_rng().numpy.random()])


@pytest.mark.parametrize(
    ("some", "others"),
    [
        ({"num_workers": 0}, {"num_workers": 1}),
        ({"num_workers": 1}, {"num_workers": 1, "worker_method": "multiprocessing"}),
        ({"num_workers": 2}, {"num_workers": 2, "worker_method": "multiprocessing"}),
        (
            {"num_workers": 2, "persistent_workers": True},
            {"num_workers": 2, "worker_method": "multiprocessing", "persistent_workers": True},
        ),
        ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 2}),
    ],
)
def test_iterable_datasets_are_bit_identical(some, others):
    """The same number of threads and of processes reads the same samples."""
    expected = epochs(Streamed(), some, shuffle=None)
    assert flat(epochs(Streamed(), others, shuffle=None)) == flat(expected)
    assert flat(expected[0]) != flat(expected[1])


# -- the order ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(range(SIZE)),
        lambda: RandomSampler(range(SIZE), replacement=True, num_samples=40),
        lambda: WeightedRandomSampler(torch.ones(SIZE), 20),
        lambda: SubsetRandomSampler(range(SIZE)),
        lambda: DistributedRandomSampler(SIZE, seed=3),
    ],
    ids=["random", "with replacement", "weighted", "subset", "ours"],
)
@pytest.mark.parametrize("num_workers", [0, 3])
def test_samplers_follow_the_seed(sampler, num_workers):
    """Samplers that draw from torch have the order of the seed, and another one in each epoch."""
    torch.manual_seed(1)
    first = epochs(range(SIZE), {"num_workers": num_workers}, shuffle=None, sampler=sampler())
    torch.manual_seed(2)
    again = epochs(range(SIZE), {"num_workers": 0}, shuffle=None, sampler=sampler())
    assert flat(first) == flat(again)
    assert flat(first[0]) != flat(first[1])


# -- epochs ---------------------------------------------------------------------------------------


@all_workers
def test_set_epoch_chooses_the_epoch(workers):
    """`set_epoch()` chooses order and draws, and later epochs count from there."""
    with DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, **workers) as loader:
        expected = [flat(list(loader)) for _ in range(3)]
        for epoch in (2, 0, 1):
            loader.set_epoch(epoch)
            assert flat(list(loader)) == expected[epoch]
        # And the count goes on from there.
        assert flat(list(loader)) == expected[2]


def test_set_epoch_works_after_iter():
    """`set_epoch()` between `iter()` and the first batch still counts."""
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=4)
    loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    iterator = iter(loader)
    loader.set_epoch(2)
    assert flat(list(iterator)) == flat(expected[2])
    assert flat(list(loader)) == flat(expected[3])


def test_an_unused_iterator_takes_no_epoch():
    """An iterator without a `next()` does not count as an epoch."""
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=1)
    loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    iter(loader)
    assert flat(list(loader)) == flat(expected[0])


def test_an_abandoned_epoch_counts():
    """After a `break` the next epoch has the next number."""
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=2)
    loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    next(iter(loader))
    assert flat(list(loader)) == flat(expected[1])


@pytest.mark.parametrize(
    ("workers", "resumed_in", "num_before"), pairwise(WORKERS, [0, 3], [0, 2, 4])
)
def test_a_resumed_run_is_bit_identical(workers, resumed_in, num_before):
    """A checkpoint of one kind of workers is resumed by another with the same samples."""
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=3)
    with DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, **WORKERS[workers]) as loader:
        list(loader)
        iterator = iter(loader)
        for _ in range(num_before):
            next(iterator)
        state = loader.state_dict()
        del iterator
    with DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=resumed_in) as loader:
        loader.load_state_dict(state)
        assert flat(list(loader)) == flat(expected[1][num_before:])
        assert flat(list(loader)) == flat(expected[2])


def test_states_between_epochs_resume_identically():
    """A checkpoint from between two epochs resumes with the next epoch."""
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=3)
    loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    states = [loader.state_dict()]
    for _ in range(2):
        list(loader)
        states.append(loader.state_dict())
    for state, epoch in zip(states, expected, strict=True):
        loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=1)
        loader.load_state_dict(state)
        assert flat(list(loader)) == flat(epoch)


# -- without a seed -------------------------------------------------------------------------------


class Inside(Dataset):
    """A sample that is made by a loader of its own."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        inner = DataLoader(ThreadSafe(), batch_size=None, seed=index)
        return torch.stack([*inner, torch.rand(())])


class ThreadSafe(AtOnce):
    def __getitem__(self, index):
        return torch.rand((), generator=torch.thread_safe_generator())


@all_workers
def test_nested_loaders_are_bit_identical(workers):
    """A loader inside a sample draws from its own seed, and the sample from its own."""
    expected = flat(epochs(Inside(), {"num_workers": 0}))
    assert len(set(expected)) > 2 * SIZE
    assert flat(epochs(Inside(), workers)) == expected


def test_without_seed_draws_match_torch():
    """With `num_workers=0` and no seed the batches are those of torch's loader."""
    torch.manual_seed(3)
    ours = list(DataLoader(AtOnce(), batch_size=3, shuffle=True))
    torch.manual_seed(3)
    theirs = list(torch.utils.data.DataLoader(AtOnce(), batch_size=3, shuffle=True))
    assert flat(ours) == flat(theirs)


def test_sample_rng_falls_back_to_torch():
    """Outside of a sample, `sample_rng()` is seeded from torch's global RNG."""
    torch.manual_seed(3)
    first = spdl_torch.sample_rng()
    torch.manual_seed(3)
    second = spdl_torch.sample_rng()
    assert first.numpy.random() == second.numpy.random()
    assert first.random.random() == second.random.random()
    assert spdl_torch.sample_rng().numpy.random() != first.numpy.random()


class WorkerSeed(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([get_worker_info().seed, int(np.random.randint(1 << 30))])


def test_process_seeds_change_every_epoch():
    """Worker processes have other seeds in each epoch, and the same ones in each run."""
    workers = {"num_workers": 1, "worker_method": "multiprocessing"}
    first, second = epochs(WorkerSeed(), workers)
    assert not set(flat(first)) & set(flat(second))
    assert flat(epochs(WorkerSeed(), workers)) == flat([first, second])


@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_numpy_indices_draw_the_same(kind):
    """The integer type of an index does not change what its sample draws."""
    sampler = [kind(n) for n in range(SIZE)]
    numpys = flat(epochs(AtOnce(), {"num_workers": 2}, shuffle=None, sampler=sampler))
    assert numpys == flat(epochs(AtOnce(), {"num_workers": 2}, shuffle=None))


@pytest.mark.parametrize("function", [torch.seed, torch.initial_seed])
def test_seeding_functions_act_on_samples(function):
    """`torch.seed()` and `torch.initial_seed()` act on the RNG of the sample."""

    class Seeding(AtOnce):
        def __getitem__(self, index):
            seeds.append(function())
            return torch.tensor(index)

    seeds = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(DataLoader(Seeding(), num_workers=2, generator=torch.Generator()))
    assert len(set(seeds)) == SIZE
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 5


def test_set_epoch_works_after_state_dict():
    """A checkpoint does not fix the next epoch, and `set_epoch()` may name the resumed one
    again.
    """
    expected = epochs(AtOnce(), {"num_workers": 0}, num_epochs=4)
    loader = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    loader.state_dict()
    loader.set_epoch(3)
    assert flat(list(loader)) == flat(expected[3])
    loader.set_epoch(1)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    state = loader.state_dict()
    again = DataLoader(AtOnce(), batch_size=3, shuffle=True, seed=7, num_workers=2)
    again.load_state_dict(state)
    again.set_epoch(1)  # The one it is in, as a loop over epochs does after a restart.
    assert flat([*first, *again]) == flat(expected[1])


def test_worker_processes_see_the_dataset():
    """`get_worker_info().dataset` in a worker process is the user's dataset."""
    (name,) = set(flat(epochs(Shown(), {"num_workers": 1, "worker_method": "multiprocessing"})))
    assert name == 1


class Shown(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.tensor(type(get_worker_info().dataset) is Shown)


@pytest.mark.parametrize("seed", [2.5, "7"])
def test_a_seed_is_an_int(seed):
    """Other types than int are refused."""
    with pytest.raises(TypeError, match="seed must be an int"):
        DataLoader(AtOnce(), seed=seed)


def test_seed_and_generator_exclude_each_other():
    """`seed` together with `generator` is refused."""
    with pytest.raises(ValueError, match="Leave out one of them"):
        DataLoader(AtOnce(), seed=1, generator=torch.Generator())


def test_distributed_sampler_keeps_its_seed():
    """torch's `DistributedSampler` has a seed of its own, which the ranks share."""
    sampler = DistributedSampler(range(SIZE), num_replicas=2, rank=0, seed=5)
    first = flat(epochs(range(SIZE), {"num_workers": 2}, 1, shuffle=None, sampler=sampler))
    assert first == list(sampler)
