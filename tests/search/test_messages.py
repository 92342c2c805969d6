from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Reported,
    Shutdown,
    Started,
    Stop,
    Train,
)
from paceline.search._search_messages import input_from_json, message_to_json, operation_from_json

INPUTS: list[Input] = [
    Started(),
    Reported(request_id="a", time=3, metric=0.1),
    Reported(request_id="a", time=3.5, metric=math.inf),
    Reported(request_id="a", time=math.inf, metric=-math.inf),
    Progressed(request_id="a", progress=0.25),
    Exited(request_id="a", reason=ExitReason.INVALID_HP),
]
OPERATIONS: list[Operation] = [
    Create(request_id="a", trial_seed=2**31 - 1, hparams={"lr": 0.1, "net": {"n": [1, None]}}),
    Train(request_id="a", length=9),
    Stop(request_id="a"),
    Shutdown(failure=False, cancel=True),
]


@pytest.mark.parametrize("message", INPUTS)
def test_input_survives_json(message: Input) -> None:
    text = message_to_json(message)
    assert input_from_json(text) == message
    # Other readers than ours take the text as well.
    assert isinstance(json.loads(text, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_survives_json(operation: Operation) -> None:
    assert operation_from_json(message_to_json(operation)) == operation


def test_nan_survives_json() -> None:
    given = input_from_json(message_to_json(Reported(request_id="a", time=1, metric=math.nan)))
    assert isinstance(given, Reported)
    assert math.isnan(given.metric)


@pytest.mark.parametrize("decode", [input_from_json, operation_from_json])
def test_foreign_json_is_refused(decode: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'boost'"):
        decode('{"type": "boost"}')
