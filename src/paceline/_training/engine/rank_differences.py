"""Check for ranks drifting apart: digests of parameters, buffers, optimizer settings and data."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.tensor_copies_and_digests import (
    TensorDigests,
    is_sharded,
    local_part,
    named_parameters,
    parameters_of,
    piece_here,
)
from paceline._training.workers.worker_failures import RanksDifferError
from paceline.core._distributed_context import DistributedContext

# The prefix of a buffer's digest.
_BUFFER = "buffer "
# Hints for when a parameter, a buffer or a setting differs.
_HINTS = (
    "run backward passes by the calls that sum gradients over the ranks, prepare (or wrap) each"
    " model and each optimizer of its parameters, and set weights alike on all ranks.",
    "compute it from what all ranks have; or name it if each rank has one for itself.",
    "set it alike on all ranks; a scheduler or rule that follows a metric needs that of all ranks.",
)
# Modules of torch whose buffers follow from the samples that a rank has seen, or from its calls.
_PER_RANK_MODULES = frozenset(("_NormBase", "_SpectralNorm", "ObserverBase", "FakeQuantizeBase"))

Exchange = Callable[[Any], Sequence[Any]]
"""Returns the values of all ranks, in rank order."""


@dataclass(frozen=True, slots=True)
class RankDigest:
    """Digests of a rank for the comparison with other ranks.

    Attributes:
        tensors: The name and the digest of each tensor that all ranks have.
        pieces: The same of parts of divided tensors; the name includes the place of the part.
        settings: The name and the value of each setting of an optimizer. None on an idle rank,
            whose settings have no effect.
    """

    tensors: dict[str, str]
    pieces: dict[str, str]
    settings: dict[str, str] | None

    def summary(self) -> tuple[Any, ...]:
        """Return short hashes, equal on ranks without differences."""
        settings = None if self.settings is None else _hash_of(self.settings)
        return _hash_of(self.tensors), _hash_of([*self.pieces]), _hash_of(self.pieces), settings

    def of_present(self, *, is_absent: bool) -> "RankDigest":
        """Return the digest for a comparison with absent ranks, without data to compare."""
        pieces = {} if is_absent else {**self.tensors, **self.pieces}
        return replace(self, tensors={}, pieces=pieces)


class RankCheck:
    """Compares the ranks of a training at its start, with each checkpoint and at the end.

    Of tensors above 64 KiB, a checkpoint looks at one block in 32, each time at the next one: what
    makes ranks drift apart changes whole tensors. The first comparison looks at all of them.

    Args:
        chosen: False for no comparison; or names of parameters and buffers that each rank has for
            itself, in which ``*`` stands for any text.

    Attributes:
        is_on: Whether models are compared.
        compares_data: Whether data sets are.
    """

    def __init__(self, chosen: bool | Sequence[str] = True) -> None:
        self.is_on = self.compares_data = chosen is not False
        self._own_names = () if isinstance(chosen, bool) else tuple(chosen)
        self._num_digests = 0

    def digest(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_idle: bool = False,
        is_trained_only: bool = False,
        others: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> RankDigest:
        """Return the digest of this rank; all ranks must call this equally often.

        Args:
            models: The models.
            optimizers: The optimizers.
            is_idle: Whether this rank never has samples.
            is_trained_only: Whether only what optimizers change is looked at.
            others: Further parameters with their names, which some ranks may not have.
        """
        digests = TensorDigests(self._num_digests - 1 if self._num_digests else None)
        tensors, pieces, kinds = [], [], {}
        for name, tensor in self._tensors(models, optimizers, is_trained_only=is_trained_only):
            if is_sharded(tensor):
                name = f"{name} (shape and begin {[*map(list, piece_here(tensor))]})"
                pieces.append(name)
            else:
                tensors.append(name)
            kinds[name] = "" if isinstance(tensor, torch.nn.Parameter) else _BUFFER
            digests.add(name, local_part(tensor))
        for name, tensor in others:
            if not self._is_own(name):
                kinds[name] = ""
                pieces.append(name)
                digests.add(name, local_part(tensor))
        self._num_digests += 1
        values = digests.finish()
        return RankDigest(
            {name: kinds[name] + values[name] for name in tensors},
            {name: kinds[name] + values[name] for name in pieces},
            None if is_idle else dict(_settings(optimizers)),
        )

    def compare(self, digest: RankDigest, exchange: Exchange) -> None:
        """Compare this rank with the others; collective: all ranks call this together.

        Raises:
            RanksDifferError: They differ; the message is the same on all ranks.
        """
        if not have_the_same(exchange(digest.summary())):
            check_digests(exchange(digest))

    def _is_own(self, *names: str) -> bool:
        return any(fnmatchcase(name, each) for each in self._own_names for name in names)

    def _tensors(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_trained_only: bool,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to compare; untrained models only in the first comparison.

        A model that follows another one, such as an average, may do so on one rank alone.
        """
        trained = {
            id(parameter): f"parameter {number} of optimizer {index}"
            for index, optimizer in enumerate(optimizers)
            for number, parameter in enumerate(parameters_of(optimizer))
        }
        loose = {id(each): each for optimizer in optimizers for each in parameters_of(optimizer)}
        for index, model in enumerate(map(plain_model, models)):
            parameters = named_parameters(model)
            if not (trained.keys().isdisjoint(id(p) for _, p in parameters) and self._num_digests):
                for name, tensor in (*parameters, *_common_buffers(model)):
                    if is_trained_only and id(tensor) not in trained:
                        continue
                    full = f"model_{index}.{name}"
                    if not self._is_own(name, full):
                        yield full, tensor
            for _, parameter in parameters:
                loose.pop(id(parameter), None)
        for key, parameter in loose.items():
            yield trained[key], parameter


