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
from paceline.master.api._access_guard import Guard
from paceline.master.api._attempt_routes import router as attempt_router
from paceline.master.api._body_limits import BodyLimits
from paceline.master.api._checkpoint_routes import router as checkpoint_router
from paceline.master.api._config_routes import router as config_router
from paceline.master.api._context_upload_routes import router as context_upload_router
from paceline.master.api._docs_page import router as docs_router
from paceline.master.api._experiment_edit_routes import router as experiment_edit_router
from paceline.master.api._experiment_list_route import router as experiment_list_router
from paceline.master.api._experiment_routes import router as experiment_router
from paceline.master.api._hyperparameter_routes import router as hyperparameter_router
from paceline.master.api._log_routes import router as log_router
from paceline.master.api._master_routes import router as master_router
from paceline.master.api._node_routes import router as node_router
from paceline.master.api._pool_routes import router as pool_router
from paceline.master.api._problem_answers import install_problem_answers
from paceline.master.api._queue_routes import router as queue_router
from paceline.master.api._readers import NUM_THREADS, Readers
from paceline.master.api._request_counts import RequestCounting
from paceline.master.api._run_routes import router as run_router
from paceline.master.api._scopes import PREFIX
from paceline.master.api._series_csv_route import router as series_csv_router
from paceline.master.api._series_routes import router as series_router
from paceline.master.api._sign_in_routes import router as sign_in_router
from paceline.master.api._slot_routes import router as slot_router
from paceline.master.api._status_and_prometheus_routes import router as status_and_prometheus_router
from paceline.master.api._token_routes import router as token_router
from paceline.master.api._transfer_routes import router as transfer_router
from paceline.master.api._trial_list_route import router as trial_list_router
from paceline.master.api._trial_routes import router as trial_router
from paceline.master.api._web_ui_files import WebUi
from paceline.messages.base import Problem
from paceline.messages.master_info import Shutdown

# Of two routes that fit a path, the first one answers: those with fixed names come first.
_ROUTERS = (
    # Runners ask most, and a route is looked for from the first one on.
    attempt_router,
    transfer_router,
    node_router,
    pool_router,
    queue_router,
    docs_router,
    sign_in_router,
    token_router,
    status_and_prometheus_router,
    master_router,
    slot_router,
    context_upload_router,
    experiment_list_router,
    experiment_edit_router,
    hyperparameter_router,
    config_router,
    experiment_router,
    trial_list_router,
    series_router,
    series_csv_router,
    trial_router,
    log_router,
    checkpoint_router,
    run_router,
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
    install_problem_answers(app)
    for router in _ROUTERS:
        app.include_router(router, prefix=PREFIX)
    return app
