"""Accelerate prepares our loader, and it stays ours."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, TensorDataset

from spdl_torch import DataLoader, DistributedRandomSampler, ReplaceBadSamples
from tests.conftest import own_worker_names
from tests.datasets import Sharded
from tests.integrations import PLACES, quick, run_on_two_processes, write_result
from tests.tiers import sampled

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, set_seed  # noqa: E402

from spdl_torch.integrations.accelerate import prepare, skip_first_batches  # noqa: E402

SIZE = 22
DATASET = TensorDataset(torch.arange(SIZE))

pytestmark = [
    pytest.mark.children,
    pytest.mark.filterwarnings("default"),  # Those of accelerate are not ours to mend.
]


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_loader(**arguments):
    return DataLoader(DATASET, **{"batch_size": 4, "num_workers": 2} | arguments)


def indices(loader, num_batches=None):
    """What comes in each batch, of as many batches."""
    found = []
    for (batch,) in loader:
        found.append(batch.tolist())
        if len(found) == num_batches:
            break
    return found


def flat(batches):
    return [index for batch in batches for index in batch]


# -- one process ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(("num_processes", "worker"), PLACES)
def test_our_workers_load(accelerator, num_processes, worker):
    loader = prepare(accelerator, make_loader(num_processes=num_processes))
    assert worker in {name for _ in loader for name in own_worker_names()}
    assert isinstance(loader, DataLoader)


def test_plain_prepare_replaces_our_loader(accelerator):
    """accelerate's own prepare() makes a plain torch loader."""
    assert not isinstance(accelerator.prepare(make_loader()), DataLoader)


@pytest.mark.parametrize("seedable", [False, True])
def test_order_equals_torchs_loader(accelerator, seedable):
    """The order is the one that torch's loader has when it is prepared."""
    accelerator.dataloader_config.use_seedable_sampler = seedable
    set_seed(3)
    theirs = accelerator.prepare(torch.utils.data.DataLoader(DATASET, 4, shuffle=True))
    expected = [indices(theirs), indices(theirs)]
    set_seed(3)
    ours = prepare(accelerator, make_loader(shuffle=True))
    assert [indices(ours), indices(ours)] == expected
    assert expected[0] != expected[1]


def test_every_argument_is_kept(accelerator):
    with ThreadPoolExecutor(1) as executor:
        arguments = {
            "buffer_size": 7,
            "collate_fn": list,
            "copy_dataset": True,
            "device": "cpu",
            "generator": torch.Generator(),
            "in_order": False,
            "num_cpu_workers": 3,
            "num_io_workers": 5,
            "num_processes": 2,
            "num_workers": 2,
            "on_error": ReplaceBadSamples(max_fraction=0.5),
            "persistent_workers": True,
            "pin_memory": False,
            "prefetch_factor": 3,
            "stats_interval": 60.0,
            "timeout": 30,
            "worker_init_fn": print,
        }
        others = [{}, {"seed": 4, "generator": None}]
        others += [{"preprocess_executor": executor, "copy_dataset": False, "num_processes": 0}]
        others += [{"worker_method": "multiprocessing", "multiprocessing_context": "spawn"}]
        others[-1] |= {"copy_dataset": False, "buffer_size": None, "on_error": "raise"}
        others[-1] |= {"num_cpu_workers": None, "num_io_workers": None, "num_processes": None}
        for other in others:
            loader = make_loader(**arguments | other)
            prepared = prepare(accelerator, loader)
            for name in set(inspect.signature(DataLoader).parameters) - {"shuffle"}:
                if name not in {"batch_size", "batch_sampler", "sampler"}:
                    assert getattr(prepared.base_dataloader, name) == getattr(loader, name), name


