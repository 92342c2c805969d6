"""Routers that are passed by quickly if none of their routes can fit a path."""

from typing import Any

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

from paceline.master.api._scopes import PREFIX

_ANY_LENGTH = ":path}"


class ApiRouter(APIRouter):
    """A router that knows how the paths of its routes begin, and how many parts they have.

    FastAPI looks at each route of each router until one fits. Among many reads, that took an eighth
    of the master's processor time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shapes: set[tuple[str, int]] | None = None
        self._long: set[str] = set()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Look at the routes unless none of them can fit."""
        if self._shapes is None:
            self._shapes = self._find_shapes()
        path = scope["path"].removeprefix(PREFIX)
        word = path[1:].partition("/")[0]
        if (word, path.count("/")) not in self._shapes and word not in self._long:
            return Match.NONE, {}
        return super().matches(scope)

    def _find_shapes(self) -> set[tuple[str, int]]:
        paths = [getattr(route, "path", "") for route in self.routes]
        self._long = {path.split("/")[1] for path in paths if path.endswith(_ANY_LENGTH)}
        return {(path.split("/")[1], path.count("/")) for path in paths if path}