def compare_in_group(
    check: RankCheck, models: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Compare the ranks of the process group; collective: all of them call this together.

    Raises:
        RanksDifferError: They differ.
    """
    if check.is_on and dist.is_initialized() and dist.get_world_size() > 1:
        check.compare(check.digest(models, optimizers), _gather_in_group)


def _gather_in_group(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def have_the_same(summaries: Sequence[tuple[Any, ...]]) -> bool:
    """Tell whether all ranks agree, from the results of `RankDigest.summary`."""
    tensors, places, pieces, settings = zip(*summaries, strict=True)
    return (
        len({*tensors}) == 1
        and len({*zip(places, pieces, strict=True)}) == len({*places})
        and len({*settings} - {None}) <= 1
    )


def check_digests(by_rank: Sequence[RankDigest]) -> None:
    """Check for differences between the digests of all ranks.

    Raises:
        RanksDifferError: One does; the message names the first tensor or setting and the ranks.
    """
    _check_values({rank: each.tensors for rank, each in enumerate(by_rank)}, have_all=True)
    _check_values({rank: each.pieces for rank, each in enumerate(by_rank)}, have_all=False)
    settings = {rank: each.settings for rank, each in enumerate(by_rank) if each.settings}
    _check_values(settings, have_all=True, shows=True)


def _check_values(
    by_rank: Mapping[int, Mapping[str, str]], *, have_all: bool, shows: bool = False
) -> None:
    for name in dict.fromkeys(name for values in by_rank.values() for name in values):
        groups: dict[str | None, list[int]] = {}
        for rank, values in by_rank.items():
            if have_all or name in values:
                groups.setdefault(values.get(name), []).append(rank)
        if len(groups) > 1:
            raise RanksDifferError(_difference(name, groups, shows=shows))


def _difference(name: str, groups: Mapping[str | None, Sequence[int]], *, shows: bool) -> str:
    parts = [
        f"{'missing' if value is None else value if shows else 'one'} on {_ranks(ranks)}"
        for value, ranks in groups.items()
    ]
    is_buffer = any((value or "").startswith(_BUFFER) for value in groups)
    hint = _HINTS[2 if shows else int(is_buffer)]
    differ = "is" if shows or None in groups else f"has {len(groups)} values:"
    return (
        f"`{name}` must be the same on all ranks, but {differ} {', '.join(parts)}. Hint:"
        f" {hint} What each rank has for itself is named by check_ranks=['*.NAME'];"
        " check_ranks=False compares nothing."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _common_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers equal on all ranks: no running statistics, and no caches."""
    for path, module in model.named_modules():
        if _PER_RANK_MODULES.intersection(kind.__name__ for kind in type(module).__mro__):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str]]:
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    shown = value.tolist() if isinstance(value, torch.Tensor) else value
                    if isinstance(shown, (bool, int, float, tuple, list)):
                        yield f"{name} of group {number} of optimizer {index}", repr(shown)


def _hash_of(values: Any) -> int:
    return int(xxhash.xxh3_64_intdigest(repr(values).encode()))


