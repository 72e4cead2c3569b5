"""Lightning's Trainer and Fabric take our loader as it is."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from spdl_torch import DataLoader, DistributedRandomSampler, ReplaceBadSamples
from tests.conftest import own_worker_names
from tests.integrations import PLACES, quick, run_on_two_processes, write_result
from tests.tiers import sampled

lightning = pytest.importorskip("lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

SIZE = 24
DATASET = TensorDataset(torch.arange(SIZE))

pytestmark = [
    pytest.mark.children,
    pytest.mark.filterwarnings("default"),  # Those of Lightning are not ours to mend.
]


class Model(lightning.LightningModule):
    """Keeps what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []
        self.epochs = []
        self.names = set()

    def training_step(self, batch, _):
        self.batches.append(batch[0].tolist())
        self.epochs.append(self.current_epoch)
        self.names |= set(own_worker_names())
        return self.layer(batch[0].float()[:, None]).sum()

    def validation_step(self, batch, _):
        self.names |= set(own_worker_names())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def indices(self, epoch):
        batches = zip(self.epochs, self.batches, strict=True)
        return [index for number, batch in batches if number == epoch for index in batch]


def make_trainer(directory, **arguments):
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": directory,
            "enable_checkpointing": "callbacks" in arguments,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
        }
        | arguments
    )


def make_loader(**arguments):
    return DataLoader(DATASET, **{"batch_size": 4, "num_workers": 2} | arguments)


def checkpoint_after(num_steps, directory):
    return ModelCheckpoint(
        directory, filename="{step}", every_n_train_steps=num_steps, save_top_k=-1
    )


# -- one process ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(("num_processes", "worker"), PLACES)
@pytest.mark.parametrize("persistent", sampled([False, True], 2))
def test_workers_end_with_the_training(tmp_path, persistent, num_processes, worker):
    """Workers load, and end with the training."""
    model = Model()
    arguments = {"persistent_workers": persistent, "num_processes": num_processes}
    train = make_loader(shuffle=True, **arguments)
    validate = make_loader(**arguments)
    make_trainer(tmp_path).fit(model, train, validate)
    assert worker in model.names
    assert own_worker_names() == []
    assert Counter(model.indices(0)) == Counter(model.indices(1)) == Counter(range(SIZE))


@pytest.mark.parametrize("num_processes", [None, 0])
def test_workers_end_after_an_error(tmp_path, num_processes):
    """Workers end with a training that fails."""

    class Failing(Model):
        def training_step(self, batch, number):
            super().training_step(batch, number)
            raise ZeroDivisionError

    model = Failing()
    loader = make_loader(persistent_workers=True, num_processes=num_processes)
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path).fit(model, loader)
    assert model.names
    assert own_worker_names() == []


@quick
@pytest.mark.parametrize("num_steps", sampled([2, 5, 8], 3))
@pytest.mark.parametrize("seed", sampled([None, 3], 2))
def test_resume_within_an_epoch(tmp_path, num_steps, seed):
    """A checkpoint of the middle of an epoch resumes there."""
    first = Model()
    callbacks = [checkpoint_after(num_steps, tmp_path)]
    trainer = make_trainer(tmp_path, callbacks=callbacks)
    trainer.fit(first, make_loader(shuffle=True, seed=seed))

    second = Model()
    trainer = make_trainer(tmp_path)
    path = tmp_path / f"step={num_steps}.ckpt"
    trainer.fit(second, make_loader(shuffle=True, seed=seed, num_workers=3), ckpt_path=path)
    epoch = num_steps // 6
    num_left = 6 - num_steps % 6
    assert second.batches[:num_left] == first.batches[num_steps:][:num_left]
    assert second.epochs == first.epochs[num_steps:]
    if epoch == 0:
        assert Counter(second.indices(1)) == Counter(range(SIZE))
    if seed is not None:
        assert second.batches == first.batches[num_steps:]


