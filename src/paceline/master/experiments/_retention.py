"""Which checkpoints an ended experiment keeps."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Numbers of checkpoints to keep, by the searched metric and by age."""

    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint; `metric` is the searched metric at the same step, None if there is none."""

    uuid: str
    trial_id: int
    steps_completed: int
    metric: float | None


def plan_retention(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    smaller_is_better: bool,
    protected: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the UUIDs of the checkpoints to delete.

    Kept is the union of: the best of the experiment, the best of each trial, the latest of each
    trial, and the protected ones. A checkpoint without a metric is kept only as one of the latest.
    """
    candidates = list(candidates)
    measured = [c for c in candidates if c.metric is not None and not isnan(c.metric)]
    sign = 1.0 if smaller_is_better else -1.0

    def rank(candidate: Candidate) -> tuple[float, int, str]:
        assert candidate.metric is not None
        return sign * candidate.metric, candidate.steps_completed, candidate.uuid

    best = sorted(measured, key=rank)
    kept = set(protected) | {c.uuid for c in best[: policy.save_experiment_best]}
    by_trial: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in best:
        by_trial[candidate.trial_id].append(candidate)
    for ranked in by_trial.values():
        kept |= {c.uuid for c in ranked[: policy.save_trial_best]}
    newest: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda c: c.steps_completed, reverse=True):
        newest[candidate.trial_id].append(candidate)
    for ranked in newest.values():
        kept |= {c.uuid for c in ranked[: policy.save_trial_latest]}
    return [c.uuid for c in candidates if c.uuid not in kept]
