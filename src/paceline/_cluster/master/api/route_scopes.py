"""Scopes required by the routes of the API: the only list of them."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.routing import Match, compile_path
from starlette.types import Scope

PREFIX = "/api/v1"
SIGNED_PATH = "/wandb-files/"
"""What the paths of signed URLs begin with."""
# First parts of paths that clients of W&B and MLflow ask for, below no prefix of ours.
TRACKER_PATHS = (
    *("/graphql", "/files/", "/artifactsV2/", SIGNED_PATH),
    *("/api/2.0/mlflow/", "/api/2.0/mlflow-artifacts/", "/api/3.0/mlflow/"),
)


class RouteScope(str, Enum):
    """Scope required by a route; each of the first five includes those before."""

    PUBLIC = "public"
    READ = "read"
    SUBMIT = "submit"
    # All that a user may do who is no administrator: browsers, and tokens of the scope `admin`.
    USER = "user"
    ADMIN = "admin"
    # Runners of nodes, and administrators.
    RUNNER = "runner"
    # Whoever may submit, and those who report runs without a master.
    REPORT = "report"
    # Whoever may read, and those who report runs: the routes of other trackers' clients, which
    # check themselves what each of them may do.
    TRACKER = "tracker"
    # The token of the attempt that the path names, and administrators.
    ATTEMPT = "attempt"


ROUTES: dict[RouteScope, tuple[str, ...]] = {
    RouteScope.PUBLIC: (
        "GET /health",
        "GET /oidc/callback",
        "GET /oidc/sign-in",
        "GET /session",
        "GET /sign-in",
        "POST /login",
        "POST /login-token",
        "POST /oidc/token",
    ),
    # Reading routes change nothing, but see all of a project: configs, code, logs, checkpoints.
    RouteScope.READ: (
        "GET /bulk-preview",
        "GET /checkpoint-preview",
        "GET /checkpoints",
        "GET /checkpoints/{uuid}",
        "GET /checkpoints/{uuid}/files/{path:path}",
        "GET /config-rules",
        "GET /config-schema",
        "GET /contexts/{digest}",
        "GET /docs",
        "GET /events",
        "GET /experiment-columns",
        "GET /experiments",
        "GET /experiments/{experiment_id}",
        "GET /experiments/{experiment_id}/asks",
        "GET /experiments/{experiment_id}/checkpoints",
        "GET /experiments/{experiment_id}/config",
        "GET /experiments/{experiment_id}/diff",
        "GET /experiments/{experiment_id}/files",
        "GET /experiments/{experiment_id}/files/{path:path}",
        "GET /experiments/{experiment_id}/hyperparameters",
        "GET /experiments/{experiment_id}/logs",
        "GET /experiments/{experiment_id}/loss",
        "GET /experiments/{experiment_id}/metric-names",
        "GET /experiments/{experiment_id}/notes-history",
        "GET /experiments/{experiment_id}/proposals",
        "GET /experiments/{experiment_id}/search",
        "GET /experiments/{experiment_id}/tree",
        "GET /experiments/{experiment_id}/trials",
        "GET /master",
        "GET /metric-series.csv",
        "GET /metrics",
        "GET /nodes",
        "GET /notify-channels",
        "GET /openapi.json",
        "GET /pools",
        "GET /projects",
        "GET /projects/{project}/members",
        "GET /query-completions",
        "GET /queue",
        "GET /quotas",
        "GET /runs",
        "GET /slots",
        "GET /status",
        "GET /storages",
        "GET /trials",
        "GET /trials/{trial_id}",
        "GET /trials/{trial_id}/checkpoints",
        "GET /trials/{trial_id}/decisions",
        "GET /trials/{trial_id}/environments",
        "GET /trials/{trial_id}/files",
        "GET /trials/{trial_id}/files/{path:path}",
        "GET /trials/{trial_id}/logs",
        "GET /trials/{trial_id}/media",
        "GET /trials/{trial_id}/media-names",
        "GET /trials/{trial_id}/media-steps",
        "GET /trials/{trial_id}/metrics",
        "GET /trials/{trial_id}/time",
        "GET /users",
        "GET /usage",
        "GET /views",
        "HEAD /openapi.json",
        "POST /check-config",
        "POST /logout",
        "POST /metric-groups",
        "POST /metric-names",
        "POST /metric-series",
        "POST /preview-search",
    ),
    RouteScope.SUBMIT: (
        "DELETE /checkpoints/{uuid}",
        "DELETE /experiments/{experiment_id}",
        "DELETE /experiments/{experiment_id}/streams/{stream}",
        "DELETE /views/{view_id}",
        "GET /experiments/{experiment_id}/streams/{stream}",
        "PATCH /experiments/{experiment_id}",
        "POST /bulk-actions",
        "POST /experiments",
        "POST /experiments/{experiment_id}/asks/{ask_id}",
        "POST /experiments/{experiment_id}/continue",
        "POST /experiments/{experiment_id}/fork",
        "POST /experiments/{experiment_id}/link",
        "POST /experiments/{experiment_id}/proposals",
        "POST /experiments/{experiment_id}/{action}",
        "POST /queue/move",
        "POST /trials/{trial_id}/continue",
        "POST /trials/{trial_id}/kill",
        "POST /trials/{trial_id}/stop",
        "POST /views",
        "PUT /contexts/{digest}",
        "PUT /experiments/{experiment_id}/streams/{stream}",
        "PUT /views/{view_id}",
    ),
    # A run is known by its id, a random text that only its directory and readers have.
    RouteScope.REPORT: (
        "POST /runs/{run_id}/records",
        "PUT /runs/{run_id}",
        "PUT /runs/{run_id}/files/{path:path}",
    ),
    # Routes that check whose token, password or project it is.
    RouteScope.USER: (
        "DELETE /config-rules/{kind}/{name}",
        "DELETE /tokens/{token_id}",
        "GET /tokens",
        "POST /sign-in-links",
        "POST /tokens",
        "PUT /config-rules/{kind}/{name}",
        "PUT /projects/{project}/members/{name}",
        "PUT /users/{name}/password",
    ),
    RouteScope.ADMIN: (
        "DELETE /nodes/{name}",
        "DELETE /nodes/{name}/reservations/{reservation_id}",
        "DELETE /pools/{name}",
        "DELETE /projects/{project}",
        "DELETE /quotas/{kind}/{name}",
        "DELETE /users/{name}",
        "GET /audit",
        "POST /master/shutdown",
        "POST /nodes/{name}/drain",
        "POST /nodes/{name}/reservations",
        "POST /nodes/{name}/resume",
        "POST /nodes/{name}/slots/{slot}/drain",
        "POST /nodes/{name}/slots/{slot}/resume",
        "PATCH /users/{name}",
        "POST /notify-channels/{name}/test",
        "POST /projects",
        "POST /users",
        "PUT /home-token",
        "PUT /pools/{name}",
        "PUT /quotas/{kind}/{name}",
    ),
    RouteScope.RUNNER: (
        "POST /nodes",
        "POST /nodes/{node_id}/poll",
    ),
    RouteScope.ATTEMPT: (
        # Checkpoint routes check for themselves the checkpoint's trial against the attempt.
        "DELETE /attempts/{attempt_id}/checkpoints/{uuid}",
        "DELETE /attempts/{attempt_id}/streams/{stream}",
        "GET /attempts/{attempt_id}/checkpoints/{uuid}",
        "GET /attempts/{attempt_id}/checkpoints/{uuid}/pieces",
        "GET /attempts/{attempt_id}/control",
        "GET /attempts/{attempt_id}/streams/{stream}",
        "POST /attempts/{attempt_id}/checkpoints/{uuid}",
        "POST /attempts/{attempt_id}/checkpoints/{uuid}/shards",
        "POST /attempts/{attempt_id}/end",
        "POST /attempts/{attempt_id}/logs",
        "POST /attempts/{attempt_id}/records",
        "POST /attempts/{attempt_id}/streams",
        "PUT /attempts/{attempt_id}/files/{path:path}",
        "PUT /attempts/{attempt_id}/checkpoints/{uuid}/pieces",
        "PUT /attempts/{attempt_id}/streams/{stream}",
    ),
}
# The route checks that the code belongs to the attempt.
_OPEN_TO_ATTEMPTS = "GET /contexts/{digest}"
# What these change is elsewhere: a new experiment, or a role that the route itself checks.
_VIEWERS_SUFFICE = (
    "POST /experiments/{experiment_id}/fork",
    "POST /trials/{trial_id}/continue",
    "PUT /projects/{project}/members/{name}",
)
_RANKS = (
    RouteScope.PUBLIC, RouteScope.READ, RouteScope.SUBMIT, RouteScope.USER, RouteScope.ADMIN,
)  # fmt: skip
# The audit log has the requests to change by these scopes, the beginnings of reported runs, and
# calls of trackers that end so.
_AUDITED = (RouteScope.SUBMIT, RouteScope.USER, RouteScope.ADMIN)
_RUN_ROUTE = "PUT /runs/{run_id}"
# Bytes of an interactive task: the link that its owner asked for before is logged.
_NOT_AUDITED = ("/streams/{stream}",)
_AUDITED_CALLS = ("/create", "/delete", "/rename", "/restore", "/update", "/transition-stage")


class Access(NamedTuple):
    """Requirement of a request: a scope, and the attempt with access by its own token.

    `parameters` are those of the path. A viewer of the project of the object that they name may
    send the request if `is_reading`, else an editor. `is_audited` requests are logged.
    """

    scope: RouteScope
    attempt: str | None = None
    is_open_to_attempts: bool = False
    parameters: Mapping[str, str] = MappingProxyType({})
    is_reading: bool = False
    is_audited: bool = False

    def admits(self, scope: RouteScope, attempt_id: int | None) -> bool:
        """Return whether a sender may pass; `attempt_id` is the attempt of the sender's token."""
        if self.scope is RouteScope.PUBLIC or scope is RouteScope.ADMIN:
            return True
        if attempt_id is not None:
            return self.is_open_to_attempts or self.attempt == str(attempt_id)
        if scope in (RouteScope.REPORT, RouteScope.TRACKER) and self.scope is RouteScope.TRACKER:
            return True
        if scope in (RouteScope.RUNNER, RouteScope.REPORT):
            return self.scope is scope
        if self.scope is RouteScope.REPORT:
            return scope in (RouteScope.SUBMIT, RouteScope.USER)
        if self.scope is RouteScope.TRACKER:
            return scope in _RANKS
        return self.scope in _RANKS and _RANKS.index(self.scope) <= _RANKS.index(scope)


