"""Retention rules: which checkpoints of a training are kept, and which are to be deleted."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


class Kept(NamedTuple):
    """Existing checkpoint as seen by the retention rules.

    Attributes:
        uuid: Its name.
        steps_completed: The step that it holds.
        score: How good it is, larger is better; None without a validation at its
            step. One that is not finite is never among the best.
        num_bytes: The size of its files.
        stored_s: When it was stored, in seconds since the epoch.
    """

    uuid: str
    steps_completed: int
    score: float | None
    num_bytes: int = 0
    stored_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRules:
    """Retention rules for a group of checkpoints; None is no rule.

    A checkpoint is kept if `latest`, `best` or `age_s` keeps it; without these three, all are.
    The other rules cannot keep a checkpoint that `num_bytes` drops.

    Attributes:
        latest: How many of the newest to keep.
        best: How many of the best to keep; of equals the one of the earlier step is better.
        age_s: Keep those that are younger, in seconds.
        num_bytes: How many bytes to keep at most in all.
    """

    latest: int | None = None
    best: int | None = None
    age_s: float | None = None
    num_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule, so all checkpoints are kept."""
        return self == RetentionRules()


def wanted(checkpoints: Sequence[Kept], rules: RetentionRules, *, now_s: float = 0.0) -> set[str]:
    """Return the UUIDs of the checkpoints kept by `latest`, `best` or `age_s`.

    Args:
        checkpoints: The existing checkpoints, oldest first.
        rules: The rules of retention.
        now_s: The present time, in seconds since the epoch.
    """
    if rules.latest is None and rules.best is None and rules.age_s is None:
        return {kept.uuid for kept in checkpoints}
    # A slice from `-latest` would keep all for 0.
    found = {kept.uuid for kept in checkpoints[max(len(checkpoints) - (rules.latest or 0), 0) :]}
    found |= best_of(checkpoints, rules.best or 0)
    if rules.age_s is not None:
        found |= {kept.uuid for kept in checkpoints if now_s - kept.stored_s < rules.age_s}
    return found


def best_of(checkpoints: Iterable[Kept], number: int) -> set[str]:
    """Return the UUIDs of the best `number` checkpoints; of equals, the earlier step wins."""
    scored = [
        (-kept.score, kept.steps_completed, kept.uuid)
        for kept in checkpoints
        if kept.score is not None and isfinite(kept.score)
    ]
    return {uuid for _, _, uuid in sorted(scored)[:number]}


def beyond_bytes(
    checkpoints: Sequence[Kept],
    num_bytes: int,
    *,
    needed: Collection[str],
    best: Collection[str] = (),
) -> set[str]:
    """Return the UUIDs to delete, so the remaining checkpoints fit into a number of bytes.

    The oldest go first, and the best after all others.

    Args:
        checkpoints: The checkpoints kept by the other rules, oldest first.
        num_bytes: How many bytes to keep at most.
        needed: Those that never go, though they may be too large alone.
        best: Those that go last.
    """
    gone: set[str] = set()
    total = sum(kept.num_bytes for kept in checkpoints)
    # The best ones go last.
    for kept in sorted(checkpoints, key=lambda kept: kept.uuid in best):
        if total <= num_bytes:
            break
        if kept.uuid not in needed:
            gone.add(kept.uuid)
            total -= kept.num_bytes
    return gone


def to_delete(checkpoints: Sequence[Kept], rules: RetentionRules, *, now_s: float) -> list[Kept]:
    """Return the checkpoints of a run not kept by its rules, oldest first.

    The newest one is always kept, as the run resumes from it.

    Args:
        checkpoints: The existing checkpoints, in the order of storing; a run may have gone back
            meanwhile.
        rules: The rules of retention.
        now_s: The present time, in seconds since the epoch.
    """
    newest = {kept.uuid for kept in checkpoints[-1:]}
    found = wanted(checkpoints, rules, now_s=now_s) | newest
    if rules.num_bytes is not None:
        rest = [kept for kept in checkpoints if kept.uuid in found]
        best = best_of(rest, rules.best or 0)
        found -= beyond_bytes(rest, rules.num_bytes, needed=newest, best=best)
    return [kept for kept in checkpoints if kept.uuid not in found]
