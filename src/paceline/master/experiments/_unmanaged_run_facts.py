"""Facts of a run without a master: its configuration, its states, its attempts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.config import ExperimentConfig, validate_config
from paceline.journal import RUN_FORMAT_VERSION, AttemptStarted, RunInfo
from paceline.master.experiments._record_checks import check_run_info
from paceline.master.experiments._record_ingest import CHIEF
from paceline.master.experiments._state_transitions import INVALID_HP, RefusedError
from paceline.messages.runs import RunBatch
from paceline.messages.states import ExperimentState, TrialState

VANISHED = "The process ended without a word: it was killed, or its machine failed."
SILENT = (
    "Nothing was heard of the run for {:.0f} s: it was killed, its machine failed, or the network"
    " does. It goes on here once it is heard again."
)
_NEVER_BEGAN = "The run ended before it recorded anything."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """The states that show how a run stands."""

    experiment: ExperimentState
    trial: TrialState
    reason: str | None = None
    error: str | None = None


def end_of_run(
    *,
    is_alive: bool,
    has_begun: bool,
    outcome: str | None,
    error: str | None,
    vanished: str = VANISHED,
) -> RunEnd:
    """Decide how a run is shown, from its newest attempt.

    A preempted run waits to be resumed, so it is paused.

    Args:
        is_alive: Whether a process of the run is at work, or more records are to come.
        has_begun: Whether there is an attempt at all.
        outcome: How the newest attempt said that it ended, None if it did not.
        error: The error that it named.
        vanished: What to say if it did not tell how it ended.
    """
    if outcome is None and is_alive:
        return RunEnd(experiment=ExperimentState.ACTIVE, trial=TrialState.ACTIVE)
    if outcome == "preempted":
        return RunEnd(experiment=ExperimentState.PAUSED, trial=TrialState.ACTIVE)
    if outcome == "completed":
        return RunEnd(experiment=ExperimentState.COMPLETED, trial=TrialState.COMPLETED)
    if outcome == INVALID_HP:
        # As an experiment whose only trial refused.
        return RunEnd(
            experiment=ExperimentState.ERROR,
            trial=TrialState.COMPLETED,
            reason=INVALID_HP,
            error=f"The run refused its hyperparameters: {error or 'InvalidHP'}.",
        )
    why = error or (vanished if has_begun else _NEVER_BEGAN)
    return RunEnd(experiment=ExperimentState.ERROR, trial=TrialState.ERROR, error=why)


def check_run(info: RunInfo) -> None:
    """Refuse what is no run made without a master.

    Raises:
        RefusedError: A master started it, or it has another format version, or values that cannot
            be.
    """
    try:
        check_run_info(info)
    except ValueError as error:
        raise RefusedError("bad_run", f"The run cannot be shown: {error}") from error
    if info.version != RUN_FORMAT_VERSION:
        raise RefusedError(
            "wrong_version",
            f"A run directory must have format version {RUN_FORMAT_VERSION}, but {info.name!r} has"
            f" {info.version}. Hint: use the Paceline version that wrote it.",
        )
    if info.cluster_id:
        raise RefusedError(
            "managed_run",
            f"A run must have been made without a master, but {info.name!r} is an attempt that"
            " a master started. Hint: that master shows it.",
        )


def config_of_run(info: RunInfo) -> ExperimentConfig:
    """Return a configuration: the run's own, if it has one, with nothing to search.

    Without one the searched metric is taken to be `loss`; the smallest value is the best.

    Raises:
        paceline.config.ConfigError: The run's configuration is not valid.
    """
    searcher: dict[str, Any] = {"name": "single", "metric": "loss"}
    config: dict[str, Any]
    if info.trial is not None and info.trial.config:
        config = dict(info.trial.config)
        given = config["searcher"] if isinstance(config.get("searcher"), dict) else {}
        searcher |= {k: given[k] for k in ("metric", "smaller_is_better") if k in given}
    else:
        # What looks like a reference to a hyperparameter is an argument as it was given.
        arguments = [text.replace("${", "$${") for text in info.arguments]
        config = {"entrypoint": ["python3", *arguments]}
    return validate_config(config | {"name": info.name, "searcher": searcher})


def hparams_of_run(info: RunInfo) -> dict[str, Any]:
    """Return the run's hyperparameters, as far as they are known."""
    return (info.hparams if info.trial is None else info.trial.hparams) or {}


def seed_of_run(info: RunInfo) -> int:
    """Return the run's seed, 0 if it is not known."""
    return (info.seed if info.trial is None else info.trial.trial_seed) or 0


def attempt_started(batches: Iterable[RunBatch]) -> AttemptStarted | None:
    """Return what the chief, or else another rank, said when the attempt began."""
    for batch in sorted(batches, key=lambda batch: (batch.rank != CHIEF, batch.rank)):
        first = batch.records[0][1]
        if isinstance(first, AttemptStarted):
            return first
    return None
