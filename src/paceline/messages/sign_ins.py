"""Models of the REST API for signing in."""

from pydantic import Field

from paceline.messages.base import Message, Request


class Session(Message):
    """Who is signed in, None for nobody; `has_password` tells whether a password could sign in.

    `scope` is "read", "submit", "admin", or "attempt" for the token of one attempt.
    """

    user: str | None
    has_password: bool
    scope: str | None = None


class Login(Request):
    """A user's name and password."""

    user: str = Field(default="admin", max_length=64)
    password: str = Field(max_length=1024)


class NewPassword(Request):
    """A password to be set."""

    password: str = Field(min_length=8, max_length=1024)


class SignInLink(Message):
    """A link that signs a browser in, once, before `expires_at`."""

    url: str
    expires_at: float
