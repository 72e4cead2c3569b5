"""Policies for samples that cannot be made: replace them, or load them again."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import operator
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from pathlib import Path
from typing import Any, Final

import numpy as np

from ._random import restart_sample

_NUM_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be made, as `DataLoader.bad_samples` lists it.

    >>> dataset = StagedDataset.from_functions(["1", "x", "3"], preprocess=int)
    >>> loader = DataLoader(dataset, batch_size=3, on_error=ReplaceBadSamples())
    >>> [batch.tolist() for batch in loader], loader.bad_samples[0].index
    ([[1, 3, 3]], 1)
    >>> print(loader.bad_samples[0])
    sample 1 in the preprocess stage: ValueError: invalid literal for int() with base 10: 'x'
    """

    __module__ = "spdl_torch"

    index: int | str
    """What the sampler drew for it, or the text of that."""
    path: str | None
    """Its file, if that is known."""
    stage: str
    """The stage in which it failed."""
    error: str
    """The exception's type and text."""

    def __str__(self) -> str:
        path = "" if self.path is None else f" ({self.path})"
        return f"sample {self.index!r}{path} in the {self.stage} stage: {self.error}"


class TooManyBadSamples(RuntimeError):  # noqa: N818 (says what happened)
    """Raised if more samples could not be made than `ReplaceBadSamples` allows.

    >>> dataset = StagedDataset.from_functions(["1", "x"], preprocess=int)
    >>> list(DataLoader(dataset, batch_size=2, on_error=ReplaceBadSamples(max_count=0)))
    Traceback (most recent call last):
    spdl_torch.TooManyBadSamples: 1 of the samples could not be made, and at most 0 may be bad. ...
    """

    __module__ = "spdl_torch"


@dataclass(frozen=True)
class ReplaceBadSamples:
    """Replace a sample that cannot be made by another one.

    The other is the next sample of the same batch that can be made: the sampler has drawn it, it is
    the same in every run, and batches keep their size. Every bad sample is recorded once, in
    `DataLoader.bad_samples`.

    >>> loader = DataLoader(range(4), batch_size=2, on_error=ReplaceBadSamples(max_count=1))
    >>> [batch.tolist() for batch in loader], loader.bad_samples
    ([[0, 1], [2, 3]], ())

    Args:
        max_fraction: how many samples may be bad, as a fraction of the dataset. One sample of a
            small dataset may be bad unless this is 0.
        max_count: how many samples may be bad. The lower of the two limits applies.
        log: a file to which one line of JSON is added for each bad sample.
    """

    __module__ = "spdl_torch"

    max_fraction: float | None = 0.01
    max_count: int | None = None
    log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.max_fraction is not None and not 0 <= self.max_fraction <= 1:
            raise ValueError(
                f"max_fraction must be from 0 to 1, got {self.max_fraction!r}. Use 0.01 for one "
                "sample in a hundred, or None for no limit."
            )
        if self.max_count is not None and self.max_count < 0:
            raise ValueError(
                f"max_count must be at least 0, got {self.max_count!r}. Use None for no limit."
            )


@dataclass(frozen=True)
class RetryLoad:
    """Call a dataset's `load` again when it raises, for storage behind a network.

    >>> dataset = StagedDataset.from_functions(["cat", "tiger"], load=len)
    >>> loader = DataLoader(dataset, batch_size=2, on_error=RetryLoad(attempts=5))
    >>> [batch.tolist() for batch in loader], loader.num_retries
    ([[3, 5]], 0)

    Args:
        attempts: how often to call it, the first time included.
        backoff: seconds to wait before the second attempt; doubled before each further attempt.
        exceptions: the exceptions to try again after. Others are raised at once.
    """

    __module__ = "spdl_torch"

    attempts: int = 3
    backoff: float = 0.1
    exceptions: tuple[type[BaseException], ...] = (OSError, TimeoutError)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts!r}. Use 3.")
        if self.backoff < 0:
            raise ValueError(f"backoff must be at least 0 seconds, got {self.backoff!r}.")

    def pauses(self) -> Iterator[float]:
        """Return the seconds to wait before each attempt but the first."""
        return (self.backoff * 2**number for number in range(self.attempts - 1))


