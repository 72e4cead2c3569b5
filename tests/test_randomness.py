"""What samples draw: the same with any workers, and nothing from the training loop's RNG."""

from __future__ import annotations

import inspect
import json
from itertools import islice

import pytest
import torch
import torch.distributions as D  # noqa: N812 (as in torch's docs)
from torch import nn
from torch.nn import init
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
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
def test_draws_do_not_depend_on_workers(num_workers, batch_size):
    """A sample draws the same numbers for any number of workers and any batch size."""
    expected = drawn(loader_of())
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(num_workers=num_workers, batch_size=batch_size)) == expected


def half(size=64):
    return torch.full((size,), 0.5)


FUNCTIONS = {
    "torch._sample_dirichlet": lambda: torch._sample_dirichlet(half(2))[0],
    "torch._standard_gamma": lambda: torch._standard_gamma(half(1)).sum(),
    "torch.bernoulli": lambda: torch.bernoulli(half()).sum(),
    "torch.binomial": lambda: torch.binomial(torch.full((64,), 9.0), half()).sum(),
    "torch.multinomial": lambda: torch.multinomial(torch.ones(1000), 1).squeeze(),
    "torch.normal": lambda: torch.normal(0.0, 1.0, ()),
    "torch.poisson": lambda: torch.poisson(torch.full((64,), 9.0)).sum(),
    "torch.rand": lambda: torch.rand(()),
    "torch.rand_like": lambda: torch.rand_like(torch.zeros(())),
    "torch.randint": lambda: torch.randint(1 << 40, ()),
    "torch.randint_like": lambda: torch.randint_like(torch.zeros(()), 1000),
    "torch.randn": lambda: torch.randn(()),
    "torch.randn_like": lambda: torch.randn_like(torch.zeros(())),
    "torch.randperm": lambda: torch.randperm(1000)[0],
    "torch.rrelu": lambda: torch.rrelu(-half(), training=True).sum(),
    "torch.rrelu_": lambda: torch.rrelu_(-half(), training=True).sum(),
    "Tensor.bernoulli": lambda: half().bernoulli().sum(),
    "Tensor.bernoulli_": lambda: half().bernoulli_().sum(),
    "Tensor.cauchy_": lambda: half(1).cauchy_().sum(),
    "Tensor.exponential_": lambda: half(1).exponential_().sum(),
    "Tensor.geometric_": lambda: half().geometric_(0.1).sum(),
    "Tensor.log_normal_": lambda: half(1).log_normal_().sum(),
    "Tensor.multinomial": lambda: torch.ones(1000).multinomial(1).squeeze(),
    "Tensor.normal_": lambda: half(1).normal_(0, 1).sum(),
    "Tensor.random_": lambda: torch.empty((), dtype=torch.int64).random_(),
    "Tensor.uniform_": lambda: half(1).uniform_().sum(),
    "functional.rrelu_": lambda: nn.functional.rrelu_(-half(), training=True).sum(),
    "init.kaiming_normal_": lambda: init.kaiming_normal_(torch.empty(2, 2)).sum(),
    "init.kaiming_uniform_": lambda: init.kaiming_uniform_(torch.empty(2, 2)).sum(),
    "init.normal_": lambda: init.normal_(torch.empty(2)).sum(),
    "init.orthogonal_": lambda: init.orthogonal_(torch.empty(2, 2))[0, 0],
    "init.sparse_": lambda: init.sparse_(torch.empty(2, 2), 0.5).sum(),
    "init.trunc_normal_": lambda: init.trunc_normal_(torch.empty(2)).sum(),
    "init.uniform_": lambda: init.uniform_(torch.empty(2)).sum(),
    "init.xavier_normal_": lambda: init.xavier_normal_(torch.empty(2, 2)).sum(),
    "init.xavier_uniform_": lambda: init.xavier_uniform_(torch.empty(2, 2)).sum(),
}
NOT_FOR_CPU = {"torch._fused_dropout"}
WITHOUT_GENERATOR = {  # The docs name them among what is not covered.
    "functional.alpha_dropout",
    "functional.dropout",
    "functional.dropout1d",
    "functional.dropout2d",
    "functional.dropout3d",
    "functional.feature_alpha_dropout",
    "functional.fractional_max_pool2d_with_indices",
    "functional.fractional_max_pool3d_with_indices",
    "functional.gumbel_softmax",
    "functional.multi_head_attention_forward",
    "functional.rrelu",
    "functional.scaled_dot_product_attention",
    "torch.alpha_dropout",
    "torch.alpha_dropout_",
    "torch.dropout",
    "torch.dropout_",
    "torch.feature_alpha_dropout",
    "torch.feature_alpha_dropout_",
    "torch.feature_dropout",
    "torch.feature_dropout_",
    "torch.gru",
    "torch.lstm",
    "torch.miopen_rnn",
    "torch.native_dropout",
    "torch.rnn_relu",
    "torch.rnn_tanh",
}
ARGUMENTS = [
    lambda: torch.rand((), device="cpu"),
    lambda: torch.rand((), generator=None),
    lambda: torch.bernoulli(input=half()).sum(),
]

