"""The history checker: what was acknowledged against what is stored when all is over."""

import json
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.client import Experiment, Trial
from paceline.config import validate_config
from paceline.search._search import replay
from paceline.search._search_messages import input_from_json, message_to_json
from paceline.storage import CheckpointError, DirectoryStorage

_SEED = 11
# How long a master may take to note that the files of a checkpoint are gone.
_DELETION_S = 10.0


@dataclass
class Verdict:
    """What a round has shown; each list names what was found."""

    num_acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    recovery_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Everything that must not be."""
        return [
            f"{kind}: {text}"
            for kind in ("lost", "doubled", "decisions", "checkpoints", "orphans", "hangs")
            for text in getattr(self, kind)
        ]


def read_notes(path: Path) -> list[list[Any]]:
    """Return what training processes noted; the last line may be torn."""
    if not path.exists():
        return []
    notes = []
    for line in path.read_text().splitlines():
        try:
            notes.append(json.loads(line))
        except ValueError:
            continue
    return notes


def read_search(home: Path, experiment_id: int) -> tuple[list[Any], list[Any]]:
    """Return the stored inputs and the stored operations of an experiment."""
    with closing(sqlite3.connect(home / "master.sqlite")) as connection:
        query = (
            "select input, operations from search_inputs where experiment_id = ? order by number"
        )
        rows = connection.execute(query, [experiment_id]).fetchall()
    return [json.loads(row[0]) for row in rows], [json.loads(row[1]) for row in rows]


def outcome(experiment: Experiment, home: Path) -> list[Any]:
    """Return what must not depend on what happened, with one trial at a time.

    Trials have their numbers within the experiment.
    """
    trials = sorted(experiment.trials(), key=lambda trial: trial.id)
    seen = [[n, t.hparams, t.state.value, t.data.seed] for n, t in enumerate(trials, 1)]
    inputs, operations = read_search(home, experiment.id)
    return [seen, inputs, operations]


def check_decisions(
    experiment: Experiment, home: Path, undisturbed: list[Any] | None, verdict: Verdict
) -> None:
    """Compare with an undisturbed search, and replay the stored inputs."""
    found = json.loads(json.dumps(outcome(experiment, home)))
    if undisturbed is not None:
        for one, other in zip_longest(_essence(found), _essence(undisturbed)):
            if one != other:
                verdict.decisions.append(f"{one} differs from {other}, undisturbed")
                break
    checked = validate_config(experiment.config)
    inputs = [input_from_json(json.dumps(given)) for given in found[1]]
    searcher, space = checked.searcher, checked.hyperparameters
    asks = searcher.is_asking
    decided = replay(checked.search_config(), space, _SEED, inputs, is_asking=asks)
    if [[json.loads(message_to_json(o)) for o in made] for made in decided] != found[2]:
        verdict.decisions.append("the stored inputs lead to other operations than those stored")


def _essence(found: list[Any]) -> list[Any]:
    """Return trials, and decisions without the repeated inputs that nothing followed from.

    An attempt that goes on from a checkpoint reports what came after it once more. A stopped trial
    may end before or after the next one has reported, unless there is one slot.
    """
    trials, inputs, operations = found
    decided: list[Any] = []
    ends: list[Any] = []
    after_ends: list[Any] = []
    for given, made in zip(inputs, operations, strict=True):
        if given["type"] == "exited":
            ends.append(given)
            after_ends += made
        elif made or all(given != earlier for earlier, _ in decided):
            decided.append((given, made))
    ends.sort(key=lambda given: str(given["request_id"]))
    return [*trials, *decided, *ends, after_ends]


def given_away(trials: list[Trial]) -> set[tuple[int, int]]:
    """Return the trials and numbers of attempts that were taken from machines out of reach.

    What they report is not sent any more. Those of runners that died on machines that are there are
    not among them: all that these had reported is sent.
    """
    return {
        (trial.id, attempt.number)
        for trial in trials
        for attempt in trial.reload().data.attempts
        if attempt.exit is not None and _is_given_away(attempt.exit)
    }


def _is_given_away(end: Any) -> bool:
    texts = ("could not be ended", "has it no more")
    reason = end.reason.value
    return reason == "not_formed" or (
        reason == "runner_lost" and any(text in (end.error or "") for text in texts)
    )


def check_reports(
    trials: list[Trial],
    notes: list[list[Any]],
    verdict: Verdict,
    num_torn: int = 0,
    unsent: Collection[tuple[int, int]] = (),
) -> None:
    """Every acknowledged report is stored once with its value, and nothing else is.

    Args:
        trials: All trials.
        notes: What training processes noted.
        verdict: What is wrong is added to it.
        num_torn: How many processes were killed within a write to a journal. Each may have left
            half of a record, which counts as lost, though nobody was told that it is there.
        unsent: Trials and numbers of attempts whose reports may be missing.
    """
    begun: dict[tuple[int, int], float] = {}
    done: set[tuple[int, int]] = set()
    for kind, trial_id, step, *rest in notes:
        if kind == "report":
            begun[trial_id, step] = rest[0]
        elif kind == "reported" and (trial_id, rest[-1]) not in unsent:
            done.add((trial_id, step))
    verdict.num_acknowledged += len(done)
    stored: dict[tuple[int, int], float] = {}
    for trial in trials:
        for row in trial.iter_metrics("validation"):
            key = (trial.id, row.steps_completed)
            if key in stored:
                verdict.doubled.append(f"validation of trial {key[0]} at step {key[1]}")
            stored[key] = row.metrics["loss"]
        steps = [row.steps_completed for row in trial.iter_metrics("training")]
        if len(steps) != len(set(steps)):
            verdict.doubled.append(f"training of trial {trial.id}: {steps}")
        num_torn -= trial.reload().data.num_records_lost
        if num_torn < 0:
            verdict.lost.append(f"trial {trial.id} counts {trial.data.num_records_lost} lost")
    if not begun:
        return
    verdict.lost += [f"report of trial {t} at step {s}" for t, s in sorted(done - stored.keys())]
    for key in sorted(stored):
        if begun.get(key) != stored[key]:
            verdict.lost.append(f"{key} is stored as {stored[key]}, reported {begun.get(key)}")


def check_checkpoints(
    home: Path,
    notes: list[list[Any]],
    verdict: Verdict,
    unsent: Collection[tuple[int, int]] = (),
) -> None:
    """Each stored checkpoint is known and, unless it was deleted, whole and of its trial."""
    known = {row["uuid"]: row for row in _checkpoint_rows(home)}
    for kind, trial_id, step, *rest in notes:
        if kind == "wrong checkpoint":
            verdict.checkpoints.append(f"{rest[0]} was loaded wrongly by trial {trial_id}")
        elif kind == "stored" and (trial_id, rest[-1]) not in unsent:
            verdict.num_acknowledged += 1
            if rest[0] not in known:
                verdict.lost.append(f"checkpoint {rest[0]} of trial {trial_id} at step {step}")
    for uuid, row in known.items():
        if row["state"] != "COMPLETED":
            continue
        storage = DirectoryStorage(Path(row["storage"]))
        try:
            problems = storage.problems(storage.manifest(uuid))
        except (CheckpointError, OSError) as error:
            problems = {uuid: str(error)}
        if problems and not _is_deleted_soon(home, uuid):
            verdict.checkpoints.append(f"{uuid}: {problems}")
        verdict.checkpoints += _wrong_state(Path(row["storage"]) / uuid, row)


def _is_deleted_soon(home: Path, uuid: str) -> bool:
    """Tell whether the master was deleting a checkpoint, whose files go first."""
    deadline = time.monotonic() + _DELETION_S
    while time.monotonic() < deadline:
        if any(row["uuid"] == uuid and row["state"] == "DELETED" for row in _checkpoint_rows(home)):
            return True
        time.sleep(0.2)
    return False


def _wrong_state(place: Path, row: sqlite3.Row) -> Iterator[str]:
    if (place / "state").exists():
        state = json.loads((place / "state").read_text())
        if state != [row["steps_completed"], row["trial_id"]]:
            yield f"{row['uuid']} holds {state}"


def _checkpoint_rows(home: Path) -> list[sqlite3.Row]:
    with closing(sqlite3.connect(home / "master.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        return connection.execute("select * from checkpoints").fetchall()
