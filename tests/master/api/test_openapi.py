"""The description of the API, and whatever it allows sent to a real server."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

# One stops the server, the other answers for as long as the client listens.
LEFT_OUT = {"/api/v1/master/shutdown", "/api/v1/events"}
TIME_LIMIT_S = 20.0


@pytest.fixture(scope="module")
def master(
    serve_master: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a master that has something of each kind."""
    served = serve_master(tmp_path_factory.mktemp("openapi") / "home")
    served.create()
    served.schedule()
    served.report(1, 0, ("validation", 1, {"loss": 0.5}), ("training", 1, {"x": "text"}))
    checkpoint = {
        "type": "checkpoint", "time": 0.0, "uuid": "u", "steps_completed": 1, "metadata": {},
        "resources": {"f": 1}, "storage": str(served.home.path / "checkpoints"),
    }  # fmt: skip
    batch = {"generation": 0, "rank": 1, "records": [[0, checkpoint]]}
    served.attempt(1, "records", batches=[batch])
    served.attempt(1, "logs", entries=[[0, 0.0, 0, "stdout", None, "line"]])
    yield served
    served.close()


@pytest.fixture(scope="module")
def schema(master: Any) -> Any:
    """Return the API's description, checked while it is read."""
    loaded = schemathesis.openapi.from_url(f"{master.url}/openapi.json", headers=master.headers)
    loaded.validate()
    return loaded


def test_the_description_is_valid_and_names_every_operation_once(schema: Any) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    ids = [operation.definition.raw["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) >= 28
    for operation in operations:
        assert operation.definition.raw["description"]
        assert "4XX" in operation.definition.raw["responses"]


def test_no_request_that_the_description_allows_makes_the_server_fail(
    schema: Any, master: Any
) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    num_sent = 0

    def check(case: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent % 2:
            aim(case)
        if isinstance((case.query or {}).get("timeout_s"), int | float):
            case.query["timeout_s"] = 0
        reply = case.call(headers=master.headers, timeout=20)
        assert reply.status_code < 500, (case.as_curl_command(), reply.text)
        if reply.status_code >= 400:
            assert reply.headers["content-type"] == ["application/problem+json"]
            assert reply.json()["status"] == reply.status_code
            assert reply.json()["code"]

    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in LEFT_OUT:
            continue
        for mode in schemathesis.GenerationMode:
            if time.monotonic() > deadline and mode is schemathesis.GenerationMode.NEGATIVE:
                continue
            with suppress(Unsatisfiable):  # an operation without parameters cannot be misused
                limit(generated(operation, mode, check))()
    assert num_sent > 200


def aim(case: Any) -> None:
    """Point a request at what is there, which chance would hardly find."""
    there = {"experiment_id": 1, "trial_id": 1, "attempt_id": 1, "uuid": "u", "path": "f"}
    for name in case.path_parameters or {}:
        if name in there:
            case.path_parameters[name] = there[name]


limit = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def generated(operation: Any, mode: Any, check: Callable[[Any], None]) -> Any:
    """Return a test of one operation with generated requests."""

    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        check(case)

    return run
