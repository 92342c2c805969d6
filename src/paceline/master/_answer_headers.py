"""Headers of every answer: what a browser may do with it."""

from starlette.types import Message, Send

# Answers of the API are data: a browser that shows one loads and runs nothing.
API_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = (
    (b"content-security-policy", API_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


def with_security_headers(
    headers: list[tuple[bytes, bytes]],
) -> list[tuple[bytes, bytes]]:
    """Return headers with those of every answer; what is there already stays."""
    there = {name.lower() for name, _ in headers}
    return [*headers, *(header for header in _HEADERS if header[0] not in there)]


def sending_security_headers(send: Send) -> Send:
    """Return what sends an answer with the headers of every answer."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": with_security_headers(list(message["headers"]))}
        await send(message)

    return wrapped
