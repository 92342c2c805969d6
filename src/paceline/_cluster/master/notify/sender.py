"""Sending of messages by processes of their own: receivers hold up nothing."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from paceline._cluster.master.notify import send_message
from paceline._cluster.master.notify.channels import Channel
from paceline._cluster.master.notify.outbox import Message, Outcome, as_json, describe

_LIMIT_S = 30.0
_LONGEST_FAILURE = 300


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
        order: dict[str, Any] = {"url": channel.url, "title": title, "text": text}
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
