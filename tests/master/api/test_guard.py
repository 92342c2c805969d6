from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts

from paceline._cluster.master.api.access_guard import PUBLIC_PATHS

ROUTES = [
    "DELETE /api/2.0/mlflow-artifacts/artifacts/{path:path}",
    "DELETE /api/2.0/mlflow/{path:path}",
    "DELETE /api/3.0/mlflow/{path:path}",
    "DELETE /api/v1/attempts/{attempt_id}/checkpoints/{uuid}",
    "DELETE /api/v1/attempts/{attempt_id}/streams/{stream}",
    "DELETE /api/v1/checkpoints/{uuid}",
    "DELETE /api/v1/config-rules/{kind}/{name}",
    "DELETE /api/v1/experiments/{experiment_id}",
    "DELETE /api/v1/experiments/{experiment_id}/streams/{stream}",
    "DELETE /api/v1/nodes/{name}",
    "DELETE /api/v1/nodes/{name}/reservations/{reservation_id}",
    "DELETE /api/v1/pools/{name}",
    "DELETE /api/v1/projects/{project}",
    "DELETE /api/v1/quotas/{kind}/{name}",
    "DELETE /api/v1/tokens/{token_id}",
    "DELETE /api/v1/users/{name}",
    "DELETE /api/v1/views/{view_id}",
    "GET    /api/2.0/mlflow-artifacts/artifacts",
    "GET    /api/2.0/mlflow-artifacts/artifacts/{path:path}",
    "GET    /api/2.0/mlflow-artifacts/presigned/{path:path}",
    "GET    /api/2.0/mlflow/{path:path}",
    "GET    /api/3.0/mlflow/{path:path}",
    "GET    /api/v1/attempts/{attempt_id}/checkpoints/{uuid}",
    "GET    /api/v1/attempts/{attempt_id}/checkpoints/{uuid}/pieces",
    "GET    /api/v1/attempts/{attempt_id}/control",
    "GET    /api/v1/attempts/{attempt_id}/streams/{stream}",
    "GET    /api/v1/audit",
    "GET    /api/v1/bulk-preview",
    "GET    /api/v1/checkpoint-preview",
    "GET    /api/v1/checkpoints",
    "GET    /api/v1/checkpoints/{uuid}",
    "GET    /api/v1/checkpoints/{uuid}/files/{path:path}",
    "GET    /api/v1/config-rules",
    "GET    /api/v1/config-schema",
    "GET    /api/v1/contexts/{digest}",
    "GET    /api/v1/docs",
    "GET    /api/v1/events",
    "GET    /api/v1/experiment-columns",
    "GET    /api/v1/experiments",
    "GET    /api/v1/experiments/{experiment_id}",
    "GET    /api/v1/experiments/{experiment_id}/asks",
    "GET    /api/v1/experiments/{experiment_id}/checkpoints",
    "GET    /api/v1/experiments/{experiment_id}/config",
    "GET    /api/v1/experiments/{experiment_id}/diff",
    "GET    /api/v1/experiments/{experiment_id}/files",
    "GET    /api/v1/experiments/{experiment_id}/files/{path:path}",
    "GET    /api/v1/experiments/{experiment_id}/hyperparameters",
    "GET    /api/v1/experiments/{experiment_id}/logs",
    "GET    /api/v1/experiments/{experiment_id}/loss",
    "GET    /api/v1/experiments/{experiment_id}/metric-names",
    "GET    /api/v1/experiments/{experiment_id}/notes-history",
    "GET    /api/v1/experiments/{experiment_id}/proposals",
    "GET    /api/v1/experiments/{experiment_id}/search",
    "GET    /api/v1/experiments/{experiment_id}/streams/{stream}",
    "GET    /api/v1/experiments/{experiment_id}/tree",
    "GET    /api/v1/experiments/{experiment_id}/trials",
    "GET    /api/v1/health",
    "GET    /api/v1/master",
    "GET    /api/v1/metric-series.csv",
    "GET    /api/v1/metrics",
    "GET    /api/v1/nodes",
    "GET    /api/v1/notify-channels",
    "GET    /api/v1/oidc/callback",
    "GET    /api/v1/oidc/sign-in",
    "GET    /api/v1/openapi.json",
    "GET    /api/v1/pools",
    "GET    /api/v1/projects",
    "GET    /api/v1/projects/{project}/members",
    "GET    /api/v1/query-completions",
    "GET    /api/v1/queue",
    "GET    /api/v1/quotas",
    "GET    /api/v1/runs",
    "GET    /api/v1/session",
    "GET    /api/v1/sign-in",
    "GET    /api/v1/slots",
    "GET    /api/v1/status",
    "GET    /api/v1/storages",
    "GET    /api/v1/tokens",
    "GET    /api/v1/trials",
    "GET    /api/v1/trials/{trial_id}",
    "GET    /api/v1/trials/{trial_id}/checkpoints",
    "GET    /api/v1/trials/{trial_id}/decisions",
    "GET    /api/v1/trials/{trial_id}/environments",
    "GET    /api/v1/trials/{trial_id}/files",
    "GET    /api/v1/trials/{trial_id}/files/{path:path}",
    "GET    /api/v1/trials/{trial_id}/logs",
    "GET    /api/v1/trials/{trial_id}/media",
    "GET    /api/v1/trials/{trial_id}/media-names",
    "GET    /api/v1/trials/{trial_id}/media-steps",
    "GET    /api/v1/trials/{trial_id}/metrics",
    "GET    /api/v1/trials/{trial_id}/time",
    "GET    /api/v1/usage",
    "GET    /api/v1/users",
    "GET    /api/v1/views",
    "GET    /artifactsV2/{path:path}",
    "GET    /wandb-files/{trial_id}/{path:path}",
    "HEAD   /api/v1/openapi.json",
    "PATCH  /api/2.0/mlflow/{path:path}",
    "PATCH  /api/3.0/mlflow/{path:path}",
    "PATCH  /api/v1/experiments/{experiment_id}",
    "PATCH  /api/v1/users/{name}",
    "POST   /api/2.0/mlflow-artifacts/mpu/{path:path}",
    "POST   /api/2.0/mlflow/{path:path}",
    "POST   /api/3.0/mlflow/{path:path}",
    "POST   /api/v1/attempts/{attempt_id}/checkpoints/{uuid}",
    "POST   /api/v1/attempts/{attempt_id}/checkpoints/{uuid}/shards",
    "POST   /api/v1/attempts/{attempt_id}/end",
    "POST   /api/v1/attempts/{attempt_id}/logs",
    "POST   /api/v1/attempts/{attempt_id}/records",
    "POST   /api/v1/attempts/{attempt_id}/streams",
    "POST   /api/v1/bulk-actions",
    "POST   /api/v1/check-config",
    "POST   /api/v1/experiments",
    "POST   /api/v1/experiments/{experiment_id}/asks/{ask_id}",
    "POST   /api/v1/experiments/{experiment_id}/continue",
    "POST   /api/v1/experiments/{experiment_id}/fork",
    "POST   /api/v1/experiments/{experiment_id}/link",
    "POST   /api/v1/experiments/{experiment_id}/proposals",
    "POST   /api/v1/experiments/{experiment_id}/{action}",
    "POST   /api/v1/login",
    "POST   /api/v1/login-token",
    "POST   /api/v1/logout",
    "POST   /api/v1/master/shutdown",
    "POST   /api/v1/metric-groups",
    "POST   /api/v1/metric-names",
    "POST   /api/v1/metric-series",
    "POST   /api/v1/nodes",
    "POST   /api/v1/nodes/{name}/drain",
    "POST   /api/v1/nodes/{name}/reservations",
    "POST   /api/v1/nodes/{name}/resume",
    "POST   /api/v1/nodes/{name}/slots/{slot}/drain",
    "POST   /api/v1/nodes/{name}/slots/{slot}/resume",
    "POST   /api/v1/nodes/{node_id}/poll",
    "POST   /api/v1/notify-channels/{name}/test",
    "POST   /api/v1/oidc/token",
    "POST   /api/v1/preview-search",
    "POST   /api/v1/projects",
    "POST   /api/v1/queue/move",
    "POST   /api/v1/runs/{run_id}/records",
    "POST   /api/v1/sign-in-links",
    "POST   /api/v1/tokens",
    "POST   /api/v1/trials/{trial_id}/continue",
    "POST   /api/v1/trials/{trial_id}/kill",
    "POST   /api/v1/trials/{trial_id}/stop",
    "POST   /api/v1/users",
    "POST   /api/v1/views",
    "POST   /files/{entity}/{project}/{run}/file_stream",
    "POST   /graphql",
    "PUT    /api/2.0/mlflow-artifacts/artifacts/{path:path}",
    "PUT    /api/2.0/mlflow/{path:path}",
    "PUT    /api/3.0/mlflow/{path:path}",
    "PUT    /api/v1/attempts/{attempt_id}/checkpoints/{uuid}/pieces",
    "PUT    /api/v1/attempts/{attempt_id}/files/{path:path}",
    "PUT    /api/v1/attempts/{attempt_id}/streams/{stream}",
    "PUT    /api/v1/config-rules/{kind}/{name}",
    "PUT    /api/v1/contexts/{digest}",
    "PUT    /api/v1/experiments/{experiment_id}/streams/{stream}",
    "PUT    /api/v1/home-token",
    "PUT    /api/v1/pools/{name}",
    "PUT    /api/v1/projects/{project}/members/{name}",
    "PUT    /api/v1/quotas/{kind}/{name}",
    "PUT    /api/v1/runs/{run_id}",
    "PUT    /api/v1/runs/{run_id}/files/{path:path}",
    "PUT    /api/v1/users/{name}/password",
    "PUT    /api/v1/views/{view_id}",
    "PUT    /wandb-files/{trial_id}/{path:path}",
]


