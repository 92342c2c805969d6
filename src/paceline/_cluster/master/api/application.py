"""The application: all routes, and the page with the API's documentation."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from html import escape
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

import paceline
from paceline._base.process_and_network import num_cores
from paceline._cluster.master.api.access_guard import Guard
from paceline._cluster.master.api.attempt_and_log_routes import (
    attempt_router,
    log_router,
    run_router,
)
from paceline._cluster.master.api.bulk_routes import bulk_router
from paceline._cluster.master.api.checkpoint_routes import checkpoint_router, transfer_router
from paceline._cluster.master.api.comparison_routes import comparison_router, view_router
from paceline._cluster.master.api.config_and_code_routes import config_router, context_upload_router
from paceline._cluster.master.api.experiment_routes import experiment_edit_router, experiment_router
from paceline._cluster.master.api.file_routes import file_router
from paceline._cluster.master.api.interactive_routes import stream_router
from paceline._cluster.master.api.list_routes import (
    experiment_list_router,
    hyperparameter_router,
    trial_list_router,
)
from paceline._cluster.master.api.node_and_slot_routes import node_router, slot_router
from paceline._cluster.master.api.oidc_routes import oidc_router
from paceline._cluster.master.api.pool_and_queue_routes import pool_router, queue_router
from paceline._cluster.master.api.project_and_rule_routes import project_router
from paceline._cluster.master.api.proposal_and_tree_routes import proposal_router
from paceline._cluster.master.api.readers import NUM_THREADS, Readers
from paceline._cluster.master.api.request_limits import BodyLimits, RequestCounting
from paceline._cluster.master.api.requests_and_answers import (
    API_POLICY,
    install_problem_answers,
    sending_security_headers,
)
from paceline._cluster.master.api.route_scopes import PREFIX, ApiRouter, Scopes
from paceline._cluster.master.api.status_and_event_routes import (
    master_router,
    notify_router,
    status_and_prometheus_router,
)
from paceline._cluster.master.api.trial_and_series_routes import (
    series_csv_router,
    series_router,
    trial_router,
)
from paceline._cluster.master.api.user_and_token_routes import (
    quota_router,
    sign_in_router,
    token_router,
    user_router,
)
from paceline._cluster.master.api.web_ui_files import WebUi
from paceline._cluster.master.master import Master
from paceline._cluster.master.trackers.mlflow_routes import mlflow_router
from paceline._cluster.master.trackers.wandb_routes import wandb_router
from paceline._cluster.messages.experiment_models import Problem
from paceline._cluster.messages.master_models import Shutdown

docs_router = ApiRouter(include_in_schema=False)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
pre { overflow-x: auto; padding: .5rem; border: 1px solid #8886; border-radius: 4px; }
details { border-top: 1px solid #8886; padding: .4rem 0; }
summary { cursor: pointer; }
.method { display: inline-block; width: 4.5rem; font-weight: 600; }
.scope { float: right; opacity: .7; }
table { border-collapse: collapse; }
td { padding: .15rem 1rem .15rem 0; vertical-align: top; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"{API_POLICY}; style-src 'sha256-{_STYLE_HASH}'"


@docs_router.get("/docs", response_class=HTMLResponse)
async def read_docs(request: Request) -> HTMLResponse:
    """Show all routes, their scopes, parameters, bodies and answers."""
    description = json.dumps(request.app.openapi())
    return HTMLResponse(_page(description), headers={"Content-Security-Policy": _POLICY})


@lru_cache(maxsize=1)
def _page(description: str) -> str:
    api = json.loads(description)
    scopes = Scopes()
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            scope = scopes.access(method.upper(), path).scope.value
            tag = operation.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_operation_docs(method, path, operation, scope))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in groups.items()]
    models = api.get("components", {}).get("schemas", {})
    parts.append("<h2>models</h2>")
    parts += [
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_json(model)}</details>"
        for name, model in sorted(models.items())
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline REST API'
        f"</title><style>{_STYLE}</style></head><body><h1>Paceline REST API"
        f" {escape(api['info']['version'])}</h1><p>Programs send <code>Authorization: Bearer TOKEN"
        "</code>. At the right of each route is the scope that its token needs. The same as data:"
        f' <a href="{PREFIX}/openapi.json">openapi.json</a>.</p>{"".join(parts)}</body></html>'
    )


def _operation_docs(method: str, path: str, operation: dict[str, Any], scope: str) -> str:
    parameters = "".join(
        f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}"
        f"{', required' if one.get('required') else ''}</td>"
        f"<td>{escape(one.get('description', ''))}</td><td>{_json(one.get('schema'))}</td></tr>"
        for one in operation.get("parameters", ())
    )
    body = operation.get("requestBody", {}).get("content")
    answers = {
        status: answer["content"]
        for status, answer in operation["responses"].items()
        if answer.get("content") and status.startswith("2")
    }
    return (
        f'<details><summary><span class="method">{method.upper()}</span><code>{escape(path)}</code>'
        f'<span class="scope">{scope}</span></summary><p>{escape(operation["description"])}</p>'
        + (f"<table>{parameters}</table>" if parameters else "")
        + (f"<h4>Body</h4>{_json(body)}" if body else "")
        + "".join(f"<h4>Answer {status}</h4>{_json(found)}" for status, found in answers.items())
        + "</details>"
    )


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"


# Route order matters: the first match answers, so routes with fixed names come first.
_ROUTERS = (
    # Runners ask most, and a route is looked for from the first one on.
    attempt_router,
    transfer_router,
    stream_router,
    node_router,
    pool_router,
    queue_router,
    notify_router,
    docs_router,
    sign_in_router,
    oidc_router,
    token_router,
    user_router,
    project_router,
    status_and_prometheus_router,
    master_router,
    slot_router,
    context_upload_router,
    experiment_list_router,
    experiment_edit_router,
    bulk_router,
    hyperparameter_router,
    config_router,
    proposal_router,
    experiment_router,
    trial_list_router,
    comparison_router,
    view_router,
    quota_router,
    series_router,
    series_csv_router,
    trial_router,
    log_router,
    checkpoint_router,
    run_router,
    file_router,
)

# Clients of other trackers ask below no prefix.
_TRACKER_ROUTERS = (mlflow_router, wandb_router)


def create_app(master: Master, shut_down: Callable[[Shutdown], None]) -> FastAPI:
    """Return the application of a master; `shut_down` is called on a client's request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
        master.controls.attach(loop)
        master.events.attach(loop)
        master.leases.attach(loop)
        master.nodes.attach(loop)
        master.sampler_answers.waiting.attach(loop)
        app.state.readers = Readers(master.database.path, num_cores())
        yield
        app.state.readers.close()

    app = _make_app(
        lifespan=lifespan,
        middleware=[
            Middleware(RequestCounting, measurements=master.measurements),
            Middleware(Guard, master=master, web=WebUi()),
            Middleware(BodyLimits, prefix=PREFIX),
        ],
    )
    app.state.master = master
    app.state.shut_down = shut_down
    return app


def describe() -> dict[str, Any]:
    """Return the OpenAPI document, without a master."""
    return _make_app().openapi()


class _Application(FastAPI):
    """Application adding security headers to every answer, including its own errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await super().__call__(scope, receive, sending_security_headers(send))


def _make_app(**options: Any) -> FastAPI:
    app = _Application(
        title="Paceline",
        version=paceline.__version__,
        # Documentation page disabled: its external scripts would run with the reader's sign-in.
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        swagger_ui_oauth2_redirect_url=None,
        responses={"4XX": {"model": Problem, "description": "What was wrong, with a `code`."}},
        **options,
    )
    install_problem_answers(app)
    for router in _ROUTERS:
        app.include_router(router, prefix=PREFIX)
    for router in _TRACKER_ROUTERS:
        app.include_router(router)
    return app