ONE, ONES, EYE = torch.ones(()), torch.ones(2), torch.eye(2)
DISTRIBUTIONS = {
    "Bernoulli": lambda: D.Bernoulli(half()),
    "Beta": lambda: D.Beta(ONE, ONE),
    "Binomial": lambda: D.Binomial(1000, half()),
    "Categorical": lambda: D.Categorical(torch.ones(1000)),
    "Cauchy": lambda: D.Cauchy(ONE, ONE),
    "Chi2": lambda: D.Chi2(ONE),
    "ContinuousBernoulli": lambda: D.ContinuousBernoulli(half(1)),
    "Dirichlet": lambda: D.Dirichlet(ONES),
    "Exponential": lambda: D.Exponential(ONE),
    "FisherSnedecor": lambda: D.FisherSnedecor(ONE, ONE),
    "Gamma": lambda: D.Gamma(ONE, ONE),
    "GeneralizedPareto": lambda: D.GeneralizedPareto(ONE, ONE, ONE),
    "Geometric": lambda: D.Geometric(half()),
    "Gumbel": lambda: D.Gumbel(ONE, ONE),
    "HalfCauchy": lambda: D.HalfCauchy(ONE),
    "HalfNormal": lambda: D.HalfNormal(ONE),
    "Independent": lambda: D.Independent(D.Normal(ONES, ONES), 1),
    "InverseGamma": lambda: D.InverseGamma(ONE, ONE),
    "Kumaraswamy": lambda: D.Kumaraswamy(ONE, ONE),
    "LKJCholesky": lambda: D.LKJCholesky(3, ONE),
    "Laplace": lambda: D.Laplace(ONE, ONE),
    "LogNormal": lambda: D.LogNormal(ONE, ONE),
    "LogisticNormal": lambda: D.LogisticNormal(ONES, ONES),
    "LowRankMultivariateNormal": lambda: D.LowRankMultivariateNormal(ONES, EYE, ONES),
    "MixtureSameFamily": lambda: D.MixtureSameFamily(D.Categorical(ONES), D.Normal(ONES, ONES)),
    "Multinomial": lambda: D.Multinomial(1000, ONES),
    "MultivariateNormal": lambda: D.MultivariateNormal(ONES, EYE),
    "NegativeBinomial": lambda: D.NegativeBinomial(1000, half(1)),
    "Normal": lambda: D.Normal(0.0, 1.0),
    "OneHotCategorical": lambda: D.OneHotCategorical(torch.ones(1000)),
    "OneHotCategoricalStraightThrough": lambda: D.OneHotCategoricalStraightThrough(
        torch.ones(1000)
    ),
    "Pareto": lambda: D.Pareto(ONE, ONE),
    "Poisson": lambda: D.Poisson(torch.full((64,), 9.0)),
    "RelaxedBernoulli": lambda: D.RelaxedBernoulli(ONE, half(1)),
    "RelaxedOneHotCategorical": lambda: D.RelaxedOneHotCategorical(ONE, ONES),
    "StudentT": lambda: D.StudentT(ONE),
    "TransformedDistribution": lambda: D.TransformedDistribution(
        D.Normal(ONE, ONE), D.ExpTransform()
    ),
    "Uniform": lambda: D.Uniform(ONE, 2 * ONE),
    "VonMises": lambda: D.VonMises(ONE, ONE),
    "Weibull": lambda: D.Weibull(ONE, ONE),
    "Wishart": lambda: D.Wishart(2 * ONE, EYE),
}


