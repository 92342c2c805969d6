"""Errors as `application/problem+json`."""

import json

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, ProgrammingError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.config import ConfigError
from paceline.master.experiments import NotFoundError, RefusedError, TransitionError
from paceline.master.store import DatabaseUnavailableError
from paceline.messages.base import Problem
from paceline.search import SearchMethodError
from paceline.storage import CheckpointError

_TITLES = {
    400: "Bad request",
    401: "Not signed in",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    422: "Invalid",
    429: "Too many requests",
    431: "Headers too large",
    500: "Internal error",
    503: "Not available",
}
_CODES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """Raised by a route to answer with a problem."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


def problem(status: int, code: str, detail: str) -> Response:
    """Return a problem as a response."""
    body = Problem(title=_TITLES.get(status, "Error"), status=status, code=code, detail=detail)
    # Details quote what was sent, which may be text that UTF-8 cannot hold: escaped, it always can.
    content = json.dumps(body.model_dump())
    return Response(content, status_code=status, media_type="application/problem+json")


def install_problem_answers(app: FastAPI) -> None:
    """Answer the errors that routes raise."""
    _install_general(app)

    @app.exception_handler(ApiError)
    async def _api_error(_request: Request, error: ApiError) -> Response:
        return problem(error.status, error.code, str(error))

    @app.exception_handler(NotFoundError)
    async def _not_found(_request: Request, error: NotFoundError) -> Response:
        return problem(404, "not_found", str(error))

    @app.exception_handler(RefusedError)
    async def _refused(_request: Request, error: RefusedError) -> Response:
        return problem(409, error.code, str(error))

    @app.exception_handler(TransitionError)
    async def _transition(_request: Request, error: TransitionError) -> Response:
        return problem(409, "wrong_state", str(error))

    @app.exception_handler(ConfigError)
    async def _config(_request: Request, error: ConfigError) -> Response:
        return problem(422, "invalid_config", str(error))

    @app.exception_handler(SearchMethodError)
    async def _search_method(_request: Request, error: SearchMethodError) -> Response:
        return problem(422, "search_method_failed", str(error))

    @app.exception_handler(CheckpointError)
    async def _checkpoint(_request: Request, error: CheckpointError) -> Response:
        return problem(409, "checkpoint_unusable", str(error))

    @app.exception_handler(RequestValidationError)
    async def _validation(_request: Request, error: RequestValidationError) -> Response:
        found = "; ".join(
            f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()
        )
        return problem(422, "invalid_request", found)


def _install_general(app: FastAPI) -> None:
    """Answer what any route may raise."""

    @app.exception_handler(OverflowError)
    async def _overflow(_request: Request, _error: OverflowError) -> Response:
        return problem(422, "invalid_request", "Integers must fit into 64 bits, but one does not.")

    @app.exception_handler(ClientDisconnect)
    async def _gone(_request: Request, _error: ClientDisconnect) -> Response:
        # Nobody reads this, and nothing is wrong here.
        return problem(400, "client_gone", "The client went away before its request was complete.")

    @app.exception_handler(UnicodeEncodeError)
    async def _surrogate(_request: Request, _error: UnicodeEncodeError) -> Response:
        return problem(422, "invalid_request", "Text must be Unicode, but has a lone surrogate.")

    @app.exception_handler(DatabaseError)
    async def _database(_request: Request, error: DatabaseError) -> Response:
        if isinstance(error, (DataError, IntegrityError, ProgrammingError)):
            # What was asked of it is to blame, not its state.
            raise error
        return problem(503, "database_unavailable", f"The database cannot answer: {error.orig}.")

    @app.exception_handler(DatabaseUnavailableError)
    async def _unavailable(_request: Request, error: DatabaseUnavailableError) -> Response:
        return problem(503, "database_unavailable", str(error))

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> Response:
        code = getattr(error, "code", _CODES.get(error.status_code, "error"))
        return problem(error.status_code, code, str(error.detail))

    @app.exception_handler(Exception)
    async def _internal(_request: Request, error: Exception) -> Response:
        detail = f"The master failed ({type(error).__name__}); its log says more."
        return problem(500, "internal_error", detail)
