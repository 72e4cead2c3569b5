"""Samplers: which indices, in which order, on which rank."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args
from zlib import crc32

import numpy as np
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from ._permutation import Positions, key_of, permutation, uniform
from ._ranges import Ranges

Tail: TypeAlias = Literal["drop", "pad", "keep"]

_FIRST_CHUNK: Final = 256
"""Indices computed before the first batch, which should not wait for more."""
_LARGEST_CHUNK: Final = 8192
"""Indices computed at once later: so many that numpy's overhead for each call is negligible."""

_NOTHING: Final = Ranges()


class GlobalSampler(DistributedSampler[Any]):
    """One order for all ranks, of which each rank takes every `world_size`-th index.

    The order does not depend on the ranks. So what all ranks together have processed is a prefix of
    it, and the rest can be distributed to any other number of ranks.
    """

    dataset: Any
    weights: NDArray[np.float64] | None = None

    def __init__(
        self,
        size: int | Sized,
        ranks: tuple[int, int],
        tail: Tail,
        *,
        shuffle: bool,
        num_draws: int | None = None,
        seed: int = 0,
    ) -> None:
        num_indices = _checked_size(size)
        rank, world_size = ranks
        super().__init__(
            range(num_indices) if hasattr(size, "__index__") else size,  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
            seed=_checked_int("seed", seed, at_least=0),
            drop_last=tail == "drop",
        )
        if self.seed >= 1 << 64:
            raise ValueError(f"seed must be below 2**64, got {seed}.")
        self.tail: Tail = tail
        self.num_indices = num_indices
        self.num_draws = (
            num_indices if num_draws is None else _checked_count("num_draws", num_draws)
        )
        self._epoch_has_begun = False
        self.num_samples = self._num_samples_of(self.num_draws)
        self.total_size = self.num_draws if tail == "keep" else self.num_samples * world_size
        if self.total_size == 0:
            raise ValueError(
                f'tail="drop" leaves nothing of {self.num_draws} indices on {world_size} ranks. '
                'Use tail="pad" to repeat some of them, or tail="keep" to leave some ranks empty.'
            )

    def __iter__(self) -> Iterator[int]:
        # The epoch begins with the first index, so set_epoch() may come after iter().
        yield from self.indices(self.begin_epoch())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Without it, each iteration advances the epoch by 1.

        Args:
            epoch: number of the epoch, the same on all ranks.

        """
        self.epoch = _checked_int("epoch", epoch, at_least=0)
        self._epoch_has_begun = False

    @cached_property
    def weights_checksum(self) -> int | None:
        return None if self.weights is None else crc32(self.weights.tobytes())

    @property
    def next_epoch(self) -> int:
        """The epoch of an iteration that would begin now."""
        return self.epoch + self._epoch_has_begun

    def begin_epoch(self) -> int:
        """Return the epoch to iterate over. The next call returns the epoch after it."""
        self.epoch = self.next_epoch
        self._epoch_has_begun = True
        return self.epoch

    def indices(
        self, epoch: int, start: Ranges = _NOTHING, done: Ranges = _NOTHING
    ) -> Iterator[int]:
        """Yield the indices of an epoch that are left for this rank.

        Args:
            epoch: which order.
            start: positions of the order that no rank gets.
            done: places to skip in this rank's share of the other positions.

        """
        num_places = self._num_samples_of(self.num_draws - start.count())
        num_left = num_places - done.count(below=num_places)
        index_at = self._order(epoch)
        first, chunk = 0, _FIRST_CHUNK
        while first < num_left:
            places = done.missing_at(np.arange(first, min(first + chunk, num_left)))
            yield from index_at(self.position_of(places, start)).tolist()
            first, chunk = first + chunk, min(2 * chunk, _LARGEST_CHUNK)

    def position_of(self, places: Any, start: Ranges) -> Any:
        """Return the positions in the order of all ranks for places in this rank's share."""
        offsets = self.rank + self.num_replicas * places
        # The share of a rank goes beyond the end, and wraps around, only if the tail is padded.
        return start.missing_at(offsets % (self.num_draws - start.count()))

    def _order(self, epoch: int) -> Callable[[Positions], Positions]:  # noqa: ARG002 (not random)
        """Return a function from positions in an epoch's order to indices."""
        return lambda positions: positions

    def _num_samples_of(self, num_positions: int) -> int:
        """Return how many of so many positions this rank takes."""
        match self.tail:
            case "drop":
                return num_positions // self.num_replicas
            case "pad":
                return -(-num_positions // self.num_replicas)
            case "keep":
                return max(0, -(-(num_positions - self.rank) // self.num_replicas))


class DistributedRandomSampler(GlobalSampler):
    """A new random order in every epoch, distributed to the ranks.

    It is a `torch.utils.data.DistributedSampler` with all its attributes. The order depends only on
    `seed` and the epoch, not on a global RNG. It needs almost no memory for any size of dataset.
    Iterated again without `set_epoch`, it advances to the next epoch. With it, a `DataLoader` can
    resume from a checkpoint on any number of ranks.

    >>> sampler = DistributedRandomSampler(10, rank=0, world_size=2, seed=0)
    >>> loader = DataLoader(range(10), batch_size=5, sampler=sampler)
    >>> sampler.set_epoch(1)
    >>> [batch.tolist() for batch in loader]
    [[1, 7, 5, 3, 9]]

    Args:
        size: number of samples, or the dataset.
        rank: rank of this process. Default: from `torch.distributed` if it is initialised, else
            from the environment variable ``RANK`` (set by torchrun), else 0.
        world_size: number of ranks. Default: found like the rank, in ``WORLD_SIZE``; else 1.
        num_draws: number of indices of an epoch, for all ranks together. Default: `size`. More
            than `size` repeats the dataset, each time in another order.
        weights: draw with replacement, each index with a probability in proportion to its weight.
        seed: the same on all ranks. Another seed has another order.
        tail: what to do if the indices cannot be divided evenly. ``"drop"`` (default): leave out
            the last ones. ``"pad"``: repeat the first ones, as torch does. ``"keep"``: use every
            index once, so that some ranks have one index more than others.
        num_replicas: torch's name for `world_size`.
        drop_last: torch's name for `tail`: True is ``"drop"``, False is ``"pad"``.

    """

    __module__ = "spdl_torch"

    def __init__(
        self,
        size: int | Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_draws: int | None = None,
        weights: Sequence[float] | NDArray[Any] | torch.Tensor | None = None,
        seed: int = 0,
        tail: Tail | None = None,
        num_replicas: int | None = None,
        drop_last: bool | None = None,
    ) -> None:
        super().__init__(
            size,
            _checked_ranks(rank, world_size, num_replicas),
            _checked_tail(tail, drop_last, default="drop"),
            shuffle=True,
            num_draws=num_draws,
            seed=seed,
        )
        if weights is not None:
            self.weights = _checked_weights(weights, self.num_indices)

    def _order(self, epoch: int) -> Callable[[Positions], Positions]:
        if self.weights is not None:
            return _weighted_order(self.weights, key_of(self.seed, epoch))
        size = self.num_indices
        if self.num_draws <= size:
            return permutation(size, key_of(self.seed, epoch))
        # One is enough to keep: positions are ascending, except those that pad a tail.
        order_of_round = lru_cache(maxsize=1)(
            lambda number: permutation(size, key_of(self.seed, epoch, number))
        )

        def index_at(positions: Positions) -> Positions:
            rounds, places = np.divmod(positions, size)
            indices = np.empty_like(positions)
            for number in np.unique(rounds).tolist():
                here = rounds == number
                indices[here] = order_of_round(number)(places[here])
            return indices

        return index_at


def _weighted_order(weights: NDArray[np.float64], key: int) -> Callable[[Positions], Positions]:
    sums = np.cumsum(weights)
    # The product below may be rounded up to the whole sum: this is the last index to draw.
    last = int(np.flatnonzero(weights)[-1])

    def index_at(positions: Positions) -> Positions:
        # To the right of equal sums, which skips indices of weight 0.
        drawn = np.searchsorted(sums, uniform(positions, key) * sums[-1], side="right")
        indices: Positions = np.minimum(drawn, last)
        return indices

    return index_at


class DistributedDeterministicSampler(GlobalSampler):
    """All indices in ascending order, distributed to the ranks: for evaluation.

    >>> [list(DistributedDeterministicSampler(5, rank=rank, world_size=2)) for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]
    >>> list(DistributedDeterministicSampler(5, rank=1, world_size=2, tail="keep"))
    [1, 3]

    Args:
        size: number of samples, or the dataset.
        rank: rank of this process; the default is that of `DistributedRandomSampler`.
        world_size: number of ranks; the default is that of `DistributedRandomSampler`.
        tail: what to do if the indices cannot be divided evenly. ``"pad"`` (default): repeat the
            first ones, so that all ranks have equally many. ``"keep"``: use every index once, so
            that metrics are exact, but some ranks have one index more than others. ``"drop"``:
            leave out the last ones.
        num_replicas: torch's name for `world_size`.
        drop_last: torch's name for `tail`: True is ``"drop"``, False is ``"pad"``.

    """

    __module__ = "spdl_torch"

    def __init__(
        self,
        size: int | Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail | None = None,
        num_replicas: int | None = None,
        drop_last: bool | None = None,
    ) -> None:
        super().__init__(
            size,
            _checked_ranks(rank, world_size, num_replicas),
            _checked_tail(tail, drop_last, default="pad"),
            shuffle=False,
        )


# -- checks of the arguments -----------------------------------------------------------------------


def _checked_tail(tail: Tail | None, drop_last: bool | None, default: Tail) -> Tail:
    if tail is not None and tail not in get_args(Tail):
        raise ValueError(f'tail must be "drop", "pad" or "keep", got {tail!r}.')
    if drop_last is None:
        return tail or default
    if tail is not None and (tail == "drop") != drop_last:
        raise ValueError(
            f"tail={tail!r} and drop_last={drop_last} contradict each other. Pass one of them: "
            'drop_last=True is tail="drop", drop_last=False is tail="pad".'
        )
    return tail or ("drop" if drop_last else "pad")


def _checked_ranks(
    rank: int | None, world_size: int | None, num_replicas: int | None
) -> tuple[int, int]:
    if num_replicas is not None and world_size not in {None, num_replicas}:
        raise ValueError(
            f"world_size={world_size!r} and num_replicas={num_replicas!r} are two names for the "
            "number of ranks. Pass one of them."
        )
    name, given = "num_replicas", num_replicas
    if given is None:
        name, given = "world_size", world_size
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if given is not None:
        num_ranks = _checked_count(name, given)
    elif is_initialized:
        num_ranks = torch.distributed.get_world_size()
    else:
        num_ranks = _number_in("WORLD_SIZE", default=1, at_least=1)
    if rank is not None:
        number = _checked_int("rank", rank, at_least=0)
    elif is_initialized:
        number = torch.distributed.get_rank()
    else:
        number = _number_in("RANK", default=0, at_least=0)
    if number >= num_ranks:
        advice = "Ranks count from 0."
        if rank is None and given is not None:
            advice = "This process has that rank: pass rank too, or leave out both."
        raise ValueError(
            f"rank must be below world_size, got rank {number} of {num_ranks}. {advice}"
        )
    return number, num_ranks


def _number_in(variable: str, default: int, at_least: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ValueError(
            f"the environment variable {variable} is {text!r}, but must be an integer of at least "
            f"{at_least}. Unset it, or pass rank and world_size."
        )
    return int(text)


def _checked_size(size: Any) -> int:
    if not isinstance(size, str | bytes):
        with contextlib.suppress(TypeError):  # Raised by len() of an array without dimensions.
            size = len(size)
    if size == 0:
        raise ValueError("size must be at least 1: an empty dataset has nothing to draw.")
    return _checked_int("size", size, at_least=1, hint="Pass a number, or the dataset.")


def _checked_count(name: str, value: Any) -> int:
    return _checked_int(name, value, at_least=1, hint="Leave it out for the default.")


def _checked_int(name: str, value: Any, *, at_least: int, hint: str = "") -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int, got {value!r}. {hint}".rstrip())
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}. {hint}".rstrip())
    return number


def _checked_weights(weights: Any, size: int) -> NDArray[np.float64]:
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().cpu().double().numpy()
    try:
        given = np.asarray(weights)
    except ValueError:  # A list of lists that are not equally long.
        given = np.array(None)
    if given.dtype.kind not in "biuf":
        raise TypeError(f"weights must be numbers, one for each sample, got {weights!r:.80}.")
    checked = given.astype(np.float64)
    if checked.shape != (size,):
        raise ValueError(
            f"weights must be one number for each of the {size} samples, "
            f"got an array of shape {checked.shape}."
        )
    for wrong in np.flatnonzero(~np.isfinite(checked) | (checked < 0)):
        raise ValueError(
            f"weights must be finite and not negative, but that of sample {wrong} is "
            f"{checked[wrong]}. Use 0 for a sample that is never to be drawn."
        )
    with np.errstate(over="ignore"):
        total = checked.sum()
    if total == 0 or not np.isfinite(total):
        raise ValueError(f"weights must have a finite sum above 0, got {total}.")
    return checked
