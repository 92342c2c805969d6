"""Notices for events: a function of the event, the rules and a memory.

The file `notify.yaml`: channels, and rules for all experiments of a master.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from pydantic import Field, ValidationError, model_validator

from paceline._base.journal_records import decode_value
from paceline._cluster.messages.runner_messages import NAME_PATTERN
from paceline._cluster.messages.states import ExperimentState, TrialState
from paceline.config import _fields_and_problems as fields
from paceline.config._environment_and_secrets import Notify, Threshold, Topic, hide_values
from paceline.config._read_yaml import read_yaml_file

_LEVELS = ("debug", "info", "warn", "error")
_IDLE_PERCENT = 5.0
_GPU_USE = re.compile(r"gpu_\d+_percent")
_MAX_TITLE = 300
_MAX_TEXT = 2000
_HUGE = 10**300
_NEVER = -1.0
# Older news give no message: a run of last month may be shown for the first time today.
MAX_AGE_S = 24 * 3600.0

EVENTS = (
    "alert", "attempt_ended", "attempt_started", "checkpoint", "experiment_state", "metrics",
    "node_lost", "trial_state", "validation",
)  # fmt: skip
NOTIFY_FILE = "notify.yaml"
# 24 to 64 bytes in base64.
_SECRET = r"^whsec_([A-Za-z0-9+/]{4}){8,21}([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"  # noqa: S105
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
    """Event of the master, with the name of its experiment and the matching rules.

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

    @property
    def whose(self) -> str:
        """The experiment, in words."""
        return f"experiment {self.experiment_id} ({self.name})"

    @property
    def trial(self) -> str:
        """The trial, in words."""
        return f"trial {self.trial_id} of {self.whose}"

    @property
    def group(self) -> str:
        """The group of the event's metrics."""
        return "validation" if self.kind == "validation" else str(self.data.get("group"))

    def notice(self, topic: str, level: str, title: str, text: Any) -> Notice:
        """Return a notice about the event."""
        return Notice(
            topic=topic, level=level, title=_plain(" ".join(title.split()), _MAX_TITLE),
            text=_plain(str(text or ""), _MAX_TEXT), time=self.since,
            experiment_id=self.experiment_id, trial_id=self.trial_id,
        )  # fmt: skip


@dataclass(slots=True)
class Running:
    """A running trial: its newest event, and since when GPUs of its nodes are idle."""

    event: Happening
    idle_since: dict[str, float] = field(default_factory=dict)
    told: set[tuple[str, float]] = field(default_factory=set)


@dataclass(slots=True)
class Memory:
    """Memory of sent notices (thresholds by trial, lost nodes) and of the running trials.

    Of lost nodes, it has the time of the last sign of life: another time is another loss. Before
    `started_at` there was no master to report to.
    """

    told: set[str] = field(default_factory=set)
    lost: dict[str, float | None] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    started_at: float = 0.0


Sent = tuple[str, Notice]
"""The name of a channel, and a notice for it."""


def notices_of(event: Happening, memory: Memory) -> list[Sent]:
    """Return the notices for an event, and update the memory."""
    if event.time - event.since > MAX_AGE_S:
        return []
    crossed = _thresholds_crossed(event, memory)
    found = [
        (channel, notice)
        for rule in event.rules
        for notice in (*_by_topic(event, rule, memory), *_by_threshold(event, rule, crossed))
        for channel in rule.to
    ]
    memory.told.update(crossed)
    _note_event(event, memory)
    # Several rules may send the same to one channel.
    return list(dict.fromkeys(found))


