"""Messages to people: a thread that follows the events, and the outbox of each channel."""

import json
import logging
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.notify import notices, send_message
from paceline._cluster.master.notify.notices import (
    MAX_AGE_S,
    Channel,
    Happening,
    Memory,
    Notice,
    NotifySettings,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, DatabaseUnavailableError, Transaction
from paceline._cluster.messages.master_models import NotifyChannel
from paceline._cluster.messages.states import AttemptState
from paceline.config._environment_and_secrets import Notify

_MAX_GROUPS = 20
_MAX_TITLES = 5
_LONGEST_PAUSE_S = 300.0
_LONGEST_RETRY_AFTER_S = 3600.0
_LIMIT_S = 30.0
_LONGEST_FAILURE = 300


class Group(msgspec.Struct, kw_only=True):
    """Like notices of an experiment: the first, how many there are, and titles of the next."""

    notice: Notice
    count: int = 1
    more: list[str] = msgspec.field(default_factory=list)


class Message(msgspec.Struct, kw_only=True):
    """Message for a channel; `num_left_out` notices found no place."""

    id: str
    time: float
    groups: list[Group]
    num_left_out: int = 0

    @property
    def num_notices(self) -> int:
        """Return how many notices the message stands for."""
        return sum(group.count for group in self.groups) + self.num_left_out


class Outcome(msgspec.Struct, kw_only=True):
    """Outcome of sending a message; `failure` is None for success."""

    failure: str | None = None
    retry_after_s: float = 0.0


class Outbox(msgspec.Struct, kw_only=True):
    """Waiting notices and the present message of a channel.

    The message stays the same until it is sent. Like notices are counted, so the size is limited.
    """

    waiting: list[Group] = msgspec.field(default_factory=list)
    num_left_out: int = 0
    sending: Message | None = None
    num_tries: int = 0
    next_at: float = 0.0
    failure: str | None = None
    num_dropped: int = 0

    def add(self, notice: Notice) -> None:
        """Let a notice wait for the next message."""
        for group in self.waiting:
            first = group.notice
            if (first.topic, first.experiment_id) == (notice.topic, notice.experiment_id):
                group.count += 1
                if len(group.more) < _MAX_TITLES - 1:
                    group.more.append(notice.title)
                return
        if len(self.waiting) < _MAX_GROUPS:
            self.waiting.append(Group(notice=notice))
        else:
            self.num_left_out += 1

    @property
    def num_waiting(self) -> int:
        """Return how many notices are not sent."""
        waiting = sum(group.count for group in self.waiting) + self.num_left_out
        return waiting + (self.sending.num_notices if self.sending else 0)

    @property
    def due_at(self) -> float | None:
        """Return when there is something to send; None without anything."""
        return self.next_at if self.sending or self.waiting else None

    def take(self, now: float) -> Message | None:
        """Return the message to send now, if any; `settle` must follow."""
        if self.due_at is None or now < self.due_at:
            return None
        if self.sending is None:
            self.sending = Message(
                id=f"msg_{secrets.token_hex(12)}",
                time=now,
                groups=self.waiting,
                num_left_out=self.num_left_out,
            )
            self.waiting, self.num_left_out = [], 0
        return self.sending

    def settle(self, outcome: Outcome, now: float, pause_s: float) -> None:
        """Note how the message was sent, and when the next try or message may follow."""
        assert self.sending is not None
        self.failure = outcome.failure
        if outcome.failure is None:
            self.sending, self.num_tries, self.next_at = None, 0, now + pause_s
            return
        self.num_tries += 1
        asked_s = min(outcome.retry_after_s, _LONGEST_RETRY_AFTER_S)
        self.next_at = now + max(asked_s, min(2.0 ** (self.num_tries - 1), _LONGEST_PAUSE_S))
        if now - self.sending.time > MAX_AGE_S:
            self.num_dropped += self.sending.num_notices
            self.sending, self.num_tries = None, 0


def describe(message: Message, link: str) -> tuple[str, str]:
    """Return the title and the text of a message; `link` is the address of the web UI."""
    lines: list[str] = []
    for group in message.groups:
        notice = group.notice
        rest = group.count - 1 - len(group.more)
        lines += [notice.title, notice.text, *group.more, f"... and {rest} more" if rest else ""]
        lines.append(f"{link}/experiments/{notice.experiment_id}" if notice.experiment_id else "")
    lines.append(f"{message.num_left_out} more messages." if message.num_left_out else "")
    title = message.groups[0].notice.title
    if message.num_notices > 1:
        title += f", and {message.num_notices - 1} more"
    return title, "\n".join(filter(None, lines))


def as_json(message: Message, cluster_id: str, link: str) -> dict[str, Any]:
    """Return the body of a webhook's request."""
    facts = {"version": 1, "cluster_id": cluster_id, "link": link}
    return {**facts, **msgspec.to_builtins(message)}


class Delivery:
    """A message on its way to a channel; `close` must follow.

    Args:
        channel: Where it goes.
        message: What goes there.
        cluster_id: The identity of the master in requests to webhooks.
        link: The address of the web UI in messages.

    Raises:
        OSError: No process can be started.
    """

    def __init__(self, channel: Channel, message: Message, cluster_id: str, link: str) -> None:
        self._channel = channel
        self._ends_at = time.monotonic() + _LIMIT_S
        title, text = describe(message, link)
        level = message.groups[0].notice.level
        order: dict[str, Any] = {"url": channel.url, "title": title, "text": text, "level": level}
        if channel.webhook is not None:
            order = {"webhook": channel.webhook, "secret": channel.secret, "id": message.id}
            order["body"] = as_json(message, cluster_id, link)
        # The addresses hold tokens, and everyone on the machine can read arguments.
        pipe, program = subprocess.PIPE, [sys.executable, "-m", send_message.__name__]
        self._process = subprocess.Popen(
            # No module of the master's working directory, which others may write to.
            program,
            cwd="/",
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def outcome(self) -> Outcome | None:
        """Return the outcome, None while the process runs."""
        process = self._process
        if process.poll() is None:
            if time.monotonic() < self._ends_at:
                return None
            return Outcome(failure=f"the receiver gives no answer within {_LIMIT_S:.0f} s")
        assert process.stdout is not None
        try:
            outcome = msgspec.json.decode(process.stdout.read(), type=Outcome)
        except msgspec.MsgspecError:
            outcome = Outcome(failure=f"the sender ended with code {process.returncode}")
        if outcome.failure is not None:
            outcome.failure = self._channel.hide(outcome.failure)[:_LONGEST_FAILURE]
        return outcome

    def wait(self) -> Outcome:
        """Wait for the end, and return the outcome."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(self._ends_at - time.monotonic(), 0.0))
        outcome = self.outcome()
        assert outcome is not None
        return outcome

    def close(self) -> None:
        """Kill the process, unless it has ended."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


logger = logging.getLogger(__name__)

_KEY = "notify"
_EVENTS_PER_READ = 1000
# Shortest and longest pause between two passes.
_SETTLE_S = 0.2
_TICK_S = 5.0
# Interval of storing the newest event read, without news.
_SAVE_S = 60.0


class _Saved(msgspec.Struct, kw_only=True):
    """State for the next master: the newest event read, and the unsent notices."""

    cursor: int
    told: set[str] = msgspec.field(default_factory=set)
    lost: dict[str, float | None] = msgspec.field(default_factory=dict)
    outboxes: dict[str, Outbox] = msgspec.field(default_factory=dict)


class Notifier:
    """Follower of events; sends messages to the channels of `notify.yaml`.

    Notices are stored with the newest event looked at before any is sent: a master that is killed
    loses none, and may send one twice, with the same id. Messages are sent by other processes, so
    that no receiver holds up the master or another channel.

    Args:
        database: Has the events, and keeps what is not sent.
        settings: The channels and the rules for all experiments.
        cluster_id: The identity of the master in requests to webhooks.
        url: The address in messages, if the settings have none.
    """

    def __init__(
        self, database: Database, settings: NotifySettings, cluster_id: str, url: str
    ) -> None:
        self._database = database
        self._settings = settings
        self._sender = cluster_id, (settings.link or url).rstrip("/")
        self._memory = Memory(started_at=time.time())
        self._saved = _Saved(cursor=0)
        self._is_changed, self._save_at = False, 0.0
        self._deliveries: dict[str, Delivery] = {}
        self._woken, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        database.on_commit(self._on_commit)

    def start(self) -> None:
        """Begin to follow, if there are channels."""
        if self._settings.channels:
            self._load()
            self._thread.start()
        else:
            # Channels that come later get no news of today.
            self._database.write(lambda transaction: _store(transaction, None)).result()

    def close(self) -> None:
        """Stop; the next master sends the rest."""
        self._closing.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def channels(self) -> list[NotifyChannel]:
        """Return the channels with the state of their messages; no addresses."""
        found = []
        for name, channel in sorted(self._settings.channels.items()):
            box = self._saved.outboxes.get(name) or Outbox()
            found.append(
                NotifyChannel(
                    name=name, kind=channel.kind, num_waiting=box.num_waiting,
                    num_dropped=box.num_dropped, failure=box.failure,
                )
            )  # fmt: skip
        return found

    def problems(self) -> list[str]:
        """Return a sentence for each failing channel."""
        return [
            f"The channel {one.name} cannot be sent to: {one.failure}. {one.num_waiting} messages"
            f" wait, {one.num_dropped} were given up. Hint: `paceline notify test {one.name}`."
            for one in self.channels()
            if one.failure is not None
        ]

    def test(self, name: str) -> Outcome:
        """Send a message to a channel at once, and return the outcome.

        Raises:
            KeyError: There is no such channel.
            OSError: No process can be started.
        """
        channel, now = self._settings.channels[name], time.time()
        notice = Notice(
            topic="test", level="info", title="Test message of Paceline",
            text=f"The channel {name} works.", time=now, experiment_id=0,
        )  # fmt: skip
        message = Message(id=f"test_{time.time_ns()}", time=now, groups=[Group(notice=notice)])
        delivery = Delivery(channel, message, *self._sender)
        try:
            return delivery.wait()
        finally:
            delivery.close()

    def _on_commit(self, has_events: bool) -> None:
        if has_events:
            self._woken.set()

    # ---- passes ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.clear()
            try:
                delay_s = self._pass(time.time())
            except Exception:
                logger.exception("Messages to people wait, as a pass failed.")
                delay_s = _TICK_S
            self._woken.wait(delay_s)
            self._closing.wait(_SETTLE_S)
        for delivery in self._deliveries.values():
            delivery.close()
        self._is_changed = True
        with suppress(DatabaseUnavailableError):
            self._save(time.time())

    def _pass(self, now: float) -> float:
        """Process new events, send due messages, and return the seconds until the next pass."""
        boxes, channels = self._saved.outboxes, self._settings.channels
        with self._database.read() as connection:
            events, cursor = self._read_events(connection)
        news = [one for event in events for one in self._notices_of(event)]
        news += notices.overdue_notices(self._memory, now)
        for name, notice in news:
            # Experiments of last year may name channels of last year.
            if name in channels:
                boxes.setdefault(name, Outbox()).add(notice)
        outcomes = {name: one.outcome() for name, one in self._deliveries.items()}
        settled = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
        for name, outcome in settled.items():
            self._deliveries.pop(name).close()
            boxes[name].settle(outcome, now, channels[name].pause)
        idle = [name for name in boxes if name not in self._deliveries]
        due = {name: message for name in idle if (message := boxes[name].take(now))}
        is_old = cursor > self._saved.cursor and now >= self._save_at
        self._saved.cursor = cursor
        self._is_changed |= bool(news or settled or due) or is_old
        self._save(now)
        for name, message in due.items():
            self._deliveries[name] = Delivery(channels[name], message, *self._sender)
        times = [boxes[name].due_at for name in idle if name not in due]
        until_due = [max(at - now, 0.0) for at in times if at is not None]
        return 0.0 if self._deliveries else min([_TICK_S, *until_due])

    def _notices_of(self, event: Happening) -> list[notices.Sent]:
        try:
            return notices.notices_of(event, self._memory)
        except Exception:
            # One event must not hold up all that follow.
            logger.exception("An event gives no message: %s", event.kind)
            return []

    def _load(self) -> None:
        attempts, meta = tables.attempts.c, tables.meta.c
        with self._database.read() as connection:
            text = connection.scalar(sa.select(meta.value).where(meta.key == _KEY))
            newest = connection.scalar(sa.select(sa.func.max(tables.events.c.id))) or 0
            began = sa.literal(self._memory.started_at).label("time")
            nothing = sa.literal({}, type_=sa.JSON).label("data")
            query = sa.select(
                attempts.experiment_id,
                attempts.trial_id,
                began,
                nothing,
                sa.literal("").label("kind"),
            ).where(attempts.state == AttemptState.RUNNING.value)
            running = self._happenings(connection, connection.execute(query).all())
        if text is None:
            self._saved = _Saved(cursor=newest)
        else:
            self._saved = msgspec.json.decode(text, type=_Saved)
        for name in self._saved.outboxes.keys() - self._settings.channels.keys():
            del self._saved.outboxes[name]
        self._memory.told, self._memory.lost = self._saved.told, self._saved.lost
        for event in running:
            self._memory.running[event.trial_id or 0] = notices.Running(event)

    def _save(self, now: float) -> None:
        if self._is_changed:
            text = msgspec.json.encode(self._saved).decode()
            self._database.write(lambda transaction: _store(transaction, text)).result()
            self._is_changed, self._save_at = False, now + _SAVE_S

    # ---- events ----------------------------------------------------------------------------

    def _read_events(self, connection: sa.Connection) -> tuple[list[Happening], int]:
        """Return the next events, and the id of the newest event read."""
        events, cursor = tables.events, self._saved.cursor
        newest = connection.scalar(sa.select(sa.func.max(events.c.id))) or cursor
        query = (
            sa.select(events)
            .where(events.c.id > cursor, events.c.id <= newest, events.c.kind.in_(notices.EVENTS))
            .order_by(events.c.id)
            .limit(_EVENTS_PER_READ)
        )
        rows = connection.execute(query).all()
        if len(rows) == _EVENTS_PER_READ:
            newest = rows[-1].id
            self._woken.set()
        return self._happenings(connection, rows), max(newest, cursor)

    def _happenings(
        self, connection: sa.Connection, rows: Sequence[sa.Row[Any]]
    ) -> list[Happening]:
        """Return events with the facts of their experiments, except of deleted experiments."""
        facts = self._facts(connection, {row.experiment_id for row in rows})
        found = []
        for row in rows:
            if row.experiment_id not in facts:
                continue
            name, rules, ended_at = facts[row.experiment_id]
            since = ended_at if row.kind.endswith("_state") and ended_at else row.time
            event = Happening(
                time=row.time, since=row.data.get("raised_at", since), kind=row.kind,
                experiment_id=row.experiment_id, trial_id=row.trial_id, data=row.data,
                name=name, rules=rules,
            )  # fmt: skip
            _add_cut_metrics(connection, event)
            found.append(event)
        return found

    def _facts(
        self, connection: sa.Connection, ids: Iterable[int]
    ) -> dict[int, tuple[str, list[Notify], float | None]]:
        """Return the name, the rules and the end of runs without a master, by experiment."""
        rules = self._settings.rules
        found: dict[int, tuple[str, list[Notify], float | None]] = {}
        # News of the master itself.
        found[0] = "", [rule for rule in rules if not rule.labels], None
        experiments = tables.experiments
        for row in connection.execute(sa.select(experiments).where(experiments.c.id.in_(ids))):
            general: list[Notify] = [rule for rule in rules if {*rule.labels} <= {*row.labels}]
            # A run without a master comes from whoever may report: its config decides nothing.
            is_managed = row.external_id is None
            own = [config_of(row).notify] if is_managed else []
            found[row.id] = (row.name, general + own, None if is_managed else row.ended_at)
        return found


def _store(transaction: Transaction, text: str | None) -> None:
    meta = tables.meta
    transaction.connection.execute(sa.delete(meta).where(meta.c.key == _KEY))
    if text is not None:
        transaction.connection.execute(sa.insert(meta).values(key=_KEY, value=text))


def _add_cut_metrics(connection: sa.Connection, event: Happening) -> None:
    """Add the newest values of watched metrics to an event without its large report."""
    watched = {limit.metric for rule in event.rules for limit in rule.thresholds}
    if not watched or event.data.get("metrics") != {}:
        return
    series = tables.series.c
    query = sa.select(series.key, series.last).where(
        series.trial_id == event.trial_id, series.group == event.group, series.key.in_(watched)
    )
    for row in connection.execute(query.order_by(series.attempt)):
        event.data["metrics"][row.key] = row.last
