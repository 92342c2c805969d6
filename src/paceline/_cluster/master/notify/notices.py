"""Which events give which notices: a function of the event, the rules and a memory."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline._base.journal_records import decode_value
from paceline._cluster.messages.states import ExperimentState, TrialState
from paceline.config._notify_section import Notify, Threshold

_LEVELS = ("debug", "info", "warn", "error")
_IDLE_PERCENT = 5.0
_GPU_USE = re.compile(r"gpu_\d+_percent")
_MAX_TEXT = 2000
# Runs of last month that are shown for the first time are no news.
MAX_AGE_S = 24 * 3600.0

EVENTS = (
    "alert", "attempt_ended", "attempt_started", "checkpoint", "experiment_state", "metrics",
    "node_lost", "trial_state", "validation",
)  # fmt: skip
"""The kinds of events that are looked at."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """News for people; `experiment_id` is 0 for news of the master."""

    topic: str
    level: str
    title: str
    text: str
    time: float
    experiment_id: int
    trial_id: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """An event of the master, with its experiment's name and the rules that hold for it.

    `since` is when it came to pass, which is earlier than `time` for records that came late.
    """

    time: float
    since: float
    kind: str
    experiment_id: int
    trial_id: int | None
    data: dict[str, Any]
    name: str
    rules: Sequence[Notify]


@dataclass(slots=True)
class Running:
    """A running trial: when it reported last, and since when GPUs of its nodes are idle."""

    experiment_id: int
    name: str
    rules: Sequence[Notify]
    heard_at: float
    idle_since: dict[str, float] = field(default_factory=dict)
    told: set[tuple[str, float]] = field(default_factory=set)


@dataclass(slots=True)
class Memory:
    """What was told before, thresholds by trial and lost nodes; and the running trials.

    Of lost nodes, it has the time of the last sign of life: another time is another loss.
    """

    told: set[str] = field(default_factory=set)
    lost: dict[str, float | None] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)


Sent = tuple[str, Notice]
"""The name of a channel, and a notice for it."""


def notices_of(event: Happening, memory: Memory) -> list[Sent]:
    """Return the notices that an event gives, and bring the memory up to date."""
    if event.time - event.since > MAX_AGE_S:
        return []
    crossed = _thresholds_crossed(event, memory)
    found = [
        (channel, notice)
        for rule in event.rules
        for notice in (*_by_topic(event, rule, memory), *_by_threshold(event, rule, crossed))
        for channel in rule.to
    ]
    memory.told |= crossed.keys()
    _note_event(event, memory)
    # Several rules may send the same to one channel.
    return list(dict.fromkeys(found))


def _by_topic(event: Happening, rule: Notify, memory: Memory) -> Iterator[Notice]:
    whose = f"experiment {event.experiment_id} ({event.name})"
    state, error = event.data.get("state"), event.data.get("error")
    if event.kind == "experiment_state" and ExperimentState(state).is_terminal:
        yield from _ended(event, rule, "experiment", f"E{whose[1:]}", str(state), error)
    elif event.kind == "trial_state" and TrialState(state).is_terminal:
        error = error or event.data.get("reason")
        what = f"Trial {event.trial_id} of {whose}"
        yield from _ended(event, rule, "trial", what, str(state), error)
    elif event.kind == "alert" and "alert" in rule.events:
        level = str(event.data.get("level"))
        if level in _LEVELS and _LEVELS.index(level) >= _LEVELS.index(rule.alert_level):
            title = f"{event.data.get('title')} (trial {event.trial_id} of {whose})"
            yield _notice(event, "alert", level, title, event.data.get("description"))
    elif event.kind == "node_lost" and "node_lost" in {*rule.events}:
        node = str(event.data.get("node"))
        if node not in memory.lost or memory.lost[node] != event.data.get("seen_at"):
            text = "It gives no sign of life. Its trials continue elsewhere from checkpoints."
            yield _notice(event, "node_lost", "error", f"The node {node} is lost", text)


def _ended(
    event: Happening, rule: Notify, what: str, whose: str, state: str, error: Any
) -> Iterator[Notice]:
    has_failed = state == ExperimentState.ERROR.value
    topic = f"{what}_{'failed' if has_failed else 'ended'}"
    if topic in rule.events:
        title = f"{whose} {'failed' if has_failed else f'ended: {state}'}"
        yield _notice(event, topic, "error" if has_failed else "info", title, error)


def _notice(event: Happening, topic: str, level: str, title: str, text: Any) -> Notice:
    return Notice(
        topic=topic,
        level=level,
        title=" ".join(title.split()),
        text=str(text or "")[:_MAX_TEXT],
        time=event.since,
        experiment_id=event.experiment_id,
        trial_id=event.trial_id,
    )


def _thresholds_crossed(event: Happening, memory: Memory) -> dict[str, float]:
    """Return the values beyond a limit for the first time, by trial and limit."""
    if event.kind not in ("metrics", "validation"):
        return {}
    crossed = {}
    for limit in {limit for rule in event.rules for limit in rule.thresholds}:
        value = decode_value(event.data.get("metrics", {})).get(limit.metric)
        key = _key(event, limit)
        if _fits(limit, group_of(event)) and _is_beyond(limit, value) and key not in memory.told:
            crossed[key] = float(value)
    return crossed


def _by_threshold(event: Happening, rule: Notify, crossed: dict[str, float]) -> Iterator[Notice]:
    for limit in rule.thresholds:
        if (value := crossed.get(_key(event, limit))) is not None:
            side, number = ("below", limit.below) if limit.above is None else ("above", limit.above)
            title = (
                f"{limit.metric} is {value:g}, {side} {number:g}, in trial {event.trial_id} of"
                f" experiment {event.experiment_id} ({event.name})"
            )
            text = f"Group {group_of(event)}, step {event.data.get('steps_completed')}."
            yield _notice(event, "threshold", "warn", title, text)


def _key(event: Happening, limit: Threshold) -> str:
    return f"{event.trial_id}/{limit.model_dump_json()}"


def group_of(event: Happening) -> str:
    """Return the group of the metrics of an event."""
    return "validation" if event.kind == "validation" else str(event.data.get("group"))


def _fits(limit: Threshold, group: str) -> bool:
    return limit.group in (None, group)


def _is_beyond(limit: Threshold, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value > limit.above if limit.above is not None else value < (limit.below or 0.0)


def _note_event(event: Happening, memory: Memory) -> None:
    trial_id = event.trial_id
    if event.kind == "node_lost":
        memory.lost[str(event.data.get("node"))] = event.data.get("seen_at")
    if trial_id is None:
        return
    if event.kind == "attempt_started":
        memory.running[trial_id] = Running(
            event.experiment_id, event.name, event.rules, heard_at=event.time
        )
    elif event.kind == "attempt_ended":
        memory.running.pop(trial_id, None)
    elif event.kind == "trial_state" and TrialState(event.data.get("state")).is_terminal:
        memory.told -= {key for key in memory.told if key.startswith(f"{trial_id}/")}
    elif (running := memory.running.get(trial_id)) is not None:
        running.heard_at = max(running.heard_at, event.time)
        running.told = {key for key in running.told if key[0] != "silent"}
        if event.kind == "metrics" and group_of(event).startswith("system"):
            _note_gpus(event, running)


def _note_gpus(event: Happening, running: Running) -> None:
    metrics, group = decode_value(event.data.get("metrics", {})), group_of(event)
    uses = [value for name, value in metrics.items() if _GPU_USE.fullmatch(name)]
    if uses and max(uses) < _IDLE_PERCENT:
        running.idle_since.setdefault(group, event.time)
    else:
        running.idle_since.pop(group, None)
        running.told = {key for key in running.told if key[0] != group}


def overdue_notices(memory: Memory, now: float) -> list[Sent]:
    """Return the notices that time gives: silent trials, and idle GPUs."""
    found: list[Sent] = []
    for trial_id, running in memory.running.items():
        since = {"silent": running.heard_at} | running.idle_since
        # Two rules may have different limits.
        new = {
            (what, limit_s): [*rule.to]
            for rule in running.rules
            for what in since
            if (limit_s := rule.silent_after if what == "silent" else rule.gpu_idle_after)
            and now - since[what] >= limit_s
            and (what, limit_s) not in running.told
        }
        running.told |= new.keys()
        for (what, _), channels in new.items():
            is_silent = what == "silent"
            notice = Notice(
                topic="silent" if is_silent else "gpu_idle",
                level="warn",
                title=f"Trial {trial_id} of experiment {running.experiment_id} ({running.name})"
                f" {'reports nothing' if is_silent else 'leaves its GPUs idle'}",
                text=f"For {now - since[what]:.0f} s now.",
                time=now,
                experiment_id=running.experiment_id,
                trial_id=trial_id,
            )
            found += [(channel, notice) for channel in channels]
    return list(dict.fromkeys(found))