def policies_of(on_error: Any) -> tuple[ReplaceBadSamples | None, RetryLoad | None]:
    """Return the policies of a loader's `on_error` argument."""
    if on_error == "raise":
        return None, None
    given = list(on_error) if isinstance(on_error, Sequence) else [on_error]
    replaces = [policy for policy in given if isinstance(policy, ReplaceBadSamples)]
    retries = [policy for policy in given if isinstance(policy, RetryLoad)]
    if len(replaces) + len(retries) != len(given) or len(replaces) > 1 or len(retries) > 1:
        raise ValueError(
            'on_error must be "raise", ReplaceBadSamples(...), RetryLoad(...), or one of each in a '
            f"list, got {on_error!r}."
        )
    return next(iter(replaces), None), next(iter(retries), None)


class BadSamplePolicy:
    """The policies of a loader, and a record of what they did.

    All workers use it at the same time, so every step is one atomic operation. (There is no lock:
    a fork could copy it while it is held, and the child would deadlock.)
    """

    def __init__(self, on_error: Any, dataset: Any) -> None:
        self._replace, self._retry = policies_of(on_error)
        self.replaces = self._replace is not None
        self.retries = self._retry is not None
        self._max_count = None if self._replace is None else _max_count(self._replace, dataset)
        self._bad_samples: dict[str, BadSample] = {}
        self._retries: list[None] = []
        """One item for each retry, because appending is atomic and adding is not."""

    @property
    def num_retries(self) -> int:
        return len(self._retries)

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        return tuple(self._bad_samples.copy().values())

    def state(self) -> list[dict[str, Any]]:
        return [asdict(bad) for bad in self.bad_samples]

    def restore(self, state: Any) -> None:
        try:
            bad_samples = [BadSample(**bad) for bad in state]
        except TypeError:
            raise ValueError(
                "the bad samples of the state are damaged: each is an index, path, stage and error."
            ) from None
        for bad in bad_samples:
            self._bad_samples[repr(bad.index)] = bad

    def record(
        self, index: Any, dataset: Any, stage: str, error: BaseException
    ) -> Exception | None:
        """Record a bad sample; return the error of the log file, or of one too many bad samples."""
        assert self._replace is not None
        return self._add(
            BadSample(_plain(index), path_of(dataset, index, error), stage, _text_of(error))
        )

    def _add(self, bad: BadSample) -> Exception | None:
        assert self._replace is not None
        is_new = self._bad_samples.setdefault(repr(bad.index), bad) is bad
        if is_new and self._replace.log is not None:
            try:
                with Path(self._replace.log).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(bad)) + "\n")
            except OSError as log_error:
                return log_error
        if self._max_count is None or len(self._bad_samples) <= self._max_count:
            return None
        bad_samples = self.bad_samples
        shown = [f"\n  {some}" for some in bad_samples[:_NUM_SHOWN]]
        return TooManyBadSamples(
            f"{len(bad_samples)} of the samples could not be made, and at most {self._max_count} "
            "may be bad. Repair or leave out these, or allow more in ReplaceBadSamples:"
            + "".join(shown)
            + ("\n  …" if len(bad_samples) > _NUM_SHOWN else "")
        )

    def for_child(self) -> BadSamplePolicy:
        """Return the policy of a child process, whose parent logs and counts what it records."""
        policy = copy.copy(self)
        policy._max_count = None
        policy._bad_samples, policy._retries = {}, []
        if self._replace is not None:
            policy._replace = replace(self._replace, log=None)
        return policy

    def take_new(self) -> tuple[list[BadSample], int]:
        """Return what was recorded since the last call, in a child process."""
        bad_samples: list[BadSample] = []
        with contextlib.suppress(KeyError):
            while self._bad_samples:
                bad_samples.append(self._bad_samples.popitem()[1])
        num_retries = len(self._retries)
        del self._retries[:num_retries]
        return bad_samples, num_retries

    def add_from_child(self, bad_samples: list[BadSample], num_retries: int) -> Exception | None:
        """Add what a child process has recorded; return an error as `record` does."""
        self._retries += [None] * num_retries
        failures = [self._add(bad) for bad in bad_samples]
        return next((failure for failure in failures if failure is not None), None)

    def retried(
        self, load: Callable[[Any], Any], sleep: Callable[[float], object] = time.sleep
    ) -> Callable[[Any], Any]:
        """Return a load function that calls `load` again if it raises.

        `sleep` waits so many seconds, and returns true if the sample is no longer needed.
        """
        if (retry := self._retry) is None:
            return load

        def load_again(drawn: Any) -> Any:
            for pause in retry.pauses():
                try:
                    return load(drawn)
                except retry.exceptions:
                    if sleep(pause):
                        raise
                    self._retries.append(None)
                restart_sample()
            return load(drawn)

        return load_again

    def retried_async(
        self, load: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any], Awaitable[Any]]:
        """Return an asynchronous load function that calls `load` again if it raises."""
        if (retry := self._retry) is None:
            return load

        async def load_again(drawn: Any) -> Any:
            for pause in retry.pauses():
                try:
                    return await load(drawn)
                except retry.exceptions:
                    self._retries.append(None)
                await asyncio.sleep(pause)
                restart_sample()
            return await load(drawn)

        return load_again

    def __getstate__(self) -> dict[str, Any]:
        # Copies in one step: workers may write while a loader is copied.
        bad_samples, retries = self._bad_samples.copy(), self._retries.copy()
        return self.__dict__ | {"_bad_samples": bad_samples, "_retries": retries}