def routes_of(app: Any) -> list[tuple[str, str]]:
    return sorted(
        (method, str(route.path))
        for route in iter_route_contexts(app.routes)
        for method in route.methods or ()
    )


def check_problem(reply: httpx2.Response, status: int, code: str) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    if reply.request.method != "HEAD":
        problem = reply.json()
        assert set(problem) == {"type", "title", "status", "code", "detail"}
        assert (problem["status"], problem["code"]) == (status, code)
        assert problem["detail"]


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one master for all: nothing here changes it."""
    served = serve_master(tmp_path_factory.mktemp("guard") / "home")
    yield served
    served.close()


@pytest.fixture
def request_raw(master: Any) -> Iterator[Callable[..., httpx2.Response]]:
    """Return a function that sends a request with no headers that matter but those given."""
    # Certificates play no part on the loopback interface, and take long to load.
    with httpx2.Client(
        base_url=f"http://127.0.0.1:{master.port}", timeout=60, verify=False
    ) as http:

        def send(method: str, path: str, **headers: str) -> httpx2.Response:
            return http.request(method, path, headers=headers)

        yield send


def test_the_routes_are_these(master: Any) -> None:
    assert [f"{method:6} {path}" for method, path in routes_of(master.app)] == ROUTES


def test_the_public_paths_are_these() -> None:
    assert sorted(PUBLIC_PATHS) == [
        "/api/v1/health",
        "/api/v1/login",
        "/api/v1/login-token",
        "/api/v1/oidc/callback",
        "/api/v1/oidc/sign-in",
        "/api/v1/oidc/token",
        "/api/v1/session",
        "/api/v1/sign-in",
    ]


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", "Basic {token}"])
def test_a_request_without_a_token_is_refused(
    master: Any, request_raw: Callable[..., httpx2.Response], authorization: str | None
) -> None:
    """`test_tokens` walks all routes."""
    headers = {}
    if authorization is not None:
        headers["authorization"] = authorization.format(token=master.home.token)
    for method, path in (("GET", "/slots"), ("POST", "/bulk-actions"), ("GET", "/nothing")):
        check_problem(request_raw(method, f"/api/v1{path}", **headers), 401, "unauthorized")
    check_problem(request_raw("GET", "/api", **headers), 401, "unauthorized")


def test_health_answers_without_the_token_and_says_little(
    request_raw: Callable[..., httpx2.Response],
) -> None:
    reply = request_raw("GET", "/api/v1/health")
    assert reply.status_code == 200
    assert set(reply.json()) == {"status", "version"}


@pytest.mark.parametrize(
    "path", ["/api/v1/health/", "/api/v1/health/../master", "/api/v1//health", "/API/v1/health"]
)
def test_what_only_looks_like_a_public_path_is_none(
    master: Any, request_raw: Callable[..., httpx2.Response], path: str
) -> None:
    assert request_raw("GET", path).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token_opens(
    master: Any, request_raw: Callable[..., httpx2.Response], scheme: str
) -> None:
    reply = request_raw("GET", "/api/v1/master", authorization=f"{scheme} {master.home.token}")
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "",
     "10.0.0.1", "[::2]:80", "0.0.0.0", "127.0.0.1:21510@evil", "[::1]evil.com", "127.0.0.1:",
     "127.0.0.1:port", "localhost:80:80", "localhost/", "[localhost]", "[::1", "[::1]:80]",
     "localhost:123456"],
)  # fmt: skip
def test_another_host_is_refused_even_with_the_token_and_on_public_paths(
    master: Any, request_raw: Callable[..., httpx2.Response], host: str
) -> None:
    authorization = f"Bearer {master.home.token}"
    for path in ("/api/v1/master", "/api/v1/health"):
        reply = request_raw("GET", path, host=host, authorization=authorization)
        check_problem(reply, 403, "wrong_host")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:8080", "LocalHost", "[::1]:99", "[::1]", "127.0.0.1:1"]
)
def test_names_of_loopback_are_accepted(
    request_raw: Callable[..., httpx2.Response], host: str
) -> None:
    assert request_raw("GET", "/api/v1/health", host=host).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:9000", 200),
        ("http://localhost:9001", 403),
        ("https://localhost:9000", 403),
        ("http://127.0.0.1:9000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_only_the_masters_own_origin_is_accepted(
    request_raw: Callable[..., httpx2.Response], origin: str, status: int
) -> None:
    reply = request_raw("GET", "/api/v1/health", host="localhost:9000", origin=origin)
    assert reply.status_code == status
    if status != 200:
        check_problem(reply, 403, "wrong_origin")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/experiments"),
        ("PUT", "/experiments/1"),
        ("GET", "/preview-search"),
        ("POST", "/slots"),
        ("PATCH", "/master"),
        ("POST", "/contexts/" + "0" * 64),
        ("GET", "/attempts/1/end"),
    ],
)
def test_a_wrong_method_is_a_problem(master: Any, method: str, path: str) -> None:
    check_problem(master.http.request(method, path), 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", "/experiments/7", None, 404, "not_found"),
        ("GET", "/experiments/7/trials", None, 404, "not_found"),
        ("GET", "/experiments/7/logs", None, 404, "not_found"),
        ("GET", "/experiments/7/search", None, 404, "not_found"),
        ("GET", "/experiments/7/checkpoints", None, 404, "not_found"),
        ("GET", "/trials/7", None, 404, "not_found"),
        ("GET", "/trials/7/metrics", None, 404, "not_found"),
        ("GET", "/trials/7/logs", None, 404, "not_found"),
        ("GET", "/trials/7/checkpoints", None, 404, "not_found"),
        ("GET", "/checkpoints/none", None, 404, "not_found"),
        ("GET", "/checkpoints/none/files/a", None, 404, "not_found"),
        ("DELETE", "/checkpoints/none", None, 404, "not_found"),
        ("GET", "/contexts/" + "0" * 64, None, 404, "not_found"),
        ("GET", "/attempts/7/control", None, 404, "not_found"),
        ("POST", "/attempts/7/records", {"batches": []}, 404, "not_found"),
        ("POST", "/attempts/7/logs", {"entries": []}, 404, "not_found"),
        ("POST", "/experiments/7/kill", None, 404, "not_found"),
        ("POST", "/experiments/7/continue", {}, 404, "not_found"),
        ("POST", "/trials/7/kill", None, 404, "not_found"),
        ("POST", "/trials/7/continue", {}, 404, "not_found"),
        ("GET", "/experiments/0", None, 422, "invalid_request"),
        ("GET", "/experiments/one", None, 422, "invalid_request"),
        ("GET", f"/trials/{2**70}", None, 422, "invalid_request"),
        ("POST", "/experiments/1/dance", None, 422, "invalid_request"),
        ("GET", "/experiments?limit=0", None, 422, "invalid_request"),
        ("GET", "/experiments?state=BUSY", None, 422, "invalid_request"),
        ("GET", "/experiments?cursor=xyz", None, 400, "invalid_cursor"),
        ("GET", "/experiments?cursor=WyJhIl0", None, 400, "invalid_cursor"),
        ("GET", "/experiments?cursor=WzFlMzBd", None, 400, "invalid_cursor"),
        ("GET", "/contexts/short", None, 422, "invalid_request"),
        ("POST", "/experiments", {}, 422, "invalid_request"),
        ("POST", "/experiments", {"config": {}, "colour": "red"}, 422, "invalid_request"),
        ("POST", "/experiments", {"config": {"entrypoint": ""}}, 422, "invalid_config"),
        ("POST", "/preview-search", {"config": {}}, 422, "invalid_config"),
        ("POST", "/master/shutdown", {"timeout_s": -1}, 422, "invalid_request"),
        ("POST", "/attempts/1/records", {"batches": 1}, 422, "invalid_request"),
        ("POST", "/attempts/1/end", {"reason": "bored"}, 422, "invalid_request"),
        ("POST", "/attempts/1/logs", {}, 422, "invalid_request"),
    ],
)
def test_an_error_has_a_stable_code(
    master: Any, method: str, path: str, body: Any, status: int, code: str
) -> None:
    check_problem(master.http.request(method, path, json=body), status, code)
