"""Population based training: weak trials give way to changed copies of strong ones."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceline.search import _search_messages as messages
from paceline.search import _search_method as base
from paceline.search._hyperparameter_space import Space
from paceline.search._rungs import Rung, make_rung


@dataclass(frozen=True, kw_only=True, slots=True)
class PbtConfig(base.SearchConfig):
    """Configuration of population based training."""

    max_trials: int
    """The size of the population; copies come in addition."""
    max_time: int
    interval: int
    """The time between two comparisons of a trial."""
    quantile: float = 0.25
    """The share of the population that counts as weak, and as strong."""
    resample: float = 0.25
    """The probability that a hyperparameter of a copy is drawn anew."""
    spread: float = 0.2
    """How far any other is moved, up or down, as a share of its range."""

    kind: ClassVar[str] = "pbt"

    def __post_init__(self) -> None:
        base.SearchConfig.__post_init__(self)
        for name in ("max_trials", "max_time", "interval"):
            base.check_integer(name, getattr(self, name), least=1)

    def make_method(self, maker: base.TrialMaker) -> base.SearchMethod:
        """Return the method."""
        return PbtMethod(maker, self)

    def num_planned(self, space: Space) -> int:
        """Return the size of the population."""
        return self.max_trials


@dataclass(slots=True)
class _Member:
    """A trial: its hyperparameters, and its times with those of the trials that it continues."""

    hparams: dict[str, Any]
    begun_at: float = 0.0
    time: float = 0.0
    next_at: float = 0.0
    is_open: bool = True


class PbtMethod(base.SearchMethod):
    """Population based training, after Jaderberg et al. (2017), without waiting for one another.

    A trial is compared whenever it has trained for another interval, to all trials that have come
    as far. If it is among the weak ones, it is stopped, and a copy of a strong one takes its place:
    a trial from the checkpoint of that one, with changed hyperparameters. A trial whose value is
    not finite is stopped wherever it ranks. Times are those of the whole line of copies.
    """

    def __init__(self, maker: base.TrialMaker, config: PbtConfig) -> None:
        self._maker = maker
        self._config = config
        self._num_trials = config.max_trials
        self._members: dict[str, _Member] = {}
        # By the time of the comparison, in intervals.
        self._rungs: dict[int, Rung] = {}

    def start(self) -> list[messages.Operation]:
        """Return the operations to create the population."""
        return self.resize(self._num_trials)

    def resize(self, max_trials: int) -> list[messages.Operation]:
        """Create trials that are no copies, up to so many in all."""
        operations: list[messages.Operation] = []
        self._num_trials = max_trials
        while len(self._members) - self._num_invalid() < max_trials:
            operations += self._enter(self._maker.sampled(), 0.0)
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[messages.Operation]:
        """Compare a trial that has trained for another interval."""
        loss = metric if self._config.smaller_is_better else -metric
        return self.reported_several(request_id, time, loss)

    def reported_several(
        self, request_id: str, time: float, losses: Any
    ) -> list[messages.Operation]:
        """Compare by several objectives, or by the loss of a single one."""
        member, config = self._members[request_id], self._config
        member.time = max(member.time, member.begun_at + time)
        if member.time >= config.max_time:
            member.is_open = False
            return [messages.Stop(request_id=request_id)]
        if member.begun_at + time < member.next_at:
            return []
        index = int(member.time // config.interval)
        member.next_at = float((index + 1) * config.interval)
        rung = self._rungs.setdefault(index, self._rung(index))
        rank = rung.insert(request_id, losses)
        num_weak = int(len(rung) * config.quantile)
        is_finite, ranked = rank < rung.num_ranked, list(rung)
        if is_finite:
            if rank < len(rung) - num_weak:
                return []
            ranked = ranked[:num_weak]
        strong = [
            key
            for key, value in ranked
            if math.isfinite(value) and self._members[key].is_open and key != request_id
        ][: max(num_weak, 1)]
        if is_finite and not strong:
            return []
        member.is_open = False
        if not strong:
            return [messages.Stop(request_id=request_id)]
        parent = self._maker.one_of(strong)
        copied = self._members[parent]
        create = self._maker.changed(
            copied.hparams, parent=parent, resample=config.resample, spread=config.spread
        )
        return [messages.Stop(request_id=request_id), *self._enter(create, copied.time)]

    def exited(
        self, request_id: str, reason: messages.ExitReason, is_stopped: bool
    ) -> list[messages.Operation]:
        """Replace a trial of the population that refused its hyperparameters, and no other."""
        member = self._members[request_id]
        member.is_open = False
        if reason is not messages.ExitReason.INVALID_HP:
            return []
        member.time = -1.0
        is_copy = member.begun_at > 0
        return [] if is_copy else self._enter(self._maker.sampled(), 0.0)

    def proposed(self, request_id: str, hparams: dict[str, Any]) -> None:
        """Take the hyperparameters of a trial that others have chosen, for its copies."""
        self._members[request_id].hparams = hparams

    def num_trials(self, num_invalid: int) -> int:
        """Return the number of trials so far, at least of the population."""
        return max(self._num_trials, len(self._members) - num_invalid)

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time."""
        return time / self._config.max_time

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            "interval": self._config.interval,
            "num_trials": self._num_trials,
            "members": [[key, asdict(member)] for key, member in self._members.items()],
            "rungs": [rung.snapshot() for rung in self._rungs.values()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        base.check_same_setup("interval", self._config.interval, snapshot["interval"])
        self._num_trials = snapshot["num_trials"]
        self._members = {key: _Member(**member) for key, member in snapshot["members"]}
        for stored in snapshot["rungs"]:
            rung = self._rungs[stored["units"]] = self._rung(stored["units"])
            rung.load(stored)

    def _enter(self, create: Any, begun_at: float) -> list[messages.Operation]:
        config = self._config
        next_at = (int(begun_at // config.interval) + 1) * config.interval
        self._members[create.request_id] = _Member(
            create.hparams, begun_at, begun_at, float(next_at)
        )
        length = max(math.ceil(config.max_time - begun_at), 1)
        return [create, messages.Train(request_id=create.request_id, length=length)]

    def _rung(self, index: int) -> Rung:
        return make_rung(index, len(self._config.metrics))

    def _num_invalid(self) -> int:
        return sum(member.time < 0 for member in self._members.values())
