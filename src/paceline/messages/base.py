"""Base classes of the models of the REST API, pages of lists, and errors."""

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

Item = TypeVar("Item")


class Message(BaseModel):
    """Base of all messages; a client leaves out what a newer master adds to an answer."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Request(Message):
    """Base of what is sent to the master: unknown fields are refused, so that no typo passes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Page(Message, Generic[Item]):
    """One page of a list; pass `next_cursor` as `cursor` for the next, None at the end.

    `total` is the number of items on all pages, where the list tells it.
    """

    items: list[Item]
    next_cursor: str | None = None
    total: int | None = None


class Problem(Message):
    """An error in the form `application/problem+json` (RFC 9457), with a stable `code`."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str


Number = float | dict[str, str]
"""A float, or ``{"$float": "nan" | "inf" | "-inf"}``; `journal.decode_value` reads both."""