_SAFE = ("GET", "HEAD")


class Scopes:
    """Lookup of a request's requirement by method and path, equal to the router's choice."""

    def __init__(self) -> None:
        self._fixed: dict[tuple[str, str], Access] = {}
        self._patterns = [
            (method, compile_path(PREFIX + path)[0], path, scope)
            for scope, routes in ROUTES.items()
            for method, _, path in (route.partition(" ") for route in routes)
            if "{" in path
        ]
        # Fewest parameters first: of several matching paths, the router takes the most specific.
        self._patterns.sort(key=lambda found: found[2].count("{"))
        for scope, routes in ROUTES.items():
            for method, _, path in (route.partition(" ") for route in routes):
                if "{" not in path:
                    is_audited = method not in _SAFE and scope in _AUDITED
                    self._fixed[method, PREFIX + path] = Access(scope, is_audited=is_audited)

    def access(self, method: str, path: str) -> Access:
        """Return the requirement of a request; unknown routes require an administrator."""
        if path.startswith(TRACKER_PATHS):
            is_audited = method not in _SAFE and path.endswith(_AUDITED_CALLS)
            return Access(RouteScope.TRACKER, is_audited=is_audited)
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed
        for known_method, pattern, template, scope in self._patterns:
            match = pattern.match(path) if known_method == method else None
            if match is not None:
                route = f"{method} {template}"
                is_audited = method not in _SAFE and scope in _AUDITED
                is_audited &= not template.endswith(_NOT_AUDITED)
                return Access(
                    scope,
                    match.groupdict().get("attempt_id") if scope is RouteScope.ATTEMPT else None,
                    route == _OPEN_TO_ATTEMPTS,
                    match.groupdict(),
                    scope is RouteScope.READ or route in _VIEWERS_SUFFICE,
                    is_audited or route == _RUN_ROUTE,
                )
        return Access(RouteScope.ADMIN)


_ANY_LENGTH = ":path}"


class ApiRouter(APIRouter):
    """Router with quick rejection by the first part and the number of parts of a path.

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
