"""Searches of MLflow's runs: filters and orders over all that a run has."""

from typing import Any

from sqlalchemy import Connection, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.trackers.mlflow_calls import Call, chunks, endpoint, page_of
from paceline._cluster.master.trackers.mlflow_experiments import is_wanted
from paceline._cluster.master.trackers.mlflow_filter import (
    ATTRIBUTE,
    DATASET,
    METRIC,
    PARAMETER,
    TAG,
    SearchableNames,
    parse_filter,
    select_rows,
    sort_rows,
)
from paceline._cluster.master.trackers.mlflow_metrics import METRIC_KIND, latest_metrics
from paceline._cluster.master.trackers.mlflow_runs import RUN, shown_run

Content = dict[str, Any]

_CONTEXT_TAG = "mlflow.data.context"
_MAX_LISTED = 50_000
_SEARCHABLE = SearchableNames(
    numbers=frozenset({"start_time", "end_time"}),
    texts=frozenset(
        {"run_id", "run_name", "user_id", "status", "artifact_uri", "experiment_id"},
    ),
    entities=frozenset({ATTRIBUTE, METRIC, PARAMETER, TAG, DATASET}),
    listed=frozenset({"run_id"}),
    aliases={"created": "start_time", "Created": "start_time", "run name": "run_name",
             "Run name": "run_name", "Run Name": "run_name"},
)  # fmt: skip


@endpoint("POST", "runs/search", lists=True)
def _search(call: Call) -> dict[str, Any]:
    given = call.given
    # Checked before anything is read: a broken filter is refused where there is no run, too.
    parse_filter(given.text_or_none("filter"), _SEARCHABLE)
    view = given.text_or_none("run_view_type")
    documents = tables.documents.c
    found = [
        (row.name, row.content)
        for part in chunks(given.texts("experiment_ids"))
        for row in call.connection.execute(
            select(documents.name, documents.content).where(
                documents.kind == RUN, documents.parent.in_(part)
            )
        )
        if is_wanted(view, row.content["lifecycle_stage"])
    ]
    look_up = _RunLookup(call.connection, [run_id for run_id, _ in found])
    found = select_rows(found, given.text_or_none("filter"), _SEARCHABLE, look_up)
    orders = [*given.texts("order_by"), "start_time DESC", "run_id ASC"]
    found = sort_rows(found, orders, _SEARCHABLE, look_up)
    page, token = page_of(given, found, default=1000, most=_MAX_LISTED)
    metrics = latest_metrics(call.connection, [run_id for run_id, _ in page])
    return {"runs": [shown_run(run_id, one, metrics[run_id]) for run_id, one in page], **token}


class _RunLookup:
    """What filters and orders compare of runs; each metric is read for all runs at once."""

    def __init__(self, connection: Connection, run_ids: list[str]) -> None:
        self._connection = connection
        self._run_ids = run_ids
        self._metrics: dict[str, dict[str, float]] = {}

    def __call__(self, run: tuple[str, Content], entity: str, key: str) -> Any:
        run_id, content = run
        if entity == METRIC:
            return self._values_of(key).get(run_id)
        if entity in (PARAMETER, TAG):
            return content["params" if entity == PARAMETER else "tags"].get(key)
        if entity == DATASET and key == "context":
            return [
                tag["value"]
                for one in content["datasets"]
                for tag in one["tags"]
                if tag["key"] == _CONTEXT_TAG
            ]
        if entity == DATASET:
            return [one["dataset"][key] for one in content["datasets"]]
        return run_id if key == "run_id" else content[key]

    def _values_of(self, key: str) -> dict[str, float]:
        if key not in self._metrics:
            documents = tables.documents.c
            self._metrics[key] = {
                row.parent: float(row.content["value"])
                for part in chunks(self._run_ids)
                for row in self._connection.execute(
                    select(documents.parent, documents.content).where(
                        documents.kind == METRIC_KIND,
                        documents.parent.in_(part),
                        documents.name == key,
                    )
                )
            }
        return self._metrics[key]
