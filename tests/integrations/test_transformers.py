"""The Trainer of transformers trains, evaluates and predicts with our loaders."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from spdl_torch import DataLoader, DistributedRandomSampler
from tests.conftest import own_worker_names
from tests.integrations import quick, run_on_two_processes, write_result

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from spdl_torch.integrations.transformers import SpdlTrainerMixin  # noqa: E402

pytestmark = [
    pytest.mark.children,
    pytest.mark.filterwarnings("default"),  # Those of transformers are not ours to mend.
    pytest.mark.timeout(300),  # It takes long to import.
]


class Texts(Dataset):
    """Each made of one word, over and over; keeps which were read in this process, and where."""

    def __init__(self, size=20):
        self.size = size
        self.reads = []
        self.readers = set()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        self.readers.add((os.getpid(), threading.current_thread().name))
        return {"input_ids": torch.full((6,), index), "labels": torch.tensor(index % 2)}


class Stream(IterableDataset):
    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return (self.texts[index] for index in range(len(self.texts)))


class MyTrainer(SpdlTrainerMixin, Trainer):
    """Keeps what it is trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []
        self.workers = set()

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches.append(inputs["input_ids"][:, 0].tolist())
        self.workers |= set(own_worker_names())
        return super().training_step(model, inputs, *args, **kwargs)


def make_trainer(directory, cls=MyTrainer, dataset=None, loader_arguments=None, **arguments):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
    )
    arguments = {
        "dataloader_num_workers": 2,
        "disable_tqdm": True,
        "logging_steps": 1000,
        "num_train_epochs": 2,
        "per_device_eval_batch_size": 4,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
    } | arguments
    return cls(
        BertForSequenceClassification(config),
        TrainingArguments(str(directory), **arguments),
        train_dataset=Texts() if dataset is None else dataset,
        eval_dataset=Texts(10),
        loader_arguments=loader_arguments,
    )


def parameters(trainer):
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters())


def flat(batches):
    return [index for batch in batches for index in batch]


# -- one process ----------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("num_processes", [None, 0])
def test_workers_load_for_the_trainer(tmp_path, num_processes):
    """Our workers load for training, evaluation and prediction."""
    trainer = make_trainer(tmp_path, loader_arguments={"num_processes": num_processes})
    trainer.train()
    assert Counter(flat(trainer.batches[:10])) == Counter(range(20))
    assert Counter(flat(trainer.batches[10:])) == Counter(range(20))
    assert "eval_loss" in trainer.evaluate()
    texts = Texts(6)
    assert trainer.predict(texts).predictions.shape == (6, 2)
    threads = {f"spdl_torch-preprocess-{number}" for number in range(2)}
    for dataset in (trainer.train_dataset, trainer.eval_dataset, texts):
        assert {name for _, name in dataset.readers} <= threads
        assert (dataset.readers != set()) == (num_processes == 0)
    children = {"spdl_torch-0", "spdl_torch-1"}
    assert (threads if num_processes == 0 else children) <= trainer.workers
    assert own_worker_names() == []


@pytest.mark.parametrize("loader", ["train", "eval", "test"])
def test_loaders_have_all_arguments(tmp_path, loader):
    """The loaders have the Trainer's arguments and ours."""
    trainer = make_trainer(
        tmp_path,
        loader_arguments={"num_io_workers": 5, "seed": 3},
        dataloader_prefetch_factor=3,
        dataloader_persistent_workers=True,
        dataloader_in_order=False,
    )
    made = {
        "train": trainer.get_train_dataloader,
        "eval": trainer.get_eval_dataloader,
        "test": lambda: trainer.get_test_dataloader(Texts(4)),
    }[loader]()
    assert isinstance(made, DataLoader)
    assert (made.num_workers, made.num_io_workers, made.seed) == (2, 5, 3)
    assert (made.prefetch_factor, made.persistent_workers, made.in_order) == (3, True, False)


def test_arguments_as_a_class_attribute(tmp_path):
    """Our arguments may be an attribute of the class."""

    class WithMany(MyTrainer):
        loader_arguments = {"num_cpu_workers": 4}  # noqa: RUF012

    assert make_trainer(tmp_path, WithMany).get_train_dataloader().num_cpu_workers == 4


