"""The file `notify.yaml`: channels, and rules for all experiments of a master."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import Field, ValidationError, model_validator

from paceline._cluster.messages.runner_messages import NAME_PATTERN
from paceline.config._environment_and_secrets import hide_values
from paceline.config._fields_and_problems import Age, ConfigError, Problem, Section, Text, refused
from paceline.config._notify_section import Notify, Topic
from paceline.config._read_yaml import read_yaml_file

NOTIFY_FILE = "notify.yaml"

# 24 to 64 bytes in base64.
_SECRET = r"^whsec_([A-Za-z0-9+/]{4}){8,21}([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"  # noqa: S105


class Channel(Section):
    """Where messages go.

    Attributes:
        url: An address for apprise, such as `slack://...` or `mailtos://...`.
        webhook: An address for signed requests; in place of `url`.
        secret: The key of the signatures: `whsec_` and 24 to 64 bytes in base64.
        pause: The least time between two messages.
    """

    url: Text | None = Field(default=None, repr=False)
    webhook: Annotated[str, Field(pattern=r"^https?://[^/\s]+\S*$")] | None = Field(
        default=None, repr=False
    )
    secret: Annotated[str, Field(pattern=_SECRET)] | None = Field(default=None, repr=False)
    pause: Age = 60.0

    @model_validator(mode="after")
    def _check_address(self) -> "Channel":
        is_webhook = self.webhook is not None
        if is_webhook is (self.url is not None) or is_webhook is (self.secret is None):
            raise refused("must have a `url`, or a `webhook` with a `secret`")
        return self

    @property
    def kind(self) -> str:
        """Kind in a word: `webhook`, or the scheme of the URL."""
        return "webhook" if self.url is None else self.url.partition(":")[0]

    def hide(self, text: str) -> str:
        """Return a text without the parts of the addresses: they can be tokens."""
        parts = re.split(r"[/:@?&=]", self.url or self.webhook or "")
        return hide_values(text, sorted({*parts, *map(unquote, parts)}, key=len, reverse=True))


class Rule(Notify):
    """Choice of messages and channels for all experiments, or for those with all `labels`."""

    to: Annotated[list[Text], Field(min_length=1)]
    events: list[Topic | Literal["node_lost"]] = [  # type: ignore[assignment]
        *("alert", "experiment_ended", "experiment_failed", "node_lost")
    ]
    labels: list[Text] = []


class NotifySettings(Section):
    """The content of the file; `link` is the address of the web UI in messages."""

    channels: Annotated[
        dict[Annotated[str, Field(pattern=NAME_PATTERN)], Channel], Field(max_length=50)
    ] = {}
    rules: Annotated[list[Rule], Field(max_length=100)] = []
    link: Text | None = None

    def check(self, config: Notify) -> None:
        """Check the channels of an experiment or a rule.

        Raises:
            ConfigError: One is not.
        """
        unknown = [name for name in config.to if name not in self.channels]
        if unknown:
            problem = Problem(
                path="notify.to",
                value=unknown,
                message="must name channels that the master's `notify.yaml` has",
                allowed=", ".join(sorted(self.channels)) or "none yet",
                hint="`paceline notify list` shows them; an administrator adds others.",
            )
            raise ConfigError([problem])


def read_notify_file(path: Path) -> NotifySettings:
    """Return the content of the file; without a file, there are no channels.

    Raises:
        ValueError: The file is not valid. The text has no values, as they may be secrets.
    """
    try:
        found = NotifySettings.model_validate(read_yaml_file(path) if path.exists() else {})
        for rule in found.rules:
            found.check(rule)
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        ]
        raise ValueError("\n".join(lines)) from None
    if find_spec("apprise") is None and any(one.url for one in found.channels.values()):
        raise ValueError(
            f"{path}: channels: A `url` needs the package `apprise`, which is not installed. Hint:"
            " pip install 'paceline[notify]'"
        )
    return found
