"""Schema of the JSON that each command prints; run this file to write it into the docs."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from paceline._cluster.master.upkeep.check_files import Finding
from paceline._cluster.master.upkeep.restore import RestoredToken
from paceline._cluster.messages.experiment_models import (
    AttemptEnvironment,
    BulkPreview,
    BulkResult,
    Checkpoint,
    CheckpointPreview,
    CodeDiff,
    Experiment,
    LogLine,
    MetricRow,
    ModelVersion,
    Number,
    RegisteredModel,
    Relative,
    Trial,
    TrialTime,
)
from paceline._cluster.messages.master_models import (
    AuditEntry,
    ConfigRule,
    CreatedToken,
    MasterStatus,
    Member,
    Node,
    NotifyChannel,
    NotifyTest,
    Pool,
    Project,
    QueueEntry,
    Quota,
    Reservation,
    Slot,
    Storage,
    Token,
    Usage,
    User,
)
from paceline._cluster.messages.search_and_metric_models import (
    FrontTrial,
    Proposal,
    SearchObjective,
    TrialProposal,
    TrialRung,
)
from paceline.client._experiment_lineage import Repeats

PUBLISHED = Path(__file__).parents[2] / "docs" / "cli.schema.json"


class ExperimentResult(Experiment):
    """An experiment and its best trial, or the Pareto front of several objectives."""

    best_trial: Trial | None
    objectives: list[SearchObjective] = []
    front: list[FrontTrial] = []
    num_in_front: int = 0


class DescribedTrial(Trial):
    """A trial, who proposed it, and what the search decided about it."""

    proposal: TrialProposal | None
    rungs: list[TrialRung]


class AddedUser(User):
    """A new user, and a link to sign in."""

    sign_in_url: str


class DescribedExperiment(ExperimentResult):
    """An experiment, its best trial and what its repeats say."""

    repeats: Repeats | None


class Status(MasterStatus):
    """A master's status and URL."""

    url: str


def record(title: str, /, **fields: Any) -> Any:
    """Return the type of a JSON object with these fields."""
    return TypedDict(title, fields)  # type: ignore[operator]


RUN = {
    "name": str, "path": str, "state": str, "created_at": float, "num_attempts": int,
    "steps_completed": int | None, "latest_checkpoint": str | None, "error": str | None,
    "restarts": int, "last_restart_cause": str | None,
}  # fmt: skip
ACCESS = {"tokens": list[RestoredToken], "voided_passwords": list[str]}
SHARES = {name: float for name in TrialTime.model_fields if name.endswith("_s")}
METRICS = record(
    "RunMetrics", group=str, steps_completed=int, attempt=int, is_superseded=bool,
    metrics=dict[str, Any],
)  # fmt: skip
METRIC_OF_TRIAL = record(
    "MetricOfTrial", trial_id=int, group=str, steps_completed=int, attempt=int, time=float,
    metrics=dict[str, Any],
)  # fmt: skip
ALERT = record("RunAlert", time=float, level=str, title=str, description=str)
DIFFERENCE = record("Difference", place=str, path=str, detail=str)
OUTCOME = record(
    "FaultOutcome", kind=str, hit_step=int | None, resumed_from=int | None,
    replayed_steps=int | None, differences=list[DIFFERENCE],
)  # fmt: skip
FOREIGN = record(
    "CommandDifference", kind=str, step=int | None, rank=int | None, place=str, path=str,
    detail=str,
)  # fmt: skip
RANK = record("RankDifferences", num_differences=int, first_difference=FOREIGN | None)
TASK = record(
    "InteractiveTask", experiment_id=int | None, kind=str, url=str | None, exit_code=int | None
)
ROW = record("PreviewRow", num_trials=int, length=int | None)
BRACKET = record("PreviewBracket", num_trials=int, rungs=list[int])
PREVIEW = record(
    "SearchPreview",
    searcher=str,
    unit=str | None,
    rows=list[ROW],
    brackets=list[BRACKET],
    varies=dict[str, str],
)
SPREAD = {"mean": float, "min": float, "max": float}
SIMULATED = record(
    "SearchSimulation", searcher=str, unit=str | None, num_searches=int, num_curves=int | None,
    wall_s=record("WallSeconds", **SPREAD), slot_hours=record("SlotHours", **SPREAD),
    trials=list[record("SimulatedTrials", length=int | None, **SPREAD)],  # type: ignore[misc]
    best=list[record("SimulatedBest", time_s=float, **SPREAD)],  # type: ignore[misc]
)  # fmt: skip
SYNCED = record("SyncedRun", name=str, experiment_id=int, num_records=int, is_alive=bool)
IMPORTED = record(
    "ImportedRun", name=str, path=str, state=str, num_points=int, num_files=int,
    problems=list[str],
)  # fmt: skip
PATH = record("WrittenPath", path=str)
FORK = record("ForkDryRun", config=dict[str, Any])
DRY = record(
    "CreateDryRun", config=dict[str, Any], filled=dict[str, str], num_trials=int, num_files=int,
    num_bytes=int,
)  # fmt: skip
FINDING = record("MachineFinding", name=str, detail=str, level=str, hint=str)
COLUMN = {"name": str, "state": str, "settings": dict[str, Any], "metrics": dict[str, Any]}
BULK: Any = TypedDict(  # type: ignore[operator]
    "ManyChanged",
    {
        "action": str, "is_dry_run": bool, "failed": list[BulkResult],
        **{name: field.annotation for name, field in BulkPreview.model_fields.items()},
    },
)  # fmt: skip
CLEANED: Any = TypedDict(  # type: ignore[operator]
    "CheckpointsDeleted",
    {
        "is_dry_run": bool, "failed": list[record("CheckpointLeft", uuid=str, error=str)],
        **{name: field.annotation for name, field in CheckpointPreview.model_fields.items()},
    },
)  # fmt: skip
COMPARED_RUN = record("ComparedRun", **COLUMN)
COMPARED = record("ComparedExperiment", **COLUMN, best_trial=int | None, best_metric=Number | None)
PRUNED = record("PrunedRun", path=str, state=str, last_active=float, num_bytes=int, is_deleted=bool)
FILE = record("File", path=str, size=int)
COPIED_FILES = record("CopiedFiles", path=str, files=list[str])
HOME_CHECK = record("HomeCheck", home=str, master_runs=bool, findings=list[Finding])

