"""Train with the Trainer of transformers. Stops in mid-epoch and resumes from a checkpoint.

pip install transformers accelerate
python examples/transformers_trainer.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from spdl_torch.integrations.transformers import SpdlTrainerMixin


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers; the label says whether the first number is large."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        numbers = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": numbers, "labels": (numbers[0] >= 16).long()}


class SpdlTrainer(SpdlTrainerMixin, Trainer):  # type: ignore[misc]
    """Accepts `loader_arguments`, which `TrainingArguments` do not have."""


def make_trainer(folder: str, num_steps: int) -> SpdlTrainer:
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
    )
    arguments = TrainingArguments(
        folder,
        max_steps=num_steps,
        per_device_train_batch_size=50,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        dataloader_num_workers=2,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_steps=25,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = SpdlTrainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=Sequences(2000),
        eval_dataset=Sequences(200),
        compute_metrics=accuracy,
        loader_arguments={"seed": 0},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, num_steps=25).train()
        trainer = make_trainer(folder, num_steps=80)
        # An epoch has 40 steps: the remaining 15 of the first, and 40 more.
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-25"))
        print(f"resumed from step 25 to step {trainer.state.global_step}")
        print(f"accuracy {trainer.evaluate()['eval_accuracy']:.2f}")


if __name__ == "__main__":
    main()