def _by_topic(event: Happening, rule: Notify, memory: Memory) -> Iterator[Notice]:
    state, error = event.data.get("state"), event.data.get("error")
    if event.kind == "experiment_state" and ExperimentState(state).is_terminal:
        yield from _ended(event, rule, "experiment", f"E{event.whose[1:]}", error)
    elif event.kind == "trial_state" and TrialState(state).is_terminal:
        error = error or event.data.get("reason")
        yield from _ended(event, rule, "trial", f"T{event.trial[1:]}", error)
    elif event.kind == "alert" and "alert" in rule.events:
        level = str(event.data.get("level"))
        if level in _LEVELS and _LEVELS.index(level) >= _LEVELS.index(rule.alert_level):
            title = f"{event.data.get('title')} ({event.trial})"
            yield event.notice("alert", level, title, event.data.get("description"))
    elif event.kind == "node_lost" and "node_lost" in {*rule.events}:
        node, seen_at = str(event.data.get("node")), event.data.get("seen_at")
        if memory.lost.get(node, _NEVER) != seen_at:
            text = "It gives no sign of life. Its trials continue elsewhere from checkpoints."
            yield event.notice("node_lost", "error", f"The node {node} is lost", text)


def _ended(event: Happening, rule: Notify, what: str, whose: str, error: Any) -> Iterator[Notice]:
    has_failed = event.data["state"] == ExperimentState.ERROR.value
    topic = f"{what}_{'failed' if has_failed else 'ended'}"
    if topic in rule.events:
        title = f"{whose} {'failed' if has_failed else 'ended: ' + event.data['state']}"
        yield event.notice(topic, "error" if has_failed else "info", title, error)


def _thresholds_crossed(event: Happening, memory: Memory) -> dict[str, Any]:
    """Return the values beyond a limit for the first time, by trial and limit."""
    if event.kind not in ("metrics", "validation"):
        return {}
    metrics = decode_value(event.data.get("metrics", {}))
    return {
        _key(event, limit): metrics[limit.metric]
        for rule in event.rules
        for limit in rule.thresholds
        if limit.group in (None, event.group)
        and _is_beyond(limit, metrics.get(limit.metric))
        and _key(event, limit) not in memory.told
    }


def _by_threshold(event: Happening, rule: Notify, crossed: dict[str, Any]) -> Iterator[Notice]:
    for limit in rule.thresholds:
        if (value := crossed.get(_key(event, limit))) is not None:
            # A float holds no integer that is larger.
            value = max(-_HUGE, min(value, _HUGE)) if isinstance(value, int) else value
            side, number = ("below", limit.below) if limit.above is None else ("above", limit.above)
            title = f"{limit.metric} is {value:g}, {side} {number:g}, in {event.trial}"
            text = f"Group {event.group}, step {event.data.get('steps_completed')}."
            yield event.notice("threshold", "warn", title, text)


def _plain(text: str, length: int) -> str:
    """Return the beginning of a text, with halves of surrogate pairs as `?`."""
    return text[:length].encode(errors="replace").decode()


def _key(event: Happening, limit: Threshold) -> str:
    return f"{event.trial_id}/{limit.model_dump_json()}"