def test_resume_after_an_epoch(tmp_path):
    """A checkpoint of the end of an epoch resumes with the next one."""
    first = Model()
    callbacks = [ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]
    make_trainer(tmp_path, callbacks=callbacks).fit(first, make_loader(shuffle=True, seed=3))
    second = Model()
    trainer = make_trainer(tmp_path)
    trainer.fit(second, make_loader(shuffle=True, seed=3), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert second.epochs == [1] * 6
    assert Counter(second.indices(1)) == Counter(range(SIZE))


@pytest.mark.xfail(strict=True, reason="Lightning begins an epoch with a loader that has ended one")
def test_resume_after_the_last_step(tmp_path):
    """A checkpoint of the last step of an epoch resumes with the next one."""
    # torchdata's StatefulDataLoader has the same: Lightning never asks a loader for the end.
    callbacks = [checkpoint_after(6, tmp_path)]
    make_trainer(tmp_path, callbacks=callbacks).fit(Model(), make_loader(shuffle=True))
    second = Model()
    trainer = make_trainer(tmp_path)
    trainer.fit(second, make_loader(shuffle=True), ckpt_path=tmp_path / "step=6.ckpt")
    assert second.epochs == [1] * 6


def test_seeding_workers_spares_the_loop(tmp_path, monkeypatch):
    """Seeding the workers leaves the RNGs of the training loop alone."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Put back at the end.
        monkeypatch.setenv(name, "0")
    numbers = []
    for num_workers in (1, 3):
        lightning.seed_everything(1, workers=True)
        loader = make_loader(num_workers=num_workers)
        make_trainer(tmp_path).fit(Model(), loader)
        assert loader.worker_init_fn is not None
        numbers.append(torch.rand(1).item())
    assert numbers[0] == numbers[1]


def test_fabric_resumes_from_the_state(tmp_path):
    """Fabric takes the loader and resumes from its state."""
    loader = make_loader(shuffle=True, seed=1)
    fabric = Fabric(accelerator="cpu", devices=1)
    batches = []
    for (batch,) in fabric.setup_dataloaders(loader):
        assert "spdl_torch-0" in own_worker_names()
        batches.append(batch.tolist())
        if len(batches) == 2:
            fabric.save(tmp_path / "checkpoint", {"loader": loader.state_dict()})

    loader = make_loader(shuffle=True, seed=1)
    loader.load_state_dict(fabric.load(tmp_path / "checkpoint")["loader"])
    rest = [batch.tolist() for (batch,) in fabric.setup_dataloaders(loader)]
    assert rest == batches[2:]


# -- two processes --------------------------------------------------------------------------------


def main(directory):
    """What the two processes do."""
    result = {}
    many = {"strategy": "ddp", "devices": 2}

    # Lightning makes the loader again, with its own sampler.
    with ThreadPoolExecutor(1) as executor:
        arguments = {
            "buffer_size": 7,
            "device": "cpu",
            "num_cpu_workers": 3,
            "num_io_workers": 5,
            "num_processes": 0,
            "on_error": ReplaceBadSamples(max_fraction=0.5),
            "preprocess_executor": executor,
            "prefetch_factor": 3,
            "seed": 4,
            "stats_interval": 60.0,
            "timeout": 30,
        }
        loader = make_loader(shuffle=True, **arguments)
        model, trainer = Model(), make_trainer(directory, **many)
        trainer.fit(model, loader)
        remade = trainer.train_dataloader
        result["changed"] = [
            name
            for name in set(inspect.signature(DataLoader).parameters) - {"shuffle"}
            if getattr(remade, name) != getattr(loader, name)
        ]
        result["is_ours"] = type(remade) is DataLoader and remade is not loader
        result["sampler"] = type(remade.sampler).__name__

    for name in ("theirs", "ours"):
        sampler = DistributedRandomSampler(DATASET, seed=1) if name == "ours" else None
        chosen = {"shuffle": True} if sampler is None else {"sampler": sampler}
        loader, model = make_loader(batch_size=2, **chosen), Model()
        callbacks = [checkpoint_after(4, directory / name)]
        trainer = make_trainer(directory, callbacks=callbacks, **many)
        trainer.fit(model, loader)
        result[name] = {"batches": model.batches, "epochs": model.epochs}
        result[name]["names"] = sorted(model.names)
        result[name]["is_left_alone"] = trainer.train_dataloader.sampler is sampler
        result[name]["left"] = own_worker_names()

        loader, model = make_loader(batch_size=2, **chosen), Model()
        trainer = make_trainer(directory, **many)
        trainer.fit(model, loader, ckpt_path=directory / name / "step=4.ckpt")
        result[name]["after"] = model.batches
        result[name]["epochs after"] = model.epochs

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(make_loader(shuffle=True, seed=1))
    result["fabric"] = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    names = {name for _ in loader for name in own_worker_names()}
    result["fabric names"] = sorted(names)
    result["fabric sampler"] = isinstance(loader.sampler, DistributedSampler)

    # Fabric counts epochs from 0 in each process. With our sampler there is no need of it.
    loader = make_loader(sampler=DistributedRandomSampler(DATASET), device=fabric.device)
    result["fabric whole"] = [batch.tolist() for (batch,) in loader]
    iterator = iter(loader)
    before = [next(iterator)[0].tolist()]
    fabric.save(directory / "fabric", {"loader": loader.state_dict()})
    del iterator
    fabric.barrier()
    loader = make_loader(sampler=DistributedRandomSampler(DATASET), device=fabric.device)
    loader.load_state_dict(fabric.load(directory / "fabric")["loader"])
    result["fabric resumed"] = before + [batch.tolist() for (batch,) in loader]
    write_result(directory, fabric.global_rank, result)


def flat(batches):
    return [index for batch in batches for index in batch]


def of_epoch(ranks, name, epoch):
    return flat(
        batch
        for rank in ranks
        for number, batch in zip(rank[name]["epochs"], rank[name]["batches"], strict=True)
        if number == epoch
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_two_processes(__file__, tmp_path_factory.mktemp("lightning"))


on_two_processes = pytest.mark.timeout(300)  # The first has the fixture on its account.


@on_two_processes
def test_remade_loader_keeps_every_argument(ranks):
    """A loader that Lightning makes again stays ours and keeps every argument."""
    for rank in ranks:
        assert rank["is_ours"]
        assert rank["sampler"] == "DistributedSampler"
        assert set(rank["changed"]) == {"batch_sampler", "sampler"}


@on_two_processes
@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_two_processes_share_the_samples(ranks, name):
    """Two processes have each sample once in every epoch."""
    for epoch in (0, 1):
        assert sorted(of_epoch(ranks, name, epoch)) == list(range(SIZE))
    assert of_epoch(ranks, name, 0) != of_epoch(ranks, name, 1)


@on_two_processes
@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_two_processes_load_with_children(ranks, name):
    """Two processes load with child processes that end."""
    for rank in ranks:
        assert "spdl_torch-0" in rank[name]["names"]
        assert rank[name]["left"] == []


@on_two_processes
def test_our_sampler_is_left_alone(ranks):
    assert [rank["ours"]["is_left_alone"] for rank in ranks] == [True, True]
    assert [rank["theirs"]["is_left_alone"] for rank in ranks] == [False, False]


@on_two_processes
@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_two_processes_resume(ranks, name):
    """Two processes resume in the middle of an epoch."""
    for rank in ranks:
        assert rank[name]["after"] == rank[name]["batches"][4:]
        assert rank[name]["epochs after"] == rank[name]["epochs"][4:]


@on_two_processes
def test_fabric_deals_out_each_sample_once(ranks):
    for epoch in (0, 1):
        assert sorted(flat(flat(rank["fabric"][epoch] for rank in ranks))) == list(range(SIZE))
    assert ranks[0]["fabric"][0] != ranks[0]["fabric"][1]
    for rank in ranks:
        assert rank["fabric sampler"]
        assert "spdl_torch-0" in rank["fabric names"]


@on_two_processes
def test_fabric_resumes_with_our_sampler(ranks):
    """Fabric resumes from the state of a loader that has our sampler."""
    for name in ("fabric whole", "fabric resumed"):
        assert sorted(flat(flat(rank[name] for rank in ranks))) == list(range(SIZE))
    assert ranks[0]["fabric whole"] != ranks[0]["fabric resumed"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