def sampled_by(make):
    def draw():
        sample = make().sample().double().flatten()
        return (sample * torch.arange(1, len(sample) + 1)).sum()

    return draw


def drawing_functions():
    """Return the names of torch's drawing functions that take a generator, and of the others."""
    drawing, with_generator = set(), set()
    for schema in torch._C._jit_get_all_schemas():
        library, _, name = schema.name.partition("::")
        overloads = getattr(torch.ops.aten, name, None) if library == "aten" else None
        overload = getattr(overloads, schema.overload_name or "default", None)
        if overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
            drawing.add(name)
            if any(argument.name == "generator" for argument in schema.arguments):
                with_generator.add(name)
    found = set(), set()
    owners = {"torch": torch, "Tensor": torch.Tensor, "functional": nn.functional, "init": init}
    for owner, namespace in owners.items():
        for name in dir(namespace):
            function = getattr(namespace, name)
            if inspect.isfunction(function):
                takes = inspect.signature(function, follow_wrapped=False).parameters
                draws = "generator" in takes or drawing.intersection(function.__code__.co_names)
                if draws and not name.startswith("_"):
                    found["generator" not in takes].add(f"{owner}.{name}")
            elif inspect.isroutine(function) and name in with_generator:
                found[0].add(f"{owner}.{name}")
            elif inspect.isroutine(function) and name in drawing and not name.startswith("_"):
                found[1].add(f"{owner}.{name}")
    return found


def test_every_drawing_function_is_known():
    """Every function of torch that draws is tested below, or takes no generator."""
    with_generator, without_generator = drawing_functions()
    assert with_generator == FUNCTIONS.keys() | NOT_FOR_CPU
    assert without_generator == WITHOUT_GENERATOR


def test_every_distribution_is_known():
    """The tests below draw from every distribution of torch that can be made."""
    found = {name: getattr(D, name) for name in D.__all__}
    assert DISTRIBUTIONS.keys() == {
        name
        for name, value in found.items()
        if inspect.isclass(value)
        and issubclass(value, D.Distribution)
        and value not in (D.Distribution, D.ExponentialFamily)
    }


@pytest.mark.parametrize(
    "draw",
    [
        *(pytest.param(draw, id=name) for name, draw in FUNCTIONS.items()),
        *(pytest.param(sampled_by(make), id=name) for name, make in DISTRIBUTIONS.items()),
        *ARGUMENTS,
    ],
)
@pytest.mark.filterwarnings("ignore:Singular sample")  # Of a Wishart distribution, always.
def test_every_torch_function_draws_per_sample(draw):
    """Every function of torch that draws uses the RNG of the sample, and not the global one."""
    before = torch.get_rng_state()
    values = drawn(loader_of(Drawing(draw), num_workers=8))
    assert len({value for _, value in values}) > SIZE // 4
    assert drawn(loader_of(Drawing(draw), num_workers=1)) == values
    assert torch.equal(torch.get_rng_state(), before)