RULES = ("template", "policy")
# JSON of each command. Commands in `LINES` print one such object per line.
COMMANDS: dict[str, Any] = {
    "up": record(
        "StartedMaster", url=str, pid=int, home=str, is_new=bool, sign_in_url=str | None
    ),
    "down": record("StoppedMaster", home=str, url=str | None, was_running=bool),
    "status": Status,
    "run": None,
    "init": record("NewProject", directory=str, door=str, files=list[str], main=str),
    "doctor": list[FINDING],
    "backup": record(
        "Backup", path=str, num_files=int, num_bytes=int, num_copied=int, num_bytes_copied=int,
        left_out=list[str],
    ),
    "restore": record(
        "Restored", backup=str, created=float, home=str, num_files=int, left_out=list[str],
        damaged=list[str], num_lost_checkpoints=int, **ACCESS,
    )
    | record("RestoredCopy", backup=str, home=str, set_aside=str, **ACCESS),
    "login": record("SignIn", sign_in_url=str, has_web_ui=bool) | CreatedToken,
    "audit": list[AuditEntry],
    "usage": list[Usage],
    "project create": Project,
    "project list": list[Project],
    "project members": list[Member],
    "project delete": record("DeletedProject", project=str),
    **{f"{kind} {verb}": ConfigRule for kind in RULES for verb in ("set", "show")},
    **{f"{kind} list": list[ConfigRule] for kind in RULES},
    **{
        f"{kind} delete": record("DeletedRule", kind=str, name=str, project=str | None)
        for kind in RULES
    },
    "storage list": list[Storage],
    "quota list": list[Quota],
    "quota set": Quota,
    "quota delete": record(
        "DeletedQuota", user=str | None, project=str | None, group=str | None
    ),
    "runner reserve": Reservation,
    "runner release": record("EndedReservation", node=str, id=int),
    "user add": AddedUser,
    "user list": list[User],
    "user remove": record("RemovedUser", user=str),
    "user group": record("UserGroup", user=str, group=str | None),
    "user link": record("UserLink", user=str, subject=str | None),
    "user role": record(
        "UserRole", user=str, project=str, role=str | None, is_admin=bool | None
    ),
    **dict.fromkeys(("notebook", "open", "shell", "tensorboard"), TASK),
    "sync": list[SYNCED],
    "import": record(
        "Import", kind=str, into=str, runs=list[IMPORTED], problems=list[str]
    ),
    "export": record("ExportedRuns", path=str, runs=list[str], num_values=int),
    "preview-search": PREVIEW,
    "simulate-search": SIMULATED,
    "mcp": None,
    "verify-resume": record(
        "Verdict", is_exact=bool, steps_completed=int, checkpoint_steps=list[int],
        threads=dict[str, int], operations=list[str], notes=list[str], faults=list[OUTCOME],
        directory=str,
    )
    | record(
        "CommandVerdict", result=str, reason=str, level=str, levels=dict[str, bool | None],
        adapter=str | None, num_checkpoints=int, resumed_checkpoint=str | None,
        resumed_from=int | None, killed_at_step=int | None, diverged_at=int | None,
        notes=list[str], first_difference=FOREIGN | None, ranks=dict[str, RANK],
        differences=list[FOREIGN], directory=str,
    ),
    "version": record("Version", version=str),
    "experiment create": ExperimentResult | DRY,
    "experiment fork": ExperimentResult | FORK,
    "experiment continue": ExperimentResult,
    "experiment describe": DescribedExperiment,
    "experiment propose": list[Proposal],
    "experiment tree": list[Relative],
    "experiment diff": CodeDiff,
    "experiment repeat": list[Experiment],
    "experiment wait": ExperimentResult,
    **{
        f"experiment {name}": Experiment
        for name in ("note", "rename", "set", "set-max-slots", "set-priority", "set-weight")
    },
    **{
        f"experiment {name}": Experiment | BULK
        for name in (
            "activate", "archive", "cancel", "kill", "label", "move", "pause", "unarchive",
        )
    },
    "experiment delete": record(
        "DeletedExperiment", experiment_id=int, is_deleted=bool, num_trials=int,
        num_checkpoints=int, checkpoint_bytes=int, num_metric_points=int, obstacle=str | None,
    ) | BULK,
    "experiment download": record("DownloadedCode", path=str, num_files=int),
    "experiment compare": list[COMPARED],
    "experiment list": list[Experiment],
    "experiment list-trials": list[Trial],
    "experiment list-checkpoints": list[Checkpoint],
    "experiment logs": LogLine,
    "experiment metrics": METRIC_OF_TRIAL,
    "trial list": list[Trial],
    "trial describe": DescribedTrial | list[AttemptEnvironment],
    "trial metrics": MetricRow,
    "trial time": TrialTime,
    "trial logs": LogLine,
    "trial kill": list[Trial],
    "trial stop": list[Trial],
    "trial continue": ExperimentResult,
    "trial download": record("DownloadedCheckpoint", path=str, uuid=str),
    "checkpoint export": PATH,
    "checkpoint download": PATH,
    "checkpoint list": list[Checkpoint],
    "checkpoint describe": Checkpoint,
    "model list": list[RegisteredModel],
    "model describe": RegisteredModel,
    "model register": ModelVersion,
    "model alias": RegisteredModel,
    "model download": PATH,
    "model delete": record("DeletedModel", name=str, version=int | None),
    "checkpoint delete": list[Checkpoint] | CLEANED,
    "slot list": list[Slot],
    "slot drain": Slot,
    "slot resume": Slot,
    "job list": list[QueueEntry],
    "job move": list[QueueEntry],
    "runner list": list[Node],
    "runner drain": Node,
    "runner resume": Node,
    "runner forget": record("ForgottenNode", name=str, state=str | None),
    "notify list": list[NotifyChannel],
    "notify test": NotifyTest,
    "pool list": list[Pool],
    "pool set": Pool,
    "pool reset": Pool | None,
    "runs list": list[record("Run", **RUN)],  # type: ignore[misc]
    "runs show": record(
        "RunDescription", **RUN, metadata=dict[str, Any] | None, alerts=list[ALERT],
        metrics=list[METRICS],
    ),
    "runs compare": list[COMPARED_RUN],
    "runs delete": record(
        "DeletedRun", path=str, num_bytes=int, checkpoints_left_in=str | None, is_deleted=bool
    ),
    "runs prune": list[PRUNED],
    "runs files": list[FILE],
    "runs download": COPIED_FILES,
    "trial files": list[FILE],
    "trial download-files": COPIED_FILES,
    "runs time": record("RunTime", **SHARES, goodput=float | None),
    "token create": CreatedToken,
    "token list": list[Token],
    "token revoke": Token,
    "token renew-home": record("RenewedHome", home=str),
    "user set-password": record("SetPassword", user=str),
    "examples list": list[record("Example", name=str)],  # type: ignore[misc]
    "examples copy": record("CopiedExample", name=str, path=str),
    "home check": HOME_CHECK,
}  # fmt: skip
LINES = ("backup", "experiment logs", "experiment metrics", "trial logs", "trial metrics")
ERROR = record("Error", code=str, message=str, hint=str | None)