def _is_beyond(limit: Threshold, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value > limit.above if limit.above is not None else value < (limit.below or 0.0)


def _note_event(event: Happening, memory: Memory) -> None:
    trial_id = event.trial_id
    if event.kind == "node_lost":
        memory.lost[str(event.data.get("node"))] = event.data.get("seen_at")
    elif trial_id is None:
        return
    elif event.kind == "attempt_started":
        memory.running[trial_id] = Running(event)
    elif event.kind == "attempt_ended":
        memory.running.pop(trial_id, None)
    elif event.kind == "trial_state" and TrialState(event.data.get("state")).is_terminal:
        memory.told -= {key for key in memory.told if key.startswith(f"{trial_id}/")}
    elif (running := memory.running.get(trial_id)) is not None:
        running.event = event
        _end_told(running, "")
        if event.kind == "metrics" and event.group.startswith("system"):
            metrics = decode_value(event.data.get("metrics", {}))
            uses = [value for name, value in metrics.items() if _GPU_USE.fullmatch(name)]
            if uses and max(uses) < _IDLE_PERCENT:
                running.idle_since.setdefault(event.group, event.time)
            else:
                running.idle_since.pop(event.group, None)
                _end_told(running, event.group)


def _end_told(running: Running, what: str) -> None:
    running.told = {key for key in running.told if key[0] != what}


def overdue_notices(memory: Memory, now: float) -> list[Sent]:
    """Return the notices due to time: silent trials and idle GPUs."""
    found: list[Sent] = []
    for running in memory.running.values():
        event, told = running.event, set(running.told)
        # The empty name stands for reports, others for the GPUs of a node.
        heard_at = max(event.time, memory.started_at)
        for group, since in {"": heard_at, **running.idle_since}.items():
            for rule in event.rules:
                limit_s = rule.gpu_idle_after if group else rule.silent_after
                if limit_s is None or now - since < limit_s or (group, limit_s) in told:
                    continue
                running.told.add((group, limit_s))
                does = "leaves its GPUs idle" if group else "reports nothing"
                topic, text = "gpu_idle" if group else "silent", f"For {now - since:.0f} s now."
                notice = event.notice(topic, "warn", f"T{event.trial[1:]} {does}", text)
                found += [(channel, notice) for channel in rule.to]
    return list(dict.fromkeys(found))


class Channel(fields.Section):
    """Where messages go.

    Attributes:
        url: An address for apprise, such as `slack://...` or `mailtos://...`.
        webhook: An address for signed requests; in place of `url`.
        secret: The key of the signatures: `whsec_` and 24 to 64 bytes in base64.
        pause: The least time between two messages.
    """

    url: fields.Text | None = Field(default=None, repr=False)
    webhook: Annotated[str, Field(pattern=r"^https?://[^/\s]+\S*$")] | None = Field(
        default=None, repr=False
    )
    secret: Annotated[str, Field(pattern=_SECRET)] | None = Field(default=None, repr=False)
    pause: fields.Age = 60.0

    @model_validator(mode="after")
    def _check_address(self) -> "Channel":
        is_webhook = self.webhook is not None
        if is_webhook is (self.url is not None) or is_webhook is (self.secret is None):
            raise fields.refused("must have a `url`, or a `webhook` with a `secret`")
        return self

    @property
    def kind(self) -> str:
        """Kind in a word: `webhook`, or the scheme of the URL."""
        return "webhook" if self.url is None else self.url.partition(":")[0]

    def hide(self, text: str) -> str:
        """Return a text without the parts of the addresses: they can be tokens."""
        parts = re.split(r"[/:@?&=]", self.url or self.webhook or "")
        return hide_values(text, sorted({*parts, *map(unquote, parts)}, key=len, reverse=True))


class Rule(Notify):
    """Choice of messages and channels for all experiments, or for those with all `labels`."""

    to: Annotated[list[fields.Text], Field(min_length=1)]
    events: list[Topic | Literal["node_lost"]] = [  # type: ignore[assignment]
        *("alert", "experiment_ended", "experiment_failed", "node_lost")
    ]
    labels: list[fields.Text] = []


class NotifySettings(fields.Section):
    """The content of the file; `link` is the address of the web UI in messages."""

    channels: Annotated[
        dict[Annotated[str, Field(pattern=NAME_PATTERN)], Channel], Field(max_length=50)
    ] = {}
    rules: Annotated[list[Rule], Field(max_length=100)] = []
    link: fields.Text | None = None

    def check(self, config: Notify) -> None:
        """Check the channels of an experiment or a rule.

        Raises:
            ConfigError: One is not.
        """
        unknown = [name for name in config.to if name not in self.channels]
        if unknown:
            problem = fields.Problem(
                path="notify.to",
                value=unknown,
                message="must name channels that the master's `notify.yaml` has",
                allowed=", ".join(sorted(self.channels)) or "none yet",
                hint="`paceline notify list` shows them; an administrator adds others.",
            )
            raise fields.ConfigError([problem])


def read_notify_file(path: Path) -> NotifySettings:
    """Return the content of the file; without a file, there are no channels.

    Raises:
        ValueError: The file is not valid. The text has no values, as they may be secrets.
    """
    try:
        found = NotifySettings.model_validate(read_yaml_file(path) if path.exists() else {})
        for rule in found.rules:
            found.check(rule)
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        ]
        raise ValueError("\n".join(lines)) from None
    if find_spec("apprise") is None and any(one.url for one in found.channels.values()):
        raise ValueError(
            f"{path}: channels: A `url` needs the package `apprise`, which is not installed. Hint:"
            " pip install 'paceline[notify]'"
        )
    return found