_OFF = " check_ranks=False compares nothing."
# Of what lies in memory, so many samples are looked at.
_NUM_SAMPLES = 16


def check_same_data(
    distributed: DistributedContext | None, data: Mapping[str, Any], *, can_be_off: bool = True
) -> None:
    """Require the same samples on all ranks from data sets or loaders.

    Args:
        distributed: Where the ranks meet; all of them call this. None for the process group.
        data: Names to data sets or loaders; other values are not compared.
        can_be_off: Whether `check_ranks` turns this off, for the message.

    Raises:
        ValueError: They differ; the message names the ranks.
    """
    if distributed is None:
        exchange, size = _gather_in_group, dist.get_world_size() if dist.is_initialized() else 1
    else:
        exchange, size = distributed.allgather, distributed.size
    if size == 1:
        return
    by_rank = exchange({name: data_digest(each) for name, each in data.items()})
    for name in data:
        digests = [digests.get(name) for digests in by_rank]
        usual = Counter(digests).most_common(1)[0][0]
        others = [rank for rank, digest in enumerate(digests) if digest != usual]
        if others:
            same = [rank for rank, digest in enumerate(digests) if digest == usual]
            told = _difference_text(f"{name} data", _ranks(others), _ranks(same))
            raise ValueError(told if can_be_off else told.removesuffix(_OFF))


def check_same_as_chief(name: str, own: str, chief: str, rank: int) -> None:
    """Require that a rank has the data of the chief, by the digests of both.

    Raises:
        ValueError: It has others.
    """
    if own != chief:
        raise ValueError(_difference_text(name, _ranks([rank]), _ranks([0])))


def _difference_text(name: str, others: str, same: str) -> str:
    return (
        f"The {name} must have the same samples on all ranks, as each rank takes its part of them,"
        f" but those of {others} are others than those of {same}. Hint: random_split(...,"
        " generator=torch.Generator().manual_seed(0)); indices, and random numbers in place of"
        f" data, that do not depend on the rank; and the whole data set on each rank.{_OFF}"
    )


def data_digest(data: Any) -> str:
    """Return what differs if two data sets or loaders differ.

    It covers lengths, the indices of `torch.utils.data.Subset`, and a few samples of
    `TensorDataset`, lists and arrays. Nothing that computes samples is asked for any.

    Args:
        data: The data set or loader.
    """
    digest, read = blake2b(digest_size=16), TensorDigests(0)
    samples: list[torch.Tensor] = []
    _add(digest, data, samples)
    for number, sample in enumerate(samples):
        read.add(str(number), sample)
    digest.update(repr(read.finish()).encode())
    return digest.hexdigest()


def _add(digest: Any, data: Any, samples: list[torch.Tensor]) -> None:
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        _add_indices(digest, sampler.indices)
    if hasattr(data, "dataset"):
        # A loader, or a subset.
        _add(digest, data.dataset, samples)
    if isinstance(data, ConcatDataset):
        for each in data.datasets:
            _add(digest, each, samples)
    if isinstance(data, Subset):
        _add_indices(digest, data.indices)
    elif not isinstance(data, IterableDataset) and hasattr(type(data), "__getitem__"):
        digest.update(str(_length_of(data)).encode())
    for rows in _in_memory(data):
        for index in np.linspace(0, len(rows) - 1, min(len(rows), _NUM_SAMPLES)):
            _add_sample(digest, rows[round(index)], samples)


def _in_memory(data: Any) -> Sequence[Any]:
    """Return the parts of a data set whose samples are there, and need not be computed."""
    if isinstance(data, TensorDataset):
        return data.tensors
    is_there = type(data) in (list, tuple) or isinstance(data, (torch.Tensor, np.ndarray))
    return (data,) if is_there else ()


def _add_sample(digest: Any, value: Any, samples: list[torch.Tensor]) -> None:
    """Add a sample; no texts, which may be paths that each machine has for itself."""
    if isinstance(value, torch.Tensor):
        samples.append(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, (bool, int, float, np.number)):
        digest.update(repr(value).encode())
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            _add_sample(digest, each, samples)


def _add_indices(digest: Any, indices: Any) -> None:
    try:
        digest.update(np.asarray(indices, dtype=np.int64).tobytes())
    except (TypeError, ValueError):
        # Keys of a mapping.
        digest.update(repr(list(indices)).encode())


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
