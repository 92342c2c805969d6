"""Messages of a channel: waiting notices, the present message, and its retries.

Sending of messages by processes of their own: receivers hold up nothing.
"""

import json
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from paceline._cluster.master.notify import send_message
from paceline._cluster.master.notify.notices import MAX_AGE_S, Channel, Notice

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