def test_gradients_are_accumulated(accelerator):
    """Gradients are accumulated over two batches, and synchronised at the last."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    model, optimizer, loader = prepare(accelerator, model, optimizer, make_loader(batch_size=5))
    is_synchronised = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                is_synchronised.append(accelerator.sync_gradients)
            assert accelerator.gradient_state.active_dataloader is loader
    assert is_synchronised == [False, True, False, True, True] * 2
    assert accelerator.gradient_state.active_dataloader is None


def test_remainder_is_known_at_the_end(accelerator):
    """The remainder is known at the last batch."""
    loader = prepare(accelerator, make_loader())
    assert [accelerator.gradient_state.remainder for _ in loader][-1] == SIZE % 4


def test_accelerate_moves_the_batches(accelerator):
    """accelerate puts the batches on its device."""
    loader = prepare(accelerator, make_loader())
    assert loader.device == accelerator.device
    loader.device = torch.device("meta")
    assert {batch.device.type for (batch,) in loader} == {"meta"}


def test_our_loader_moves_the_batches(accelerator):
    """Without device placement, our loader puts the batches on its own device."""
    accelerator.device_placement = False
    loader = prepare(accelerator, make_loader(device="meta"))
    assert {batch.device.type for (batch,) in loader} == {"meta"}


@quick
@pytest.mark.parametrize("num_done", sampled([1, 3, 5], 3))
@pytest.mark.parametrize("seed", sampled([None, 9], 2))
def test_resume_within_an_epoch(accelerator, tmp_path, num_done, seed):
    """A state that was saved in the middle of an epoch resumes there."""
    set_seed(1)
    loader = prepare(accelerator, make_loader(shuffle=True, seed=seed))
    first = indices(loader)
    before = indices(loader, num_done)
    accelerator.save_state(tmp_path)
    expected = indices(DataLoader(DATASET, 4))  # Something else happens meanwhile.
    accelerator._custom_objects.clear()
    accelerator._dataloaders.clear()

    loader = prepare(accelerator, make_loader(shuffle=True, seed=seed))
    accelerator.load_state(tmp_path)
    after = indices(loader)
    assert sorted(flat(before + after)) == list(range(SIZE)) == flat(expected)
    assert loader.iteration == 2
    following = indices(loader)
    assert sorted(flat(following)) == list(range(SIZE))
    assert following not in (first, before + after)


@pytest.mark.parametrize("is_over", [False, True])
def test_resume_after_the_last_batch(accelerator, tmp_path, is_over):
    """A state that was saved at the last batch resumes with the next epoch."""
    loader = prepare(accelerator, make_loader(shuffle=True, seed=2))
    epochs = [indices(loader), indices(loader)]
    iterator = iter(loader)
    epochs.append([next(iterator)[0].tolist() for _ in range(6)])
    if not is_over:
        accelerator.save_state(tmp_path)
    assert list(iterator) == []
    if is_over:
        accelerator.save_state(tmp_path)
    epochs.append(indices(loader))
    accelerator.load_state(tmp_path)
    assert indices(loader) == epochs[3]
    assert len({str(epoch) for epoch in epochs}) == 4


def test_resume_before_the_first_batch(accelerator, tmp_path):
    """A state that was saved before the first batch resumes with the first epoch."""
    loader = prepare(accelerator, make_loader(shuffle=True))
    accelerator.save_state(tmp_path)
    expected = indices(loader)
    accelerator.load_state(tmp_path)
    assert indices(loader) == expected
    assert loader.iteration == 1


def test_each_loader_has_its_state(accelerator, tmp_path):
    """Several loaders are saved, each with its own state."""
    one, two = prepare(accelerator, make_loader(), make_loader(batch_size=2))
    indices(one, 2)
    indices(two, 3)
    accelerator.save_state(tmp_path)
    assert flat(indices(one)) == flat(indices(two)) == list(range(SIZE))
    accelerator.load_state(tmp_path)
    assert flat(indices(one)) == list(range(8, SIZE))
    assert flat(indices(two)) == list(range(6, SIZE))


@pytest.mark.parametrize("seed", [None, 9])
@pytest.mark.parametrize("seedable", [False, True])
def test_skip_first_batches_skips_the_first(accelerator, seed, seedable):
    """skip_first_batches skips the batches that come first."""
    accelerator.dataloader_config.use_seedable_sampler = seedable
    set_seed(5)
    loader = prepare(accelerator, make_loader(shuffle=True, seed=seed))
    set_seed(6)
    expected = indices(loader)
    loader.set_epoch(0)
    set_seed(6)
    rest = skip_first_batches(loader, 2)
    assert isinstance(rest, DataLoader)
    assert len(rest) == 4
    assert indices(rest) == expected[2:]


def test_skip_reads_an_iterable_dataset(accelerator):
    """The skipped batches of an iterable dataset are read and not delivered."""
    loader = prepare(accelerator, DataLoader(Sharded(12), batch_size=4, num_workers=1))
    rest = skip_first_batches(loader, 2)
    assert isinstance(rest, DataLoader)
    assert [batch.tolist() for batch in rest] == [[8, 9, 10, 11]]


def test_set_epoch_reaches_the_seed(accelerator):
    """set_epoch() chooses the order that is drawn from a seed."""
    loader = prepare(accelerator, make_loader(shuffle=True, seed=1))
    epochs = [indices(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert indices(loader) == epochs[1]


def test_single_samples_are_refused(accelerator):
    with pytest.raises(ValueError, match=r"accelerate distributes batches.* Set batch_size"):
        prepare(accelerator, make_loader(batch_size=None))


def test_a_batch_sampler_is_kept(accelerator):
    batches = [[3, 1], [5], [0, 2, 4]]
    loader = make_loader(batch_size=1, batch_sampler=batches)
    assert indices(prepare(accelerator, loader)) == batches


def test_preparing_twice_changes_nothing(accelerator):
    loader = prepare(accelerator, make_loader())
    assert prepare(accelerator, loader) is loader
    assert flat(indices(loader)) == list(range(SIZE))


def test_state_of_other_world_is_refused(accelerator):
    """A state of another number of processes is refused."""
    loader = prepare(accelerator, make_loader())
    indices(loader, 2)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"saved by 2 processes, but now there are 1"):
        loader.load_state_dict(state | {"num_processes": 2})
    with pytest.raises(ValueError, match="in the same order"):
        loader.load_state_dict({"step": 1})


# -- two processes --------------------------------------------------------------------------------


CONFIGURATIONS = {
    "shards": {},
    "seedable": {"use_seedable_sampler": True},
    "split": {"split_batches": True},
    "dispatched": {"dispatch_batches": True},
}


def main(directory):
    """What the two processes do."""
    result = {}
    set_seed(5)
    for name, configuration in CONFIGURATIONS.items():
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(**configuration),
        )
        # 24 samples in 6 batches, of which each process has 3.
        dataset = TensorDataset(torch.arange(24))
        loader = DataLoader(dataset, 4, shuffle=True, num_workers=2)
        model, loader = prepare(accelerator, torch.nn.Linear(1, 1), loader)
        result[name] = epochs = {"first": indices(loader)}
        epochs["before"] = indices(loader, 2)
        accelerator.save_state(directory / name)
        accelerator.wait_for_everyone()
        accelerator.load_state(directory / name)
        epochs["after"] = indices(loader)
        epochs["synchronised"] = []
        for _ in loader:
            with accelerator.accumulate(model):
                epochs["synchronised"].append(accelerator.sync_gradients)
        epochs["workers"] = [name for _ in loader for name in own_worker_names()]
        epochs["skipped"] = indices(skip_first_batches(loader, 1))

    accelerator = Accelerator(cpu=True)
    loader = prepare(accelerator, DataLoader(Sharded(12), batch_size=2, num_workers=1))
    result["iterable"] = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    iterator.close()
    result["iterable after"] = [batch.tolist() for batch in loader]

    set_seed(accelerator.process_index)  # Not the same on both.
    accelerator = Accelerator(cpu=True)
    loader = prepare(accelerator, DataLoader(dataset, 4, shuffle=True, num_workers=2))
    accelerator.save_state(directory / "unseeded")  # Before anything was drawn.
    result["unseeded"] = [indices(loader), indices(loader)]
    # A part for each of the 2 processes, whether it is in the sampler or in a batch sampler.
    sampler = DistributedRandomSampler(dataset)
    result["refused"] = []
    for arguments in (
        {"sampler": sampler, "batch_size": 4},
        {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)},
        {"batch_sampler": loader.batch_sampler},
    ):
        try:
            prepare(accelerator, DataLoader(dataset, **arguments))
        except ValueError as error:
            result["refused"].append(str(error))
    accelerator.dataloader_config.dispatch_batches = True
    try:  # Only the part of the first process would be dealt out.
        prepare(accelerator, DataLoader(dataset, 4, sampler=sampler))
    except ValueError as error:
        result["refused"].append(str(error))
    write_result(directory, accelerator.process_index, result)
    accelerator.end_training()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_two_processes(__file__, tmp_path_factory.mktemp("accelerate"))


on_two_processes = pytest.mark.timeout(300)  # The first has the fixture on its account.


@on_two_processes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_processes_have_each_sample_once(ranks, name):
    assert sorted(flat(flat(rank[name]["first"] for rank in ranks))) == list(range(24))
    assert len(ranks[0][name]["first"]) == len(ranks[1][name]["first"])


@on_two_processes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_processes_resume(ranks, name):
    """Two processes resume with the samples that are left."""
    batches = flat(rank[name]["before"] + rank[name]["after"] for rank in ranks)
    assert sorted(flat(batches)) == list(range(24))


@on_two_processes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_processes_synchronise_gradients(ranks, name):
    """Two processes synchronise gradients at the last batch."""
    num_batches = len(ranks[0][name]["first"])
    expected = [(number + 1) % 2 == 0 for number in range(num_batches)]
    expected[-1] = True
    assert [rank[name]["synchronised"] for rank in ranks] == [expected] * 2


@on_two_processes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_processes_load_with_children(ranks, name):
    loading = ranks[:1] if name == "dispatched" else ranks
    assert all("spdl_torch-0" in rank[name]["workers"] for rank in loading)


@on_two_processes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_processes_skip_the_same_batches(ranks, name):
    skipped = flat(flat(rank[name]["skipped"] for rank in ranks))
    num_left = 24 - 24 // len(ranks[0][name]["first"])
    assert len(skipped) == len(set(skipped)) == num_left


@on_two_processes
def test_first_process_reads_iterable_dataset(ranks):
    """The first process reads an iterable dataset for both."""
    assert [rank["iterable"] for rank in ranks] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10, 11]],
    ]
    assert [rank["iterable after"] for rank in ranks] == [
        [[4, 5], [8, 9]],
        [[6, 7], [10, 11]],
    ]


@on_two_processes
def test_saving_keeps_the_common_order(ranks):
    """Processes with different seeds have one order after a state was saved."""
    for epoch in range(2):
        assert sorted(flat(flat(rank["unseeded"][epoch] for rank in ranks))) == list(range(24))


@on_two_processes
def test_what_is_distributed_already_is_refused(ranks):
    for rank in ranks:
        assert len(rank["refused"]) == 4
        for text in rank["refused"]:
            assert "of 2 processes its part" in text
            assert "Use shuffle=True" in text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