class Recorded(torch.Tensor):
    """Remembers what it is drawn with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.bernoulli, init.uniform_):
            cls.generators.append(kwargs.get("generator") if kwargs else None)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "draw",
    [torch.bernoulli, lambda tensor: torch.bernoulli(input=tensor), init.uniform_],
    ids=["by position", "by name", "init"],
)
def test_devices_draw_from_their_own(draw):
    """A draw into a tensor on another device does not get the generator of the CPU."""

    def given(device):
        Recorded.generators = []
        dataset = Drawing(lambda: draw(half().to(device).as_subclass(Recorded)).shape)
        list(loader_of(dataset, batch_size=None))
        return {type(generator) for generator in Recorded.generators}

    assert given("meta") == {type(None)}
    assert given("cpu") == {torch.Generator}


def test_an_explicit_generator_is_used():
    """A draw with `generator=` uses that generator."""

    def draw():
        return torch.rand((), generator=torch.Generator().manual_seed(3))

    assert {value for _, value in drawn(loader_of(Drawing(draw)))} == {draw().item()}


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_every_epoch_draws_other_numbers(persistent_workers):
    """No number of one epoch is drawn in another."""
    with loader_of(persistent_workers=persistent_workers) as loader:
        epochs = [drawn(loader) for _ in range(3)]
    values = {value for epoch in epochs for _, value in epoch}
    assert len(values) == 3 * SIZE


def test_the_generator_seeds_the_samples():
    """Without `seed`, the loader's generator decides what samples draw."""
    assert drawn(loader_of(seed=5)) != drawn(loader_of(seed=6))


def test_a_repeated_index_draws_other_numbers():
    """A sampler may draw an index twice in an epoch; each sample draws its own numbers."""
    values = drawn(loader_of(sampler=[3] * SIZE))
    assert len({value for _, value in values}) == SIZE


def test_augmentation_does_not_depend_on_workers():
    """torchvision's transforms make the same images for 1 and 8 workers."""
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
    """What a sample draws in load is independent of what it draws in preprocess."""

    def epoch(num_workers):
        return torch.cat([values for _, values in loader_of(InStages(), num_workers=num_workers)])

    values = epoch(2)
    assert len(set(values.flatten().tolist())) == 2 * SIZE
    assert torch.equal(epoch(7), values)


def test_collate_draws_once_per_batch():
    """What a collate function draws depends on the batch alone."""

    def collate(samples):
        return torch.tensor([index for index, _ in samples]), torch.rand(len(samples))

    expected = drawn(loader_of(num_workers=1, collate_fn=collate))
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(num_workers=8, collate_fn=collate)) == expected


class DrawingTogether(Drawing):
    def __getitems__(self, indices):
        return list(zip(indices, torch.rand(len(indices)), strict=True))


def test_whole_batch_hooks_draw_per_batch():
    """What `__getitems__` draws depends on the batch alone."""
    expected = drawn(loader_of(DrawingTogether(), num_workers=1))
    assert len({value for _, value in expected}) == SIZE
    assert drawn(loader_of(DrawingTogether(), num_workers=8)) == expected


def test_worker_info_has_the_generators():
    """`get_worker_info().rng` has the generators of the current sample."""

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
def test_a_resumed_epoch_draws_the_same(num_batches, new_batch_size):
    """After a resume, also with another batch size, samples draw what they would have drawn."""
    loader = loader_of(shuffle=True)
    iterator = iter(loader)
    list(islice(iterator, num_batches))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = drawn(iterator) if num_batches < 3 else []
    resumed = loader_of(shuffle=True, seed=77, num_workers=5, batch_size=new_batch_size)
    resumed.load_state_dict(state)
    assert drawn(resumed) == expected


