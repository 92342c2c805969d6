"""The thread that follows the events of a master and sends messages about them."""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from sqlalchemy import Connection, delete, func, insert, select

from paceline._cluster.master.notify.channels import NotifySettings
from paceline._cluster.master.notify.notices import (
    EVENTS,
    Happening,
    Memory,
    Notice,
    Running,
    group_of,
    notices_of,
    overdue_notices,
)
from paceline._cluster.master.notify.outbox import (
    Group,
    Message,
    Outbox,
    Outcome,
)
from paceline._cluster.master.notify.sender import Sender
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.messages.master_models import NotifyChannel
from paceline._cluster.messages.states import AttemptState
from paceline.config._fields_and_problems import ConfigError, Problem
from paceline.config._notify_section import Notify

logger = logging.getLogger(__name__)

_KEY = "notify"
_EVENTS_PER_READ = 1000
# Events are read at most so often, and the time is looked at so often.
_SETTLE_S = 0.2
_TICK_S = 5.0
# How often the newest event looked at is stored, without news.
_SAVE_S = 60.0


class _Saved(msgspec.Struct, kw_only=True):
    """What outlives a master: the newest event looked at, and what is not sent."""

    cursor: int
    told: set[str] = msgspec.field(default_factory=set)
    lost: dict[str, float | None] = msgspec.field(default_factory=dict)
    outboxes: dict[str, Outbox] = msgspec.field(default_factory=dict)


