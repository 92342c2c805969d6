"""Which checkpoints of a run to keep."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Kept(NamedTuple):
    """A checkpoint that exists.

    Attributes:
        uuid: Its name.
        steps_completed: The step that it holds.
        score: How good it is, larger is better; None without a validation at its step.
    """

    uuid: str
    steps_completed: int
    score: float | None


class KeptCheckpoints:
    """The checkpoints of a run that exist; those that neither rule keeps are deleted.

    Args:
        existing: What exists at first, in the order of storing.
        keep_latest: How many of the newest to keep; None for no such rule.
        keep_best: How many of the best to keep; None for no such rule.
        delete: Deletes one.
    """

    def __init__(
        self,
        existing: Iterable[Kept],
        *,
        keep_latest: int | None,
        keep_best: int | None,
        delete: Callable[[Kept], None],
    ) -> None:
        self._existing = list(existing)
        self._keep_latest = keep_latest
        self._keep_best = keep_best
        self._delete = delete

    def add(self, checkpoint: Kept) -> None:
        """Take in a new one, and delete what no rule keeps any more."""
        self._existing.append(checkpoint)
        for kept in to_delete(
            self._existing, keep_latest=self._keep_latest, keep_best=self._keep_best
        ):
            self._delete(kept)
            self._existing.remove(kept)


def to_delete(
    checkpoints: Sequence[Kept], *, keep_latest: int | None, keep_best: int | None
) -> list[Kept]:
    """Return the checkpoints that neither rule keeps, oldest first; without a rule none.

    Args:
        checkpoints: What exists, in the order of storing; a run may have gone back meanwhile.
        keep_latest: How many of the newest to keep; at least the newest is always kept.
        keep_best: How many of the best to keep; of equals the earlier one is better.
    """
    if keep_latest is None and keep_best is None:
        return []
    scored = [(kept.score, kept) for kept in checkpoints if kept.score is not None]
    scored.sort(key=lambda pair: (-pair[0], pair[1].steps_completed))
    wanted = {kept.uuid for kept in checkpoints[-max(keep_latest or 0, 1) :]}
    wanted |= {kept.uuid for _, kept in scored[: keep_best or 0]}
    return [kept for kept in checkpoints if kept.uuid not in wanted]
