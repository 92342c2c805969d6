"""The file `notify.yaml`: channels, and rules for all experiments of a master."""

import base64
import binascii
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from paceline._cluster.messages.runner_messages import NAME_PATTERN
from paceline.config._environment_and_secrets import hide_values
from paceline.config._fields_and_problems import Age, Section, Text, refused
from paceline.config._notify_section import Notify, Topic
from paceline.config._read_yaml import read_yaml_file

NOTIFY_FILE = "notify.yaml"

_SECRET_PREFIX = "whsec_"  # noqa: S105 - how secrets begin, no secret
_SECRET_BYTES = range(24, 65)
_MAX_CHANNELS = 50
_MAX_RULES = 100


class Channel(Section):
    """Where messages go.

    Attributes:
        url: An address for apprise, such as `slack://...` or `mailtos://...`.
        webhook: An address for signed requests; in place of `url`.
        secret: The key of the signatures: `whsec_` and 24 to 64 bytes in base64.
        pause: The least time between two messages.
    """

    url: Text | None = Field(default=None, repr=False)
    webhook: Text | None = Field(default=None, repr=False)
    secret: Text | None = Field(default=None, repr=False)
    pause: Age = 60.0

    @field_validator("webhook")
    @classmethod
    def _check_webhook(cls, value: str | None) -> str | None:
        if value is not None:
            address = urlsplit(value)
            if address.scheme not in ("http", "https") or not address.hostname:
                raise refused("must be an address that begins with https:// or http://")
        return value

    @field_validator("secret")
    @classmethod
    def _check_secret(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                key = base64.b64decode(value.removeprefix(_SECRET_PREFIX), validate=True)
            except binascii.Error:
                key = b""
            if not value.startswith(_SECRET_PREFIX) or len(key) not in _SECRET_BYTES:
                raise refused("must be `whsec_` and 24 to 64 random bytes in base64")
        return value

    @model_validator(mode="after")
    def _check_address(self) -> "Channel":
        if (self.url is None) == (self.webhook is None):
            raise refused("must have one address: `url` or `webhook`")
        if (self.webhook is None) != (self.secret is None):
            raise refused("must have a `secret` with a `webhook`, and none with a `url`")
        return self

    @property
    def kind(self) -> str:
        """How it sends, in a word: `webhook`, or the scheme of the URL."""
        return "webhook" if self.url is None else self.url.partition(":")[0]

    def hide(self, text: str) -> str:
        """Return a text without the parts of the addresses, which hold tokens."""
        parts = re.split(r"[/:@?&=]", self.url or self.webhook or "")
        parts += [unquote(part) for part in parts]
        return hide_values(text, sorted(parts, key=len, reverse=True))


class Rule(Notify):
    """Which messages about all experiments, or those with all `labels`, go to which channels."""

    to: Annotated[list[Text], Field(min_length=1)]
    events: list[Topic | Literal["node_lost"]] = [  # type: ignore[assignment]
        "alert",
        "experiment_ended",
        "experiment_failed",
        "node_lost",
    ]
    labels: list[Text] = []


class NotifySettings(Section):
    """The content of the file; `link` is the address of the web UI in messages."""

    channels: Annotated[
        dict[Annotated[str, Field(pattern=NAME_PATTERN)], Channel],
        Field(max_length=_MAX_CHANNELS),
    ] = {}
    rules: Annotated[list[Rule], Field(max_length=_MAX_RULES)] = []
    link: Text | None = None

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that no channel has."""
        return sorted(set(names) - self.channels.keys())


def read_notify_file(path: Path) -> NotifySettings:
    """Return the content of the file; without a file, there are no channels.

    Raises:
        ValueError: The file is not valid. The text has no values, as they may be secrets.
    """
    if not path.exists():
        return NotifySettings()
    try:
        found = NotifySettings.model_validate(read_yaml_file(path))
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}."
            for one in error.errors(include_input=False)
        ]
        raise ValueError("\n".join(lines)) from None
    unknown = found.unknown(name for rule in found.rules for name in rule.to)
    if unknown:
        raise ValueError(f"{path}: rules: `to` must name channels of the file, but got {unknown}.")
    if find_spec("apprise") is None and any(one.url for one in found.channels.values()):
        raise ValueError(
            f"{path}: channels: A `url` needs the package `apprise`, which is not installed. Hint:"
            " pip install 'paceline[notify]'"
        )
    return found
