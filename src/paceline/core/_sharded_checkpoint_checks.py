"""Agreement between ranks that each store their own files of a checkpoint.

All ranks make the same calls in the same order; where one of them fails, all raise.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline._errors import text_of
from paceline.core._distributed_context import DistributedContext
from paceline.core._errors import DistributedPeerError
from paceline.storage import Selector


@contextmanager
def failing_together(distributed: DistributedContext, must: str) -> Iterator[None]:
    """Raise on every rank if the block raises on one of them.

    Args:
        distributed: Where the ranks meet.
        must: What must hold, as the beginning of a sentence for the other ranks.

    Raises:
        DistributedPeerError: The block of another rank has raised; the message has its error.
    """
    own: BaseException | None = None
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        # Also of Ctrl-C: a program may catch it and go on, in step with the other ranks.
        own = error
    by_rank = distributed.allgather(None if own is None else (type(own).__name__, text_of(own)))
    if own is not None:
        raise own
    for rank, failure in enumerate(by_rank):
        if failure is not None:
            name, text = failure
            raise DistributedPeerError(
                f"{must}, but rank {rank} failed: {name}: {text}",
                error_type=name,
            )


def merged_metadata(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dictionary of those of all ranks, in rank order.

    Raises:
        ValueError: Two ranks have different values for a key; dictionaries are merged.
    """
    merged: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        _merge_sharded_metadata(merged, part, rank, "")
    return merged


def _merge_sharded_metadata(
    merged: dict[str, Any], part: Mapping[str, Any], rank: int, prefix: str
) -> None:
    for key, value in part.items():
        known = merged.setdefault(key, value if not isinstance(value, Mapping) else {})
        if isinstance(value, Mapping) and isinstance(known, dict):
            _merge_sharded_metadata(known, value, rank, f"{prefix}{key}.")
        elif known != value:
            raise ValueError(
                f"The ranks must agree on the `metadata`, but {prefix + key!r} is {value!r} on rank"
                f" {rank} and {known!r} on an earlier one. Hint: give it on one rank only."
            )


def source_of_rank(
    distributed: DistributedContext,
    source: str | os.PathLike[str] | None,
    selector: Selector | None,
) -> Path | None:
    """Return the directory whose files this rank brings.

    Ranks that give the same directory bring it once, unless they select files.

    Raises:
        ValueError: No rank has a directory, or this one has only a selector.
        NotADirectoryError: It is none.
    """
    with failing_together(distributed, "With `shard=True` all ranks must give a directory or None"):
        path = None if source is None else Path(source)
        check_selector(selector)
        if path is None and selector is not None:
            raise ValueError("`selector` must come with a `ckpt_dir`, but that is None.")
        if path is not None and not path.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be uploaded from a directory, but got {str(path)!r}."
            )
    own = None
    if path is not None:
        facts = path.stat()
        own = (socket.gethostname(), facts.st_dev, facts.st_ino, distributed.rank * bool(selector))
    by_rank = distributed.allgather(own)
    if by_rank == [None] * distributed.size:
        raise ValueError("`ckpt_dir` must be a directory on one rank at least, but all have None.")
    return path if own is not None and by_rank.index(own) == distributed.rank else None


def check_selector(selector: object) -> None:
    """Refuse what cannot select files.

    Raises:
        TypeError: It is neither None nor a function.
    """
    if selector is not None and not callable(selector):
        raise TypeError(f"`selector` must be a function, but got {selector!r}.")
