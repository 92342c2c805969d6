"""Calls of MLflow's REST API: arguments, errors, and the table of what is answered."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, NamedTuple

import sqlalchemy as sa
from starlette.routing import compile_path

from paceline._cluster.master.api.access_guard import AccessIdentity
from paceline._cluster.master.api.requests_and_answers import ApiError
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.store.database import Transaction

_STATUSES = {
    "INVALID_PARAMETER_VALUE": 400,
    "RESOURCE_ALREADY_EXISTS": 400,
    "RESOURCE_DOES_NOT_EXIST": 404,
    "ENDPOINT_NOT_FOUND": 404,
    "NOT_IMPLEMENTED": 501,
}
_SEE_DOCS = "See the API docs for more information about request parameters."
_NON_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_MAX_INTEGER = 2**63 - 1
# What MLflow allows in names of metrics, parameters and tags.
_KEY = re.compile(r"[/\w.\- :]+")
_MAX_KEY = 250


class MlflowError(ApiError):
    """Answer to a call that cannot be served, under one of MLflow's codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(_STATUSES[code], code, message)


def invalid(message: str) -> MlflowError:
    """Return the error for a wrong argument."""
    return MlflowError("INVALID_PARAMETER_VALUE", message)


def missing(message: str) -> MlflowError:
    """Return the error for what does not exist."""
    return MlflowError("RESOURCE_DOES_NOT_EXIST", message)


def absent(name: str) -> MlflowError:
    """Return the error for an argument that must be given."""
    return invalid(f"Missing value for required parameter '{name}'. {_SEE_DOCS}")


