"""Sending of messages by processes of their own, so that receivers hold up nothing."""

import json
import subprocess
import sys
import threading
from typing import Any

import msgspec

from paceline._cluster.master.notify import send_message
from paceline._cluster.master.notify.channels import Channel
from paceline._cluster.master.notify.outbox import Message, Outcome, as_json, describe

_LIMIT_S = 30.0
_LONGEST_FAILURE = 300


class Sender:
    """Sender of messages; for any thread.

    Args:
        cluster_id: The identity of the master in requests to webhooks.
        link: The address of the web UI in messages.
    """

    def __init__(self, cluster_id: str, link: str) -> None:
        self._cluster_id = cluster_id
        self._link = link
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Cut off what is being sent."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.kill()

    def send(self, channel: Channel, message: Message) -> Outcome:
        """Send a message, within a limited time, and return the outcome."""
        # The addresses hold tokens, and everyone on the machine can read arguments.
        program = [sys.executable, "-m", send_message.__name__]
        try:
            process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return Outcome(failure=f"no process can be started ({error.strerror})")
        with self._lock:
            self._processes.add(process)
            if self._is_closed:
                process.kill()
        try:
            answer, _ = process.communicate(self._order(channel, message), _LIMIT_S)
            outcome = msgspec.json.decode(answer, type=Outcome)
        except subprocess.TimeoutExpired:
            outcome = Outcome(failure=f"the receiver gives no answer within {_LIMIT_S:.0f} s")
        except msgspec.MsgspecError:
            outcome = Outcome(failure=f"the sender ended with code {process.returncode}")
        finally:
            process.kill()
            process.communicate()
            with self._lock:
                self._processes.discard(process)
        if outcome.failure is not None:
            outcome.failure = channel.hide(outcome.failure)[:_LONGEST_FAILURE]
        return outcome

    def _order(self, channel: Channel, message: Message) -> bytes:
        order: dict[str, Any]
        if channel.webhook is None:
            title, text = describe(message, self._link)
            order = {"url": channel.url, "title": title, "text": text}
        else:
            body = as_json(message, self._cluster_id, self._link)
            order = {
                "webhook": channel.webhook,
                "secret": channel.secret,
                "id": message.id,
                "body": body,
            }
        return json.dumps(order).encode()
