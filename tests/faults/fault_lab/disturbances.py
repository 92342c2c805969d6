"""What happens to a search: kills of its processes, and calls that fail. All follow from a seed."""

import random
import time

from fault_lab.round import Round

# A glob over the name and the arguments of a process, see rules.c.
PROCESSES = {
    "master": "*paceline.cli?up*",
    "host": "python*--host*",
    "runner": "runner-*",
    "training": "*train.py*",
}
_ENDS = ("before", "after", "torn")
_PAUSE_S = (0.05, 0.6)
# How long a rule may wait for its call before another one takes its place.
_PATIENCE_S = 3.0

# What may go wrong with the calls of a group, and how many of them come before.
_FAILURES: list[tuple[str, list[str], int, int]] = [
    ("write", ["fail=EIO", "fail=ENOSPC", "fail=EDQUOT", "short=0", "short=1"], 60, 8),
    ("sync", ["fail=EIO", "fail=ENOSPC"], 8, 3),
    ("rename", ["fail=EIO", "fail=ENOSPC"], 8, 3),
    ("link", ["fail=EIO", "fail=ENOSPC"], 2, 1),
    ("unlink", ["fail=EIO", "fail=EACCES"], 6, 2),
    ("open", ["fail=EMFILE", "fail=EIO", "fail=ENOSPC", "fail=ENOMEM"], 40, 5),
    ("mkdir", ["fail=ENOSPC", "fail=EIO"], 6, 2),
    ("truncate", ["fail=EIO"], 2, 1),
    ("lock", ["fail=EIO", "fail=ENOLCK"], 40, 2),
    ("spawn", ["fail=ENOMEM", "fail=EAGAIN", "fail=EMFILE"], 3, 2),
    ("connect", ["fail=ECONNREFUSED", "fail=ETIMEDOUT"], 3, 2),
    ("write,sync,rename,open,lock", ["delay=200"], 30, 2),
]


class Kills:
    """Kills of all kinds of processes, at random moments and in the middle of random calls."""

    def __init__(self, seed: int, num_kills: int) -> None:
        self._random = random.Random(seed)
        self._num_left = num_kills
        self.num_made = 0
        self.kinds: dict[str, int] = {}
        self._rule: tuple[str, int, float] | None = None

    def __call__(self, round_: Round) -> None:
        """Wait a moment, and kill at most one process."""
        time.sleep(self._random.uniform(*_PAUSE_S))
        self._take_hit(round_)
        if self._num_left <= 0 or self._rule is not None:
            return
        if self._random.random() < 0.5:
            self._set_rule(round_)
            return
        by_kind: dict[str, list] = {}  # type: ignore[type-arg]
        for found in round_.processes():
            by_kind.setdefault(found.kind, []).append(found)
        if by_kind:
            kind = self._random.choice(sorted(by_kind))
            if round_.strike(self._random.choice(by_kind[kind])):
                self._count(kind)

    def finish(self, round_: Round) -> None:
        """Count a last hit."""
        self._take_hit(round_)

    def _count(self, kind: str) -> None:
        self._num_left -= 1
        self.num_made += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _set_rule(self, round_: Round) -> None:
        kind = self._random.choice(sorted(PROCESSES))
        nth, end = self._random.randint(1, 120), self._random.choice(_ENDS)
        round_.lab.set_rules(
            f"fault calls=any path={round_.home}/* process={PROCESSES[kind]} nth={nth} kill={end}"
        )
        self._rule = (kind, len(round_.lab.hits()), time.monotonic() + _PATIENCE_S)

    def _take_hit(self, round_: Round) -> None:
        if self._rule is None:
            return
        kind, before, until = self._rule
        if len(round_.lab.hits()) > before:
            round_.note_strike()
            self._count(f"{kind} in a call")
        elif time.monotonic() < until:
            return
        round_.lab.set_rules()
        self._rule = None


class Failures:
    """Calls of any process that fail, are cut short or take long."""

    def __init__(self, seed: int, num_failures: int) -> None:
        self._random = random.Random(seed)
        self._wanted = num_failures
        self._until = 0.0
        self._num_seen = 0
        self.num_made = 0
        self.kinds: dict[str, int] = {}

    def __call__(self, round_: Round) -> None:
        """Wait a moment, and put new rules in the place of those of before."""
        time.sleep(0.2)
        self.finish(round_)
        if self.num_made >= self._wanted:
            round_.lab.set_rules()
        elif time.monotonic() > self._until:
            self._until = time.monotonic() + _PATIENCE_S
            round_.lab.set_rules(*(self._rule(round_) for _ in range(4)))

    def finish(self, round_: Round) -> None:
        """Count the hits."""
        hits = round_.lab.hits()
        for hit in hits[self._num_seen :]:
            round_.note_strike()
            self.kinds[hit.call] = self.kinds.get(hit.call, 0) + 1
        self._num_seen = self.num_made = len(hits)

    def _rule(self, round_: Round) -> str:
        calls, effects, most, _ = self._random.choices(
            _FAILURES, [weight for *_, weight in _FAILURES]
        )[0]
        process = self._random.choice(["", *(f"process={p}" for p in PROCESSES.values())])
        path = "" if calls in ("spawn", "connect") else f"path={round_.home}/*"
        number = f"nth={self._random.randint(1, most)} count={self._random.randint(1, 2)}"
        return f"fault calls={calls} {path} {process} {number} {self._random.choice(effects)}"
