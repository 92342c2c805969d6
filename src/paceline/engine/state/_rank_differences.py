"""Comparison of what must be the same on all ranks: parameters, buffers, settings of optimizers.

Each rank makes digests of its own tensors; only these are exchanged. A part of a divided tensor is
compared with the same part on other ranks, if one of them holds it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from paceline.engine.parallel._overlapped_all_reduce import plain_model
from paceline.engine.tensors._optimizer_parameters import named_parameters, parameters_of
from paceline.engine.tensors._sharded_tensors import is_sharded, local_part, piece_here
from paceline.engine.tensors._tensor_digests import TensorDigests
from paceline.workers import RanksDifferError

# What the digest of a buffer begins with.
_BUFFER = "buffer "
# What to do if a parameter, a buffer or a setting differs.
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
    """What is compared of a rank.

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
        """Return little that tells whether two ranks differ."""
        settings = None if self.settings is None else _hash_of(self.settings)
        return _hash_of(self.tensors), _hash_of([*self.pieces]), _hash_of(self.pieces), settings

    def of_present(self, *, is_absent: bool) -> "RankDigest":
        """Return what ranks compare of which some are absent, and have nothing to compare."""
        pieces = {} if is_absent else {**self.tensors, **self.pieces}
        return replace(self, tensors={}, pieces=pieces)


class RankCheck:
    """Compares the ranks of a training at its start, with each checkpoint and at the end.

    Of tensors above 64 KiB, a checkpoint looks at one block in 32, each time at the next one: what
    makes ranks drift apart changes whole tensors. The first comparison looks at all of them.

    Args:
        chosen: False for no comparison; or names of parameters and buffers that each rank has for
            itself, in which ``*`` stands for any text.
    """

    def __init__(self, chosen: bool | Sequence[str] = True) -> None:
        self.is_on = chosen is not False
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
        """Return what is compared of this rank; all ranks call it equally often.

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
        """Compare this rank with the others; all ranks call it together.

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
        """Yield what is compared; of models that nobody trains only at the first time.

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
    """Compare the ranks of the process group, all of which call this together.

    Raises:
        RanksDifferError: They differ.
    """

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    if check.is_on and dist.is_initialized() and dist.get_world_size() > 1:
        check.compare(check.digest(models, optimizers), exchange)


def have_the_same(summaries: Sequence[tuple[Any, ...]]) -> bool:
    """Tell whether no rank differs, by what `RankDigest.summary` returned on each."""
    tensors, places, pieces, settings = zip(*summaries, strict=True)
    return (
        len({*tensors}) == 1
        and len({*zip(places, pieces, strict=True)}) == len({*places})
        and len({*settings} - {None}) <= 1
    )


def check_digests(by_rank: Sequence[RankDigest]) -> None:
    """Check that no rank differs.

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
    """Yield the buffers that are the same on all ranks: not statistics, and no caches."""
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
