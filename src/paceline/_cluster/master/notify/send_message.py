"""Program for sending a message: reads it from stdin, prints the outcome.

A process of its own: a receiver that hangs or floods can be cut off, and the master holds none of
the libraries.
"""

import base64
import hashlib
import hmac
import json
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

# What a receiver answers must fit, and the libraries.
_MAX_MEMORY_BYTES = 2**30
_TIMEOUT_S = 10.0
_LIMIT_S = 60
_KINDS = {"warn": "warning", "error": "failure"}
# Words that wake whole teams; titles and texts come from the code of jobs.
_MENTION = re.compile(r"@(?=everyone|here|channel|all)|<(?=[!@#])", re.IGNORECASE)


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a body as in "Standard Webhooks".

    Args:
        secret: `whsec_` and the key in base64.
        message_id: The header `webhook-id`.
        timestamp: The header `webhook-timestamp`, in seconds since 1970.
        body: The bytes of the body.
    """
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{message_id}.{timestamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"


def _post(order: dict[str, Any]) -> dict[str, Any]:
    import httpx2

    body = json.dumps(order["body"]).encode()
    timestamp = int(time.time())
    headers = {
        "content-type": "application/json",
        "webhook-id": order["id"],
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(order["secret"], order["id"], timestamp, body),
    }
    try:
        # The answer's body is never read; a redirect would send the message to a stranger.
        with (
            httpx2.Client(timeout=_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("POST", order["webhook"], content=body, headers=headers) as answer,
        ):
            status, after = answer.status_code, answer.headers.get("retry-after", "")
    except httpx2.HTTPError as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    if 200 <= status < 300:
        return {}
    retry_after_s = float(after) if re.fullmatch(r"\d{1,9}", after) else 0.0
    return {"failure": f"the receiver answers HTTP {status}", "retry_after_s": retry_after_s}


def _notify(order: dict[str, Any]) -> dict[str, Any]:
    import apprise

    sender = apprise.Apprise(asset=apprise.AppriseAsset(app_id="Paceline", http_redirects=False))
    if not sender.add(order["url"]):
        return {"failure": "the `url` is no address that apprise knows"}
    title, text = (_MENTION.sub("\\g<0>\u200b", order[name]) for name in ("title", "text"))
    result = sender.notify(
        title=title, body=text or title, body_format=apprise.NotifyFormat.TEXT,
        notify_type=_KINDS.get(order["level"], "info"),
    )  # fmt: skip
    if result:
        return {}
    texts = [str(entry.message) for entry in result.logs()]
    return {"failure": " ".join(texts) or "apprise could not send it"}


def main() -> None:
    """Send the message."""
    # The master cuts it off earlier, unless it was killed.
    signal.alarm(_LIMIT_S)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    order = json.load(sys.stdin)
    outcome = _post(order) if "webhook" in order else _notify(order)
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    main()