def test_a_later_epoch_resumes_the_same():
    """The second epoch of persistent workers can be resumed by a loader in its first."""
    with loader_of(persistent_workers=True) as loader:
        drawn(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        expected = drawn(iterator)
    resumed = loader_of(seed=77)
    resumed.load_state_dict(state)
    assert drawn(resumed) == expected


def test_ranks_do_not_change_draws():
    """A sample draws the same numbers after a resume with another number of ranks."""

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


def test_iterable_workers_draw_the_same_again():
    """The same seed makes the same draws of an iterable dataset, and the global RNG is left
    alone.
    """
    before = torch.get_rng_state()
    expected = drawn(loader_of(DrawingStream(), num_workers=3))
    assert len({value for _, value in expected}) == 3 * SIZE
    assert drawn(loader_of(DrawingStream(), num_workers=3)) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_iterable_epochs_draw_other_numbers(persistent_workers):
    """Workers of an iterable dataset draw other numbers in each epoch."""
    with loader_of(DrawingStream(), persistent_workers=persistent_workers) as loader:
        values = {value for _ in range(2) for _, value in drawn(loader)}
    assert len(values) == 2 * 2 * SIZE


# -- what is left alone ---------------------------------------------------------------------------


def test_without_workers_samples_draw_globally():
    """With `num_workers=0` and no seed, samples draw from torch's global RNG, as in torch."""
    torch.manual_seed(3)
    values = [value for _, value in drawn(loader_of(num_workers=0))]
    torch.manual_seed(3)
    assert values == [torch.rand(()).item() for _ in range(SIZE)]


def test_the_training_loop_draws_undisturbed():
    """While workers draw, the training loop draws from the global RNG as if they did not."""
    torch.manual_seed(3)
    values = [torch.rand(()).item() for _ in loader_of()]
    torch.manual_seed(3)
    assert values == [torch.rand(()).item() for _ in range(3)]


class DrawingRows:
    """Draws when it is indexed."""

    def __getitem__(self, index):
        return index, torch.rand(())


class Rows(Dataset):
    """Calls no function itself, like datasets that only index a tensor."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.rows[index]


class DrawingProperty(Rows):
    @property
    def rows(self):
        return DrawingRows()

    @rows.setter
    def rows(self, rows):
        vars(self)["rows"] = rows


class DrawingLookup(Rows):
    def __getattribute__(self, name):
        return DrawingRows() if name == "rows" else super().__getattribute__(name)


@pytest.mark.parametrize(
    "dataset",
    [
        Rows(DrawingRows()),
        DrawingProperty(torch.zeros(SIZE)),
        DrawingLookup(torch.zeros(SIZE)),
        Subset(Rows(DrawingRows()), range(SIZE)),
    ],
    ids=["indexed object", "property", "__getattribute__", "Subset"],
)
def test_indexing_may_draw_per_sample(dataset):
    """A dataset that only indexes one of its attributes may draw by that."""
    before = torch.get_rng_state()
    values = drawn(loader_of(dataset, num_workers=8))
    assert len({value for _, value in values}) == SIZE
    assert drawn(loader_of(dataset, num_workers=1)) == values
    assert torch.equal(torch.get_rng_state(), before)


def test_registered_collate_functions_draw_per_batch(monkeypatch):
    """A function that a user adds to torch's collate map draws from the RNG of the batch."""

    def collate(samples, **_):
        return torch.stack(samples).long(), torch.rand(len(samples))

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate)
    before = torch.get_rng_state()
    dataset = Rows(torch.arange(SIZE))
    values = drawn(loader_of(dataset, num_workers=8))
    assert len({value for _, value in values}) == SIZE
    assert drawn(loader_of(dataset, num_workers=1)) == values
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_tensors_are_loaded():
    """A dataset that only indexes a tensor is loaded in order."""
    batches = loader_of(Rows(torch.arange(SIZE)), num_workers=2)
    assert torch.cat(list(batches)).tolist() == list(range(SIZE))


def test_tensor_datasets_are_loaded_unchanged():
    """A `TensorDataset` is loaded in order."""
    tensors = torch.arange(SIZE)
    assert [batch[0].tolist() for batch in loader_of(TensorDataset(tensors))] == [
        list(range(first, first + 4)) for first in range(0, SIZE, 4)
    ]