class Fields:
    """Arguments of a call, or of one of the items in it, checked as they are taken.

    Args:
        values: The arguments as sent: from a URL all are texts.
        path: Where they stand in the request, as a prefix of their names.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self.path = path

    def has(self, name: str) -> bool:
        """Return whether an argument was given."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text that must be given and not be empty."""
        found = self.text_or_none(name)
        if not found:
            raise absent(f"{self.path}{name}")
        return found

    def text_or_none(self, name: str) -> str | None:
        """Return a text, None if it was not given."""
        found = self._values.get(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise self._wrong(name, found)
        # A lone surrogate could not be stored, nor sent back.
        if not found.isascii() and found.encode(errors="replace").decode() != found:
            raise invalid(f"Text must be Unicode, but '{self.path}{name}' has a lone surrogate.")
        return found

    def key(self, name: str = "key") -> str:
        """Return the name of a metric, parameter or tag."""
        found = self.text(name)
        where = f"Invalid value {json.dumps(found[:500])} for parameter '{self.path}{name}'"
        if len(found) > _MAX_KEY:
            raise invalid(f"{where} supplied: exceeds the maximum length of {_MAX_KEY} characters.")
        if not _KEY.fullmatch(found):
            raise invalid(
                f"{where} supplied: Names may only contain alphanumerics, underscores (_), dashes"
                " (-), periods (.), spaces ( ), colon(:) and slashes (/)."
            )
        if found.startswith("/") or any(part in ("", ".", "..") for part in found.split("/")):
            raise invalid(
                f"{where} supplied: Names may be treated as files in certain cases, and must not"
                " resolve to other names when treated as such."
            )
        return found

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at most 64 bits, required unless there is a default."""
        found = self._values.get(name, default)
        if found is None:
            raise absent(f"{self.path}{name}")
        try:
            number = int(found)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, found) from None
        if isinstance(found, bool) or abs(number) > _MAX_INTEGER:
            raise self._wrong(name, found)
        return number

    def number(self, name: str) -> float:
        """Return a number, which may be NaN or infinite."""
        found = self._values.get(name)
        if found is None:
            raise absent(f"{self.path}{name}")
        try:
            value = _NON_FINITE[found] if found in _NON_FINITE else float(found)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(name, found) from None
        if isinstance(found, bool):
            raise self._wrong(name, found)
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean, False if it was not given."""
        return self._values.get(name) in (True, "true")

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, empty if it was not given."""
        found = self._values.get(name) or []
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list):
            raise self._wrong(name, found)
        return [Fields({"item": item}, f"{name}.").text("item") for item in found]

    def items(self, name: str, most: int | None = None) -> list["Fields"]:
        """Return a list of objects, empty if it was not given."""
        found = self._values.get(name) or []
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise self._wrong(name, found)
        if most is not None and len(found) > most:
            raise invalid(
                f"A batch logging request can contain at most {most} {name}. Got {len(found)}"
                f" {name}. Please split up {name} across multiple requests and try again."
            )
        return [Fields(item, f"{self.path}{name}[{number}].") for number, item in enumerate(found)]

    def item(self, name: str) -> "Fields":
        """Return an object, an empty one if it was not given."""
        found = self._values.get(name) or {}
        if not isinstance(found, dict):
            raise self._wrong(name, found)
        return Fields(found, f"{self.path}{name}.")

    def pairs(self, name: str, *, longest: int, is_key: bool = True) -> dict[str, str]:
        """Return a list of keys and values as dictionary; longer values are cut, as MLflow does."""
        return {
            (item.key() if is_key else item.text("key")): (item.text_or_none("value") or "")[
                :longest
            ]
            for item in self.items(name)
        }

    def _wrong(self, name: str, found: Any) -> MlflowError:
        shown = json.dumps(found, separators=(",", ":"))[:200]
        return invalid(
            f"Invalid value {shown} for parameter '{self.path}{name}' supplied: Value was of type"
            f" '{type(found).__name__}'. {_SEE_DOCS}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call of a client, inside its transaction.

    Attributes:
        given: The arguments.
        identity: The sender.
        connection: Where to read and, if `transaction` is there, to write.
        transaction: The writer's; None in calls that only read.
        runs: The runs' writer.
    """

    given: Fields
    identity: AccessIdentity
    connection: sa.Connection
    transaction: Transaction | None
    runs: LoggedRuns

    @property
    def writer(self) -> Transaction:
        """The transaction of a call that writes."""
        assert self.transaction is not None
        return self.transaction

    def run_id(self) -> str:
        """Return the id of the run that a call is about; older clients call it otherwise."""
        return self.given.text_or_none("run_uuid") or self.given.text("run_id")


class Endpoint(NamedTuple):
    """What answers a call; `lists` are closed to senders who may only name runs by their id."""

    answer: Callable[[Call], dict[str, Any]]
    writes: bool
    lists: bool


_ENDPOINTS: list[tuple[str, re.Pattern[str], Endpoint]] = []
_FIXED: dict[tuple[str, str], Endpoint] = {}


def endpoint(
    methods: str, path: str, *, writes: bool = False, lists: bool = False
) -> Callable[[Callable[[Call], dict[str, Any]]], Callable[[Call], dict[str, Any]]]:
    """Register the function that answers calls of a path below MLflow's prefix."""

    def register(answer: Callable[[Call], dict[str, Any]]) -> Callable[[Call], dict[str, Any]]:
        for method in methods.split():
            found = Endpoint(answer, writes, lists)
            if "{" in path:
                _ENDPOINTS.append((method, compile_path(path)[0], found))
            else:
                _FIXED[method, path] = found
        return answer

    return register


def find_endpoint(method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
    """Return what answers a call, and the arguments in its path.

    Raises:
        MlflowError: Nothing does.
    """
    fixed = _FIXED.get((method, path))
    if fixed is not None:
        return fixed, {}
    for known, pattern, found in _ENDPOINTS:
        match = pattern.fullmatch(path) if known == method else None
        if match is not None:
            return found, match.groupdict()
    raise MlflowError(
        "ENDPOINT_NOT_FOUND",
        f"Paceline answers MLflow's calls for experiments, runs, artifacts and models, but not"
        f" {method} {path[:200]}. Hint: traces, prompts, evaluation and workspaces need MLflow's"
        " own server.",
    )


def page_of(
    given: Fields, found: Sequence[Any], *, default: int, most: int
) -> tuple[Sequence[Any], dict[str, str]]:
    """Return the items of the page that was asked for, and the token of the next one as answer."""
    size = given.integer("max_results", default)
    if not 1 <= size <= most:
        limit = f"at most {most}" if size > most else "a positive integer"
        raise invalid(
            f"Invalid value {size} for parameter 'max_results' supplied: It must be {limit}, but"
            f" got value {size}"
        )
    start = _page_start(given.text_or_none("page_token"))
    more = start + size < len(found)
    token = base64.b64encode(json.dumps({"offset": start + size}).encode()).decode()
    return found[start : start + size], {"next_page_token": token} if more else {}


def _page_start(token: str | None) -> int:
    if not token:
        return 0
    try:
        start = json.loads(base64.b64decode(token, validate=True))["offset"]
    except (ValueError, KeyError, TypeError):
        start = None
    if type(start) is not int or not 0 <= start <= _MAX_INTEGER:
        raise invalid(f"Invalid page token, could not base64-decode or parse: {token[:200]!r}")
    return start


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return keys and values in MLflow's form."""
    return [{"key": key, "value": value} for key, value in tags.items()]


def chunks(items: Sequence[Any], size: int = 500) -> Iterator[Sequence[Any]]:
    """Yield parts of a list that fit into one statement."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
