"""Models of the REST API for tokens."""

import re
from enum import Enum

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from paceline.messages.base import Message, Request
from paceline.messages.node_runners import LOCAL_NAME
from paceline.messages.node_runners import NAME_PATTERN as NODE_PATTERN

NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"


class TokenScope(str, Enum):
    """What a token allows: each scope includes those before it, but for the last two.

    `runner` allows to register a node and to ask for its attempts, and nothing else. `report`
    allows to send runs without a master, and nothing else.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"
    RUNNER = "runner"
    REPORT = "report"


class NewToken(Request):
    """A token to be made; it never expires if `expires_in_s` (seconds) is None.

    One of the scope `runner` registers only the node `node`, and only nodes in the pool `pool`, if
    these are given.
    """

    name: str = Field(pattern=NAME_PATTERN)
    scope: TokenScope = TokenScope.READ
    expires_in_s: float | None = Field(default=90 * 24 * 3600.0, gt=0, le=100 * 365 * 24 * 3600.0)
    node: str | None = None
    pool: str | None = None

    @model_validator(mode="after")
    def _check_binding(self) -> "NewToken":
        given = {"node": self.node, "pool": self.pool}
        for field, value in given.items():
            if value is not None and not re.fullmatch(NODE_PATTERN, value):
                raise ValueError(
                    f"`{field}` must be up to 63 letters, digits, dots, hyphens and underscores,"
                    f" but got {value!r}."
                )
        if self.scope is not TokenScope.RUNNER and any(given.values()):
            raise ValueError(
                "`node` and `pool` must be those of a token of the scope `runner`, but `scope` is"
                f" {self.scope.value!r}. Hint: leave them out, or choose that scope."
            )
        if self.node == LOCAL_NAME:
            raise ValueError(
                f"`node` must be another machine than the master's own, but got {LOCAL_NAME!r}."
            )
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what is not given: earlier masters know no such fields."""
        fields: dict[str, object] = handler(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("node", "pool")
        }


def make_new_token(**fields: object) -> NewToken:
    """Return a token to be made.

    Raises:
        ValueError: A field cannot be, in a sentence.
    """
    try:
        return NewToken.model_validate(fields)
    except ValidationError as error:
        found = [
            f"`{one['loc'][0]}` must be up to 64 letters, digits, dots, hyphens and underscores,"
            f" but got {one['input']!r}."
            if one["type"] == "string_pattern_mismatch"
            else ": ".join((*(f"`{field}`" for field in one["loc"]), one["msg"]))
            for one in error.errors()
        ]
        raise ValueError(" ".join(found).replace("Value error, ", "")) from error


class Token(Message):
    """A token without its secret; times are in seconds since the epoch.

    `node` and `pool` are the only ones that it registers, None for any.
    """

    id: int
    name: str
    scope: TokenScope
    created_at: float
    expires_at: float | None
    revoked_at: float | None = None
    node: str | None = None
    pool: str | None = None


class CreatedToken(Token):
    """A new token with its secret, which cannot be read again."""

    secret: str


class HomeToken(Message):
    """The new token of the master's home, which also lies in the file `token` there."""

    secret: str
