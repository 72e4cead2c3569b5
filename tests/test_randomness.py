"""What samples draw: the same whoever loads them, and nothing from the training loop."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info
from torchvision.transforms import v2

from spdl_torch import DataLoader, DistributedRandomSampler, StagedDataset

SIZE = 12


class Drawing(Dataset):
    """Draws a number in each sample by a function of torch."""

    def __init__(self, draw=lambda: torch.rand(())):
        self.draw = draw

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, self.draw()


def drawn(loader):
    """What each sample of an epoch has drawn."""
    pairs = list(loader)
    indices = torch.cat([indices.reshape(-1) for indices, _ in pairs]).tolist()
    return list(zip(indices, torch.cat([values for _, values in pairs]).tolist(), strict=True))


def loader_of(dataset=None, *, num_workers=2, batch_size=4, seed=5, **arguments):
    return DataLoader(
        Drawing() if dataset is None else dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    )


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_a_sample_draws_the_same_whoever_loads_it_and_with_whom(num_workers, batch_size):
    expected = drawn(loader_of())
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(num_workers=num_workers, batch_size=batch_size)) == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: torch.rand_like(torch.zeros(())),
        lambda: torch.randn(()),
        lambda: torch.randint(1 << 40, ()),
        lambda: torch.randperm(1000)[0],
        lambda: torch.normal(0.0, 1.0, ()),
        lambda: torch.multinomial(torch.ones(1000), 1).squeeze(),
        lambda: torch.empty(()).uniform_(),
        lambda: torch.empty(()).normal_(0, 1),
        lambda: torch.empty((), dtype=torch.int64).random_(),
        lambda: torch.empty(()).exponential_(),
        lambda: torch.full((64,), 0.5).bernoulli().to(torch.int64).sum(),
        lambda: torch.rand((), device="cpu"),
        lambda: torch.rand((), generator=None),
        lambda: torch.distributions.Normal(0.0, 1.0).sample(),
    ],
)
def test_whatever_draws_through_torch_draws_from_the_sample(draw):
    before = torch.get_rng_state()
    values = drawn(loader_of(Drawing(draw), num_workers=8))
    assert len({value for _, value in values}) > SIZE // 4
    assert drawn(loader_of(Drawing(draw), num_workers=1)) == values
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_is_given_is_used():
    def draw():
        return torch.rand((), generator=torch.Generator().manual_seed(3))

    assert {value for _, value in drawn(loader_of(Drawing(draw)))} == {draw().item()}


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_every_epoch_draws_other_numbers(persistent_workers):
    with loader_of(persistent_workers=persistent_workers) as loader:
        epochs = [drawn(loader) for _ in range(3)]
    values = {value for epoch in epochs for _, value in epoch}
    assert len(values) == 3 * SIZE


def test_the_seed_is_drawn_as_torch_draws_it():
    assert drawn(loader_of(seed=5)) != drawn(loader_of(seed=6))


def test_an_index_that_is_drawn_twice_draws_other_numbers():
    values = drawn(loader_of(sampler=[3] * SIZE))
    assert len({value for _, value in values}) == SIZE


def test_augmented_images_are_the_same_for_any_number_of_workers():
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(8),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.RandAugment(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.5),
        ]
    )
    image = torch.arange(3 * 16 * 16, dtype=torch.uint8).reshape(3, 16, 16)

    def epoch(num_workers):
        dataset = Drawing(lambda: transform(image))
        return torch.cat([images for _, images in loader_of(dataset, num_workers=num_workers)])

    one = epoch(1)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(epoch(8), one)


class InStages(StagedDataset):
    def __len__(self):
        return SIZE

    def load(self, index):
        return index, torch.rand(())

    def preprocess(self, raw):
        index, loaded = raw
        return index, torch.stack([loaded, torch.rand(())])


def test_each_stage_draws_its_own_numbers():
    def epoch(num_workers):
        return torch.cat([values for _, values in loader_of(InStages(), num_workers=num_workers)])

    values = epoch(2)
    assert len(set(values.flatten().tolist())) == 2 * SIZE
    assert torch.equal(epoch(7), values)


def test_what_collate_draws_belongs_to_the_batch():
    def collate(samples):
        return torch.tensor([index for index, _ in samples]), torch.rand(len(samples))

    expected = drawn(loader_of(num_workers=1, collate_fn=collate))
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(num_workers=8, collate_fn=collate)) == expected


class DrawingTogether(Drawing):
    def __getitems__(self, indices):
        return list(zip(indices, torch.rand(len(indices)), strict=True))


def test_what_is_loaded_together_draws_together():
    expected = drawn(loader_of(DrawingTogether(), num_workers=1))
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(DrawingTogether(), num_workers=8)) == expected


def test_the_generators_of_the_sample_are_there_for_who_asks():
    def draw():
        rng = get_worker_info().rng
        assert torch.thread_safe_generator() is rng.torch_generator
        first = rng.random_generator.random()
        # They go on from one call to the next.
        assert rng.random_generator.random() != first
        return torch.tensor([first, rng.numpy_generator.random(), rng.numpy_generator.random()])

    def epoch(num_workers):
        dataset = Drawing(draw)
        return torch.cat([values for _, values in loader_of(dataset, num_workers=num_workers)])

    values = epoch(1)
    assert len(set(values.flatten().tolist())) == 3 * SIZE
    assert torch.equal(epoch(8), values)


# -- in the middle of an epoch --------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [0, 1, 2])
@pytest.mark.parametrize("new_batch_size", [4, 5])
def test_a_restored_epoch_goes_on_drawing_the_same(num_batches, new_batch_size):
    loader = loader_of(shuffle=True)
    iterator = iter(loader)
    list(islice(iterator, num_batches))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = drawn(iterator) if num_batches < 3 else []
    resumed = loader_of(shuffle=True, seed=77, num_workers=5, batch_size=new_batch_size)
    resumed.load_state_dict(state)
    assert drawn(resumed) == expected


def test_persistent_workers_go_on_drawing_the_same_in_a_later_epoch():
    with loader_of(persistent_workers=True) as loader:
        drawn(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        expected = drawn(iterator)
    resumed = loader_of(seed=77)
    resumed.load_state_dict(state)
    assert drawn(resumed) == expected


def test_another_number_of_ranks_draws_the_same_for_the_same_samples():
    def loaders(world_size):
        return [
            loader_of(
                batch_size=2,
                sampler=DistributedRandomSampler(
                    SIZE, rank=rank, world_size=world_size, tail="keep"
                ),
            )
            for rank in range(world_size)
        ]

    expected = set(drawn(loaders(1)[0]))
    before = []
    for loader in loaders(2):
        iterator = iter(loader)
        before += drawn(islice(iterator, 1))
        state = loader.state_dict()
    after = []
    for loader in loaders(3):
        loader.load_state_dict(state)
        after += drawn(loader)
    assert len(before) == 4
    assert set(before + after) == expected


# -- iterable datasets ----------------------------------------------------------------------------


class DrawingStream(IterableDataset):
    def __iter__(self):
        first = torch.rand(())
        worker_id = get_worker_info().id
        for number in range(SIZE):
            yield 100 * worker_id + number, torch.rand(()) if number else first


def test_the_workers_of_an_iterable_dataset_draw_the_same_again():
    before = torch.get_rng_state()
    expected = drawn(loader_of(DrawingStream(), num_workers=3))
    assert len({value for _, value in expected}) == 3 * SIZE
    assert drawn(loader_of(DrawingStream(), num_workers=3)) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_the_workers_of_an_iterable_dataset_draw_other_numbers_in_every_epoch(persistent_workers):
    with loader_of(DrawingStream(), persistent_workers=persistent_workers) as loader:
        values = {value for _ in range(2) for _, value in drawn(loader)}
    assert len(values) == 2 * 2 * SIZE


# -- what is left alone ---------------------------------------------------------------------------


def test_without_workers_samples_draw_from_the_global_generator():
    torch.manual_seed(3)
    values = [value for _, value in drawn(loader_of(num_workers=0))]
    torch.manual_seed(3)
    assert values == [torch.rand(()).item() for _ in range(SIZE)]


def test_the_training_loop_draws_from_its_own_generator_meanwhile():
    torch.manual_seed(3)
    values = [torch.rand(()).item() for _ in loader_of()]
    torch.manual_seed(3)
    assert values == [torch.rand(()).item() for _ in range(3)]


def test_a_dataset_of_tensors_is_loaded_as_it_is():
    tensors = torch.arange(SIZE)
    assert [batch[0].tolist() for batch in loader_of(TensorDataset(tensors))] == [
        list(range(first, first + 4)) for first in range(0, SIZE, 4)
    ]
