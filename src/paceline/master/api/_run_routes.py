"""Routes that bring runs made without a master."""

from typing import Annotated, Any

import msgspec
from fastapi import Path, Request, Response

from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, write_rows
from paceline.messages.runs import RunRecords, RunRegistration

# The bulk passes here: bodies are decoded straight into structs, not through models.
router = ApiRouter(tags=["runs"], route_class=ReadingRoute)

RunId = Annotated[str, Path(min_length=1, max_length=128)]


@router.put("/runs/{run_id}", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def register_run(run_id: RunId, request: Request, master: MasterOf) -> Response:
    """Show a run as an unmanaged experiment, and say what is stored of it."""
    body = await _decode(request, RunRegistration)
    if body.info.run_id != run_id:
        raise ApiError(
            422,
            "invalid_request",
            f"`info.run_id` must be the one in the path, {run_id!r}, but got {body.info.run_id!r}.",
        )
    reply = await write_rows(
        master, lambda transaction: master.unmanaged.register(transaction, body.info, body.path)
    )
    return _json(reply)


@router.post("/runs/{run_id}/records", openapi_extra={"requestBody": {"content": {
    "application/json": {"schema": {"type": "object"}}}}})  # fmt: skip
async def store_run_records(run_id: RunId, request: Request, master: MasterOf) -> Response:
    """Store journal records of a run; what is known already is dropped."""
    body = await _decode(request, RunRecords)
    try:
        reply = await write_rows(
            master,
            lambda transaction: master.unmanaged.take(
                transaction,
                run_id,
                body.batches,
                is_alive=body.is_alive,
                moved=body.moved,
                lease_s=body.lease_s,
            ),
        )
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        message = f"The records cannot be stored: {type(error).__name__}: {error}"
        raise ApiError(422, "invalid_records", message) from error
    return _json(reply)


async def _decode(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(422, "invalid_request", str(error)) from error


def _json(message: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