def test_training_equals_torchs_loader(tmp_path):
    """The order and the parameters are those of torch's loader."""

    class Theirs(MyTrainer):
        _get_dataloader = Trainer._get_dataloader

    trainers = [make_trainer(tmp_path, cls) for cls in (Theirs, MyTrainer)]
    for trainer in trainers:
        torch.manual_seed(1)
        trainer.train()
    assert trainers[0].batches == trainers[1].batches
    assert torch.equal(parameters(trainers[0]), parameters(trainers[1]))


@pytest.mark.parametrize("num_processes", [None, 0])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("seedable", [True, False])
def test_resume_within_an_epoch(tmp_path, accumulated, seedable, num_processes):
    """A training resumes from a checkpoint in the middle of an epoch."""
    arguments = {
        "accelerator_config": {"use_seedable_sampler": seedable},
        "gradient_accumulation_steps": accumulated,
        "loader_arguments": {"seed": 1, "num_processes": num_processes},
        "save_steps": 3,
        "save_strategy": "steps",
    }
    first = make_trainer(tmp_path, **arguments)
    first.train()
    second = make_trainer(tmp_path, **arguments)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.batches == first.batches[3 * accumulated :]
    assert torch.equal(parameters(first), parameters(second))
    if num_processes == 0:
        # What was trained on before is not read again, and threads read the rest.
        assert sorted(second.train_dataset.reads) == sorted(flat(second.batches))
        assert {name for _, name in second.train_dataset.readers} <= {
            f"spdl_torch-preprocess-{number}" for number in range(2)
        }
    assert own_worker_names() == []


def test_resume_an_iterable_dataset(tmp_path):
    """A training on an iterable dataset resumes from a checkpoint."""
    arguments = {"save_steps": 3, "save_strategy": "steps", "max_steps": 8}
    arguments["dataloader_num_workers"] = 1
    first = make_trainer(tmp_path, dataset=Stream(Texts()), **arguments)
    first.train()
    second = make_trainer(tmp_path, dataset=Stream(Texts()), **arguments)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert second.batches == first.batches[3:]


def test_seeding_workers_spares_the_loop(tmp_path):
    """Seeding the workers leaves the RNGs of the training loop alone."""
    loader = make_trainer(tmp_path, dataloader_num_workers=3).get_train_dataloader()
    assert loader.worker_init_fn.func.__name__ == "seed_worker"
    iterator = iter(loader.base_dataloader)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    next(iterator)  # Starts the workers.
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert torch.initial_seed() == 3


# -- two processes --------------------------------------------------------------------------------


class Distributed(MyTrainer):
    def _get_train_sampler(self, *_):
        return DistributedRandomSampler(self.train_dataset)


def main(directory):
    """What the two processes do."""
    arguments = {"save_steps": 3, "save_strategy": "steps", "ddp_backend": "gloo"}
    first = make_trainer(directory, **arguments)
    first.train()
    second = make_trainer(directory, **arguments)
    second.train(resume_from_checkpoint=str(directory / "checkpoint-3"))
    result = {
        "batches": first.batches,
        "after": second.batches,
        "workers": sorted(second.workers),
        "num_predictions": len(second.predict(Texts(7)).predictions),
    }
    try:
        make_trainer(directory, Distributed, **arguments).train()
    except ValueError as error:
        result["refused"] = str(error)
    write_result(directory, first.args.process_index, result)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_two_processes(__file__, tmp_path_factory.mktemp("transformers"))


def test_two_processes_share_the_samples(ranks):
    """Two processes train on each sample once."""
    for epoch in (0, 1):
        batches = flat(rank["batches"][5 * epoch :][:5] for rank in ranks)
        assert Counter(flat(batches)) == Counter(range(20))


def test_two_processes_resume(ranks):
    """Two processes resume from a checkpoint."""
    for rank in ranks:
        assert rank["after"] == rank["batches"][3:]
        assert {"spdl_torch-0", "spdl_torch-1"} <= set(rank["workers"])


def test_two_processes_predict_each_sample_once(ranks):
    assert [rank["num_predictions"] for rank in ranks] == [7, 7]


def test_distributed_sampler_is_refused(ranks):
    """A sampler that is distributed already is refused."""
    for rank in ranks:
        assert "the DistributedRandomSampler of this DataLoader" in rank["refused"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