def json_schemas() -> dict[str, Any]:
    """Return the schemas of all commands, with shared definitions."""
    kinds = {**COMMANDS, "error": ERROR}
    adapters = [(name, "serialization", TypeAdapter(kind)) for name, kind in kinds.items()]
    found, definitions = TypeAdapter.json_schemas(adapters)  # type: ignore[arg-type]
    schemas = {name: found[(name, "serialization")] for name in kinds}
    every: dict[str, Any] = definitions["$defs"]
    for schema in [*every.values(), *schemas.values()]:
        _show(schema)
    text = json.dumps([every, schemas])
    used = {name: one for name, one in every.items() if f'"#/$defs/{name}"' in text}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON of the commands of paceline, and of their errors",
        "$defs": dict(sorted(used.items())),
        "error": schemas.pop("error"),
        "commands": schemas,
    }


def _show(schema: dict[str, Any]) -> None:
    """Close an object, and give it the only state that the command line prints."""
    schema.pop("description", None)
    properties = schema.get("properties")
    if properties is None:
        return
    for one in properties.values():
        one.pop("title", None)
    if "shown_state" in properties:
        properties.pop("shown_state")
        properties["state"] = {"$ref": "#/$defs/ShownState"}
        properties.pop("experiment_state", None)
    schema["required"] = sorted(properties)
    schema["additionalProperties"] = False


