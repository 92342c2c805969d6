"""Refusals for clients of MLflow and W&B: problems that also have the names which these read."""

import json

from starlette.types import Message, Send

_MLFLOW_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "INVALID_PARAMETER_VALUE",
    413: "RESOURCE_LIMIT_EXCEEDED",
    422: "INVALID_PARAMETER_VALUE",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


def sending_tracker_names(send: Send) -> Send:
    """Return a `send` function that adds these names to a problem, which comes in one piece."""
    start: Message | None = None

    async def wrapped(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if headers.get(b"content-type", b"").startswith(b"application/problem+json"):
                start = message
                return
        elif start is not None:
            body = _with_names(message.get("body", b""))
            headers = dict(start["headers"]) | {b"content-length": str(len(body)).encode()}
            await send({**start, "headers": [*headers.items()]})
            start, message = None, {**message, "body": body}
        await send(message)

    return wrapped


def _with_names(body: bytes) -> bytes:
    found = json.loads(body)
    code, text = found["code"], found["detail"]
    # MLflow's own codes are in capitals.
    code = code if code.isupper() else _MLFLOW_CODES.get(found["status"], "INTERNAL_ERROR")
    names = {"error_code": code, "message": text, "errors": [{"message": text}]}
    return json.dumps(found | names).encode()
