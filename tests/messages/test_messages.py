import inspect
import pkgutil
from importlib import import_module
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from paceline._base.journal_records import encode_record
from paceline._cluster import messages
from paceline._cluster.messages.experiment_models import MetricSummary, Request
from paceline._cluster.messages.master_models import Slot
from paceline._cluster.messages.runner_messages import (
    AttemptControl,
    AttemptEnd,
    LogEntry,
    LogRequest,
    RawRecordBatch,
    RawRecordRequest,
    RecordRequest,
)
from paceline._cluster.messages.states import (
    AttemptState,
    ErrorKind,
    ExitReason,
    ExperimentState,
    TrialState,
)
from paceline.journal import MetricsReported, StatusReported

REQUESTS = {
    "BulkAction", "ConfigText", "ContinueExperiment", "ContinueTrial", "CreateExperiment",
    "DrainNode", "EditExperiment", "EditView", "ForkExperiment", "GroupedName", "GroupsRequest",
    "Login", "LoginForToken", "MetricNamesRequest", "MoveExperiment", "NewPassword",
    "NewProject", "NewProposal", "NewReservation", "NewRole", "NewToken", "NewUser", "NewView",
    "OidcCode", "PreviewSearch", "SeriesOf", "SeriesRequest", "SetConfigRule", "SetPool",
    "SetQuota", "Shutdown", "Source", "UserChange",
}  # fmt: skip
NEEDED = {
    "config": {}, "password": "long enough", "commit": "0123abc", "action": "pause",
    "experiment_ids": [1], "experiment_id": 1, "text": "", "name": "a", "trial_id": 1,
    "hparams": {"lr": 1}, "group": "training", "trial_ids": [1], "groups": [[1]], "role": None,
    "series": [{"trial_id": 1, "group": "a", "name": "b"}], "search": "x=time", "version": 1,
    "is_admin": False, "metrics": [{"group": "a", "name": "b"}],
    "content": {}, "user": "a", "begins_at": 1, "ends_at": 2, "code": "c", "verifier": "v" * 43,
}  # fmt: skip
MODELS = {
    name: model
    for found in pkgutil.iter_modules(messages.__path__)
    for module in [import_module(f"paceline._cluster.messages.{found.name}")]
    for name, model in inspect.getmembers(module, inspect.isclass)
    if issubclass(model, BaseModel) and model.__module__ == module.__name__
}


@pytest.mark.parametrize("states", [ExperimentState, TrialState])
def test_a_state_is_terminal_or_stopping_or_neither(states: Any) -> None:
    kinds = {state.value: (state.is_terminal, state.is_stopping) for state in states}
    assert (True, True) not in kinds.values()
    assert {name for name, kind in kinds.items() if kind == (True, False)} == {
        "COMPLETED", "CANCELED", "ERROR",
    }  # fmt: skip
    neither = {name for name, kind in kinds.items() if kind == (False, False)}
    assert neither == ({"ACTIVE", "PAUSED"} if states is ExperimentState else {"ACTIVE"})
    assert all(states(name).value == name for name in kinds)


def test_states_and_reasons_are_these() -> None:
    """They lie in databases and in clients' code: a change needs another version."""
    assert [state.value for state in AttemptState] == ["PENDING", "RUNNING", "ENDED"]
    assert [reason.value for reason in ExitReason] == [
        "exited", "killed", "preemption_timeout", "start_failed", "shortage", "runner_lost",
        "not_formed",
    ]  # fmt: skip
    assert [kind.value for kind in ErrorKind] == ["transient", "user", "memory", "permanent"]


def test_what_the_runner_sends_raw_is_what_the_master_reads() -> None:
    records = [
        MetricsReported(time=1.0, group="g", steps_completed=2, metrics={"x": 0.1, "y": [1, "a"]}),
        StatusReported(time=2.0, status="ü"),
    ]
    raw = [(n, msgspec.Raw(encode_record(record))) for n, record in enumerate(records, 5)]
    sent = RawRecordRequest(batches=[RawRecordBatch(generation=1, rank=2, records=raw)])
    [batch] = msgspec.json.decode(msgspec.json.encode(sent), type=RecordRequest).batches
    assert (batch.generation, batch.rank) == (1, 2)
    assert batch.records == [(5, records[0]), (6, records[1])]


@pytest.mark.parametrize(
    "message",
    [
        AttemptControl(version=3, should_preempt=True, best_validation={"$float": "nan"}),
        AttemptEnd(reason=ExitReason.KILLED, code=None, signal=9, time=1.5, detail=None),
        LogRequest(entries=[LogEntry(0, 1.5, None, "stdout", None, "text")]),
    ],
)
def test_a_message_comes_back(message: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message


def test_log_entries_travel_as_lists() -> None:
    entry = LogEntry(7, 1.5, 0, "stderr", "ERROR", "text")
    assert msgspec.json.encode(entry) == b'[7,1.5,0,"stderr","ERROR","text",[]]'
    older = msgspec.json.decode(b'[7,1.5,0,"stderr","ERROR","text"]', type=LogEntry)
    assert older == entry, f"a runner before colours sends {older}"


@pytest.mark.parametrize("text", [b"{}", b'{"batches": [{"generation": 0}]}', b"[]", b'{"x": 1}'])
def test_a_message_that_lacks_something_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"missing|Expected"):
        msgspec.json.decode(text, type=RecordRequest)


def test_requests_are_these() -> None:
    found = {name for name, model in MODELS.items() if issubclass(model, Request)}
    assert found - {"Request"} == REQUESTS


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a_request_with_an_unknown_field_is_refused(name: str) -> None:
    needed = {field: NEEDED[field] for field in NEEDED if field in MODELS[name].model_fields}
    MODELS[name].model_validate(needed)
    with pytest.raises(ValidationError, match="colour"):
        MODELS[name].model_validate(needed | {"colour": "red"})


def test_an_answer_of_a_newer_master_is_read_without_what_is_unknown() -> None:
    slot = Slot.model_validate(
        {"id": 0, "device": "cpu", "trial_id": None, "experiment_id": None, "attempt_id": None,
         "temperature": 40}
    )  # fmt: skip
    assert "temperature" not in slot.model_dump()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_message_is_frozen_and_described(name: str) -> None:
    model = MODELS[name]
    assert model.model_config["frozen"]
    # Not all versions of pydantic give a class such as `Page[Trial]` the words of `Page`.
    assert (model.__pydantic_generic_metadata__["origin"] or model).__doc__


@pytest.mark.parametrize("value", [0.5, {"$float": "nan"}, {"$float": "-inf"}])
def test_a_number_keeps_what_json_lacks(value: Any) -> None:
    summary = MetricSummary(count=1, last=value, last_step=1, min=value)
    again = MetricSummary.model_validate_json(summary.model_dump_json())
    assert (again.last, again.min) == (value, value)


@pytest.mark.parametrize(
    ("sent_at", "seen"),
    [(None, 100.0), (105.0, 1995.0), (99.0, 2000.0)],
    ids=["not told", "ended 5 s before", "set back since"],
)
def test_an_end_is_told_by_the_clock_of_its_receiver(sent_at: float | None, seen: float) -> None:
    end = AttemptEnd(
        reason=ExitReason.EXITED, code=0, signal=None, time=100.0, sent_at=sent_at
    ).by_clock_of(2000.0)
    assert (end.time, end.sent_at) == (seen, None)