class Notifier:
    """Follower of the events that sends messages to the channels of `notify.yaml`.

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
        self._memory = Memory()
        self._saved = _Saved(cursor=0)
        self._is_changed, self._save_at = False, 0.0
        self._sender = Sender(cluster_id, (settings.link or url).rstrip("/"))
        self._sends: dict[str, Future[Outcome]] = {}
        self._woken, self._closing = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(max(len(settings.channels), 1), "notify-send")
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        database.on_commit(self._on_commit)

    def start(self) -> None:
        """Begin to follow, if there are channels."""
        if not self._settings.channels:
            # Channels that come later get no news of today.
            self._database.write(lambda transaction: _store(transaction, None)).result()
            return
        self._load()
        self._thread.start()

    def close(self) -> None:
        """Stop; what is not sent is sent by the next master."""
        self._closing.set()
        self._woken.set()
        self._sender.close()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()

    def check(self, config: Notify) -> None:
        """Check that the channels of an experiment are channels of this master.

        Raises:
            ConfigError: One is not.
        """
        known = ", ".join(sorted(self._settings.channels)) or "none yet"
        problems = [
            Problem(
                path="notify.to",
                value=name,
                message="must name channels that the master's `notify.yaml` has",
                allowed=known,
                hint="`paceline notify list` shows them; an administrator adds others.",
            )
            for name in self._settings.unknown(config.to)
        ]
        if problems:
            raise ConfigError(problems)

    def channels(self) -> list[NotifyChannel]:
        """Return the channels with the state of their messages; no addresses."""
        found = []
        for name, channel in sorted(self._settings.channels.items()):
            box = self._saved.outboxes.get(name) or Outbox()
            waiting = sum(group.count for group in [*box.waiting]) + box.num_left_out
            found.append(
                NotifyChannel(
                    name=name,
                    kind=channel.kind,
                    num_waiting=waiting + (box.sending.num_notices if box.sending else 0),
                    num_dropped=box.num_dropped,
                    failure=box.failure,
                )
            )
        return found

    def problems(self) -> list[str]:
        """Return a sentence for each channel whose messages fail."""
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
        """
        now = time.time()
        notice = Notice(
            topic="test", level="info", title="Test message of Paceline",
            text=f"The channel {name} works.", time=now, experiment_id=0,
        )  # fmt: skip
        message = Message(id=f"test_{time.time_ns()}", time=now, groups=[Group(notice=notice)])
        return self._sender.send(self._settings.channels[name], message)

    def _on_commit(self, has_events: bool) -> None:
        if has_events:
            self._woken.set()

    # ---- passes ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.clear()
            try:
                delay_s = self._pass()
            except Exception:
                logger.exception("Messages to people wait, as a pass failed.")
                delay_s = _TICK_S
            self._woken.wait(delay_s)
            self._closing.wait(_SETTLE_S)
        self._is_changed = True
        self._save(time.time())

    def _pass(self) -> float:
        """Take in new events, send what is due, and return the seconds until more is due."""
        now, boxes = time.time(), self._saved.outboxes
        with self._database.read() as connection:
            events, cursor = self._read_events(connection)
        news = [one for event in events for one in notices_of(event, self._memory)]
        news += overdue_notices(self._memory, now)
        for name, notice in news:
            if name in self._settings.channels:
                boxes.setdefault(name, Outbox()).add(notice)
        settled = [name for name, future in self._sends.items() if future.done()]
        for name in settled:
            outcome = self._sends.pop(name).result()
            boxes[name].settle(outcome, now, self._settings.channels[name].pause)
        idle = [name for name in boxes if name not in self._sends]
        due = {name: message for name in idle if (message := boxes[name].take(now))}
        is_old = cursor > self._saved.cursor and now >= self._save_at
        self._saved.cursor = cursor
        self._is_changed |= bool(news or settled or due) or is_old
        self._save(now)
        for name, message in due.items():
            channel = self._settings.channels[name]
            self._sends[name] = self._pool.submit(self._sender.send, channel, message)
            self._sends[name].add_done_callback(lambda _: self._woken.set())
        times = [box.due_at for name, box in boxes.items() if name not in self._sends]
        return min([_TICK_S, *(max(at - now, 0.0) for at in times if at is not None)])

    def _load(self) -> None:
        attempts = tables.attempts
        with self._database.read() as connection:
            query = select(tables.meta.c.value).where(tables.meta.c.key == _KEY)
            text = connection.scalar(query)
            newest = connection.scalar(select(func.max(tables.events.c.id))) or 0
            running = connection.execute(
                select(attempts.c.trial_id, attempts.c.experiment_id).where(
                    attempts.c.state == AttemptState.RUNNING.value
                )
            ).all()
            facts = self._facts(connection, {row.experiment_id for row in running})
        self._saved = (
            _Saved(cursor=newest) if text is None else msgspec.json.decode(text, type=_Saved)
        )
        self._memory = Memory(told=self._saved.told, lost=self._saved.lost)
        # Channels that the file has no more.
        for name in self._settings.unknown(self._saved.outboxes):
            del self._saved.outboxes[name]
        # Nobody reported while there was no master, so the time begins anew.
        now = time.time()
        for row in running:
            name, rules, _ = facts[row.experiment_id]
            self._memory.running[row.trial_id] = Running(row.experiment_id, name, rules, now)

    def _save(self, now: float) -> None:
        if self._is_changed:
            text = msgspec.json.encode(self._saved).decode()
            self._database.write(lambda transaction: _store(transaction, text)).result()
            self._is_changed, self._save_at = False, now + _SAVE_S

    # ---- events ----------------------------------------------------------------------------

    def _read_events(self, connection: Connection) -> tuple[list[Happening], int]:
        """Return the next events, and the id up to which all were read."""
        events, cursor = tables.events, self._saved.cursor
        newest = connection.scalar(select(func.max(events.c.id))) or cursor
        if newest <= cursor:
            return [], cursor
        query = (
            select(events)
            .where(events.c.id > cursor, events.c.id <= newest, events.c.kind.in_(EVENTS))
            .order_by(events.c.id)
            .limit(_EVENTS_PER_READ)
        )
        rows = connection.execute(query).all()
        if len(rows) == _EVENTS_PER_READ:
            newest = rows[-1].id
            self._woken.set()
        facts = self._facts(connection, {row.experiment_id for row in rows})
        found = []
        for row in rows:
            # Of deleted experiments, nothing is known.
            if row.experiment_id not in facts:
                continue
            name, rules, ended_at = facts[row.experiment_id]
            since = ended_at if row.kind.endswith("_state") and ended_at else row.time
            event = Happening(
                time=row.time,
                since=row.data.get("raised_at", since),
                kind=row.kind,
                experiment_id=row.experiment_id,
                trial_id=row.trial_id,
                data=row.data,
                name=name,
                rules=rules,
            )
            if any(rule.thresholds for rule in rules):
                _add_cut_metrics(connection, event)
            found.append(event)
        return found, newest

    def _facts(
        self, connection: Connection, ids: Iterable[int]
    ) -> dict[int, tuple[str, list[Notify], float | None]]:
        """Return the name, the rules and the end of runs without a master, by experiment."""
        general = [rule for rule in self._settings.rules if not rule.labels]
        found: dict[int, tuple[str, list[Notify], float | None]] = {0: ("", [*general], None)}
        experiments = tables.experiments
        for row in connection.execute(select(experiments).where(experiments.c.id.in_(ids))):
            rules: list[Notify] = [
                rule for rule in self._settings.rules if set(rule.labels) <= set(row.labels)
            ]
            # A run without a master comes from whoever may report: its config decides nothing.
            is_managed = row.external_id is None
            if is_managed and (own := config_of(row).notify).to:
                rules.append(own)
            found[row.id] = (row.name, rules, None if is_managed else row.ended_at)
        return found


def _store(transaction: Transaction, text: str | None) -> None:
    meta = tables.meta
    transaction.connection.execute(delete(meta).where(meta.c.key == _KEY))
    if text is not None:
        transaction.connection.execute(insert(meta).values(key=_KEY, value=text))


def _add_cut_metrics(connection: Connection, event: Happening) -> None:
    """Add the newest values of watched metrics to an event that left out a large report."""
    if event.kind not in ("metrics", "validation") or event.data.get("metrics"):
        return
    series = tables.series
    watched = {limit.metric for rule in event.rules for limit in rule.thresholds}
    query = (
        select(series.c.key, series.c.last)
        .where(
            series.c.trial_id == event.trial_id,
            series.c.group == group_of(event),
            series.c.key.in_(watched),
        )
        .order_by(series.c.attempt)
    )
    event.data["metrics"] = {row.key: row.last for row in connection.execute(query)}
