"""The application: routes, guard and errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

import paceline
from paceline._usable_cores import num_cores
from paceline.master._answer_headers import sending_security_headers
from paceline.master._master import Master
from paceline.master.api import (
    _attempt_routes,
    _checkpoint_routes,
    _config_routes,
    _context_upload_routes,
    _docs_page,
    _experiment_edit_routes,
    _experiment_list_route,
    _experiment_routes,
    _hyperparameter_routes,
    _log_routes,
    _master_routes,
    _node_routes,
    _pool_routes,
    _problem_answers,
    _queue_routes,
    _run_routes,
    _series_csv_route,
    _series_routes,
    _sign_in_routes,
    _slot_routes,
    _status_and_prometheus_routes,
    _token_routes,
    _transfer_routes,
    _trial_list_route,
    _trial_routes,
)
from paceline.master.api._access_guard import Guard
from paceline.master.api._body_limits import BodyLimits
from paceline.master.api._readers import NUM_THREADS, Readers
from paceline.master.api._request_counts import RequestCounting
from paceline.master.api._scopes import PREFIX
from paceline.master.api._web_ui_files import WebUi
from paceline.messages.base import Problem
from paceline.messages.master_info import Shutdown

# Of two routes that fit a path, the first one answers: those with fixed names come first.
_ROUTES = (
    # Runners ask most, and a route is looked for from the first one on.
    _attempt_routes,
    _transfer_routes,
    _node_routes,
    _pool_routes,
    _queue_routes,
    _docs_page,
    _sign_in_routes,
    _token_routes,
    _status_and_prometheus_routes,
    _master_routes,
    _slot_routes,
    _context_upload_routes,
    _experiment_list_route,
    _experiment_edit_routes,
    _hyperparameter_routes,
    _config_routes,
    _experiment_routes,
    _trial_list_route,
    _series_routes,
    _series_csv_route,
    _trial_routes,
    _log_routes,
    _checkpoint_routes,
    _run_routes,
)


def create_app(master: Master, shut_down: Callable[[Shutdown], None]) -> FastAPI:
    """Return the application of a master; `shut_down` is called when a client asks for it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
        master.controls.attach(loop)
        master.events.attach(loop)
        master.leases.attach(loop)
        master.nodes.attach(loop)
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
    """An application whose every answer has the security headers, also those to its own errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await super().__call__(scope, receive, sending_security_headers(send))


def _make_app(**options: Any) -> FastAPI:
    app = _Application(
        title="Paceline",
        version=paceline.__version__,
        # Its page loads scripts from elsewhere, which would run with the reader's sign-in.
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        swagger_ui_oauth2_redirect_url=None,
        responses={"4XX": {"model": Problem, "description": "What was wrong, with a `code`."}},
        **options,
    )
    _problem_answers.install_problem_answers(app)
    for module in _ROUTES:
        app.include_router(module.router, prefix=PREFIX)
    return app
