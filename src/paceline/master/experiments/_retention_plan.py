"""Which checkpoints an experiment keeps, by the policy that runs without a master have too."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from paceline.storage import Kept, RetentionRules, best_of, beyond_bytes, wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Numbers of checkpoints to keep, by the searched metric, by age and by bytes."""

    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1
    save_age_s: float | None = None
    save_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint; `metric` is the searched metric at the same step, None if there is none."""

    uuid: str
    trial_id: int
    steps_completed: int
    metric: float | None
    num_bytes: int = 0
    stored_s: float = 0.0


def plan_retention(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    smaller_is_better: bool,
    protected: frozenset[str] = frozenset(),
    now_s: float = 0.0,
) -> list[str]:
    """Return the UUIDs of the checkpoints to delete.

    Kept is the union of: the best of the experiment, the best and the latest of each trial, the
    young ones, and the protected ones. A checkpoint without a metric is not among the best. If
    they are too many bytes, the oldest go, and the best after all others; the protected ones and
    the newest of all stay.

    Args:
        candidates: The checkpoints; of two at one step of a trial, the newer one comes first.
        policy: What to keep.
        smaller_is_better: Whether smaller values of the metric are better.
        protected: Those that are needed.
        now_s: The present time, in seconds since the epoch.
    """
    candidates = list(candidates)
    by_step = sorted(candidates, key=lambda c: c.steps_completed, reverse=True)[::-1]
    facts = {c.uuid: _kept(c, smaller_is_better=smaller_is_better) for c in by_step}
    of_trial: dict[int, list[Kept]] = defaultdict(list)
    for candidate in by_step:
        of_trial[candidate.trial_id].append(facts[candidate.uuid])
    best = best_of(facts.values(), policy.save_experiment_best)
    for group in of_trial.values():
        best |= best_of(group, policy.save_trial_best)
    rules = RetentionRules(latest=policy.save_trial_latest, age_s=policy.save_age_s)
    found = set(protected) | best
    for group in of_trial.values():
        found |= wanted(group, rules, now_s=now_s)
    if policy.save_bytes is not None:
        found -= _beyond_bytes(
            [each for each in facts.values() if each.uuid in found],
            policy.save_bytes,
            protected=protected,
            best=best,
        )
    return [c.uuid for c in candidates if c.uuid not in found]


def next_planning_s(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    smaller_is_better: bool,
    protected: frozenset[str] = frozenset(),
) -> float | None:
    """Return when the next of some checkpoints has become too old, None if none will.

    Args:
        candidates: Those that are kept now.
        policy: What to keep.
        smaller_is_better: As for `plan_retention`.
        protected: Those that are needed.

    Returns:
        The time in seconds since the epoch.
    """
    if policy.save_age_s is None:
        return None
    candidates = list(candidates)
    gone = plan_retention(
        candidates, policy, smaller_is_better=smaller_is_better, protected=protected, now_s=inf
    )
    stored_s = [c.stored_s for c in candidates if c.uuid in gone]
    return min(stored_s) + policy.save_age_s if stored_s else None


def _kept(candidate: Candidate, *, smaller_is_better: bool) -> Kept:
    score = candidate.metric
    if score is not None and smaller_is_better:
        score = -score
    return Kept(
        candidate.uuid, candidate.steps_completed, score, candidate.num_bytes, candidate.stored_s
    )


def _beyond_bytes(
    kept: Sequence[Kept], num_bytes: int, *, protected: frozenset[str], best: set[str]
) -> set[str]:
    by_age = sorted(kept, key=lambda each: each.stored_s)
    needed = protected | {each.uuid for each in by_age[-1:]}
    return beyond_bytes(by_age, num_bytes, needed=needed, best=best)