def substitutes(indices: Sequence[Any], slot: int, before: Sequence[Any]) -> list[Any]:
    """Return the indices that may replace that of a bad sample, in the order to try them.

    The sampler drew `indices` for the batch, and `before` for the batches before it.
    """
    others = [*indices[slot + 1 :], *indices[:slot], *before]
    # Compared by their text: an index may be any object, and may not compare to a bool.
    own = repr(indices[slot])
    return [other for other in others if repr(other) != own]


def _max_count(policy: ReplaceBadSamples, dataset: Any) -> int | None:
    counts = [] if policy.max_count is None else [policy.max_count]
    if policy.max_fraction is not None:
        try:
            # The small number avoids one too few by a rounding error.
            count = floor(policy.max_fraction * len(dataset) + 1e-6)
            counts.append(max(count, 1 if policy.max_fraction > 0 else 0))
        except TypeError:
            if not counts:
                raise ValueError(
                    f"max_fraction needs the number of samples, but {type(dataset).__name__} has "
                    "no len(). Use ReplaceBadSamples(max_fraction=None, max_count=...)."
                ) from None
    return min(counts) if counts else None


def _plain(index: Any) -> int | str:
    """Return an index as it is saved: an int or a str."""
    if isinstance(index, str):
        return index
    try:
        return operator.index(index)
    except TypeError:
        return repr(index)


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # Its text is the user's code.
        return type(error).__name__


def path_of(dataset: Any, index: Any, error: BaseException | None = None) -> str | None:
    """Return the file of a sample, if it is known which one that is.

    The exception may name it, a torchvision folder has it, and so has a list `imgs`, `paths` or
    `files` of the dataset with one path for each sample. A list of another length is not one of
    samples but, for example, of shards. This does not look for the file: storage may be stuck.
    """
    with contextlib.suppress(Exception):  # Attributes of these names may be anything.
        for name in ("path", "filename"):
            if isinstance(path := getattr(error, name, None), str | os.PathLike):
                return os.fspath(path)
        while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset.
            dataset, index = dataset.dataset, dataset.indices[index]
    folder = sys.modules.get("torchvision.datasets.folder")
    is_folder = folder is not None and isinstance(dataset, folder.DatasetFolder)
    for name in ("samples",) if is_folder else ("imgs", "paths", "files"):
        with contextlib.suppress(Exception):
            found = getattr(dataset, name)
            # Only what is indexed by position: a table may be indexed by the labels of its rows.
            if isinstance(found, Sequence | np.ndarray) and len(found) == len(dataset):
                path = found[index][0] if is_folder else found[index]
                if isinstance(path, str | os.PathLike):
                    return os.fspath(path)
    return None