def published_text() -> str:
    """Return the text of the published schema."""
    return json.dumps(json_schemas(), indent=1, ensure_ascii=False) + "\n"


SCHEMAS: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))


def valid(name: str, text: str) -> Any:
    """Return the document that a command has printed, of the form that is published."""
    schema = {"$defs": SCHEMAS["$defs"], **SCHEMAS["commands"][name]}
    documents = text.splitlines() if name in LINES else [text]
    assert documents, name
    for document in map(json.loads, documents):
        jsonschema_rs.validator_for(schema).validate(document)
    return json.loads(documents[0])


def error_of(text: str) -> dict[str, Any]:
    """Return the error for a program in the last line of what a command has printed."""
    error: dict[str, Any] = json.loads(text.splitlines()[-1])
    jsonschema_rs.validator_for({"$defs": SCHEMAS["$defs"], **SCHEMAS["error"]}).validate(error)
    return error


# Column of the tables, JSON key, attribute in the SDK, title in the web UI. A dash: no such place.
WORDS = {
    "experiment": [
        ("ID", "id", "id", "Id"),
        ("Name", "name", "name", "Name"),
        ("State", "state", "state", "State"),
        ("Progress", "progress", "progress", "Progress"),
        ("Trials", "num_trials", "data.num_trials", "Trials"),
        ("Best metric", "best_metric", "best_metric", "Best"),
        ("Created", "created_at", "data.created_at", "Created"),
        ("Kind", "kind", "data.kind", "-"),
        ("Owner", "owner", "data.owner", "Owner"),
    ],
    "trial": [
        ("Trial", "id", "id", "Trial"),
        ("State", "state", "state", "State"),
        ("Batches", "steps_completed", "steps_completed", "Batches"),
        ("Best metric", "best_metric", "best_metric", "-"),
        ("Hyperparameters", "hparams", "hparams", "-"),
    ],
    "checkpoint": [
        ("UUID", "uuid", "uuid", "UUID"),
        ("Trial", "trial_id", "trial_id", "Trial"),
        ("Batches", "steps_completed", "steps_completed", "Batches"),
        ("Metric", "metric", "metric", "-"),
        ("Size", "size", "data.size", "Size"),
    ],
}
GUIDE = PUBLISHED.with_name("cli.md")


def guide_text() -> str:
    """Return the guide of the command line with its two tables made anew."""
    words = [
        f"| {thing} | {column} | `{key}` | `{attribute}` | {title} |"
        for thing, rows in WORDS.items()
        for column, key, attribute, title in rows
    ]
    names = [
        f"| `{name}` | {_type_text(one)} |" for name, one in json_schemas()["commands"].items()
    ]
    text = GUIDE.read_text(encoding="utf-8")
    for mark, head, rows in (
        ("words", "| thing | column | JSON | SDK | web UI |\n|---|---|---|---|---|", words),
        ("schemas", "| command | JSON |\n|---|---|", names),
    ):
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->"
        before, after = text.split(begin)[0], text.split(end)[1]
        text = before + begin + "\n".join([head, *rows]) + "\n" + end + after
    return text


def _type_text(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_text(one) for one in schema["anyOf"])
    if "items" in schema:
        return f"list of {_type_text(schema['items'])}"
    return f"`{schema['$ref'].rpartition('/')[2]}`" if "$ref" in schema else str(schema["type"])


if __name__ == "__main__":
    PUBLISHED.write_text(published_text(), encoding="utf-8")
    GUIDE.write_text(guide_text(), encoding="utf-8")
