"""Commands `paceline trial`: show and change a trial; metrics of experiments."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.journal_records import encode_metrics
from paceline._base.progress_display import format_duration
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._commands.checkpoint_commands import OutputDirectory
from paceline.cli._commands.experiment_commands import experiment_app
from paceline.cli._completions import complete_experiment, complete_trial
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError
from paceline.cli._experiment_description import print_created, print_trials, result_fields

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import AttemptEnvironment
    from paceline._cluster.messages.experiment_models import Trial as TrialData
    from paceline._cluster.messages.search_and_metric_models import TrialDecisions, TrialRung
    from paceline.client._checkpoint import Checkpoint
    from paceline.client._experiment_and_trial import Experiment, Trial


trial_app = CommandGroup(help="Show and change a trial.")


@trial_app.command("list", is_list=True)
def list_trials(limit: options.Limit = 20, query: options.QueryText = None) -> None:
    """List trials of all experiments, newest first."""
    with connect() as client:
        found = client.list_trials(query, limit=limit)
    print_trials([one.data for one in found], "No trial fits." if query else "No trials yet.")


@trial_app.command(has_fields=True)
def describe(
    trial: options.TrialId,
    json: options.Json = False,
    show_environment: Annotated[
        bool,
        typer.Option(
            "--environment",
            help="Also print the environment of its attempts: packages, changed code.",
        ),
    ] = False,
) -> None:
    """Show the hyperparameters, metrics and attempts of a trial."""

    with connect() as client:
        found = client.get_trial(trial)
        data = found.data
        environments = [] if json and not show_environment else found.environments()
        decisions = found.decisions()
    if json and show_environment:
        console.print_json(environments)
    elif json:
        console.print_json(
            {**console.plain_for_console(data), **console.plain_for_console(decisions)}
        )
    else:
        _print_trial_facts(data, data.shown_state.value, decisions)
        console.print_alerts(data.alerts)
        _print_summary(data)
        _print_attempts(data)
        print_environments(environments, is_whole=show_environment)


def _print_trial_facts(data: "TrialData", state: str, decisions: "TrialDecisions") -> None:

    best = lost = None
    if data.num_records_lost:
        lost = f"{console.lost_records_text(data.num_records_lost)}; its log says which"
    if data.best_metric is not None:
        best = f"{console.format_number(data.best_metric)} after {data.best_step} batches"
    console.print_facts(
        [
            ("Trial", f"{data.id} (experiment {data.experiment_id})"),
            ("State", console.state_text(state)),
            ("Reason", data.stop_reason),
            ("Error", data.error),
            ("Kind of error", data.error_kind and console.ERROR_KINDS[data.error_kind.value]),
            ("Lost", lost),
            ("Runs on", _runs_on(data)),
            ("Status", data.status),
            ("Hyperparameters", console.format_values(data.hparams) or None),
            ("Proposed", _proposal_text(decisions)),
            ("Search", "\n".join(map(_rung_text, decisions.rungs)) or None),
            ("Metadata", data.metadata and console.format_values(data.metadata)),
            ("Seed", data.seed),
            ("Batches", _batches_text(data)),
            ("Best metric", best),
            ("Latest checkpoint", data.latest_checkpoint),
            ("Restarts", data.restarts),
            ("Worker restarts", _worker_restarts(data)),
            ("Retries", f"{data.retries} after transient errors" if data.retries else None),
            ("Started", console.format_age(data.started_at)),
        ]
    )


def _batches_text(data: "TrialData") -> str:
    """Return how many batches are trained; where an attempt began again, what is lost as well."""
    reached, newest = data.steps_completed, data.attempts[-1] if data.attempts else None
    if newest is None or len(data.attempts) < 2 or newest.resumed_steps > 0:
        return str(reached)
    steps = (one.last_step for metrics in data.summary.values() for one in metrics.values())
    now = max(steps, default=0)
    if now >= reached or data.latest_checkpoint is not None:
        return str(reached)
    return f"{now} in attempt {newest.number}; {reached} before it were lost"


def _proposal_text(decisions: "TrialDecisions") -> str | None:
    """Return who proposed the hyperparameters, and why."""
    found = decisions.proposal
    return None if found is None else f"by {found.by}" + (f": {found.why}" if found.why else "")


_DECISIONS = {
    "continued": "promoted",
    "stopped": "stopped",
    "finished": "trained to the end",
    "failed": "failed on its way there",
    "waiting": "on its way there",
    "paused": "pauses there until it is among the best",
}


def _rung_text(rung: "TrialRung") -> str:
    """Return what the search decided at a rung, and by which comparison."""
    text = f"bracket {rung.bracket}, rung {rung.length}: {_DECISIONS[rung.decision]}"
    if rung.metric is None or rung.arrival is None:
        return text
    found = rung.arrival
    cutoff = "" if found.cutoff is None else f" (cut-off {console.format_number(found.cutoff)})"
    return (
        f"{text} with {console.format_number(rung.metric)}, number {found.rank} of {found.order} so"
        f" far, of which {found.num_kept} may continue{cutoff}"
    )


def _worker_restarts(data: "TrialData") -> str | None:
    """Return how often workers were started again within attempts, and why the last time."""

    causes = [one.last_restart_cause for one in data.attempts if one.last_restart_cause]
    return console.restarts_text(causes, sum(one.restarts for one in data.attempts))


def _runs_on(data: "TrialData") -> str | None:
    """Return the nodes of the running attempt; None if no attempt runs."""
    running = [one for one in data.attempts if one.ended_at is None]
    return ", ".join(node.name for one in running for node in one.nodes) or None


def _print_summary(data: "TrialData") -> None:

    rows = [
        (group, name, s.count, s.last, s.min, s.max, s.mean)
        for group, series in sorted(data.summary.items())
        for name, s in sorted(series.items())
    ]
    if rows:
        console.stdout().print()
        titles = ["Group", "Metric", "Count", "Last", "Min", "Max", "Mean"]
        console.print_table(titles, rows, right=titles[2:])
    if data.has_more_metrics:
        console.stdout().print("More metrics are not shown. `paceline t metrics` prints all.")


def _print_attempts(data: "TrialData") -> None:

    rows: list[tuple[Any, ...]] = []
    for attempt in data.attempts:
        took = None
        if attempt.started_at is not None and attempt.ended_at is not None:
            took = format_duration(attempt.ended_at - attempt.started_at)
        end = None
        if attempt.exit is not None:
            end = attempt.exit.outcome or attempt.exit.reason.value
            if attempt.exit.code:
                end += f" (code {attempt.exit.code})"
            if attempt.exit.signal:
                end += f" (signal {attempt.exit.signal})"
            if attempt.exit.kind is not None:
                end += f", {attempt.exit.kind.value} error"
            if attempt.preempt_reason is not None:
                end += f": {attempt.preempt_reason}"
        slots = ",".join(map(str, attempt.slots))
        if [node.name for node in attempt.nodes] not in ([], ["local"]):
            # Slots by node: the node of rank 0 comes first.
            slots = " ".join(f"{n.name}:{','.join(map(str, n.slots))}" for n in attempt.nodes)
        start = "the beginning"
        if attempt.resumed_steps:
            start = f"batch {attempt.resumed_steps}"
        elif attempt.resumed_from is not None:
            # A continued trial begins at another one's, whose batches are not its own.
            start = f"checkpoint {attempt.resumed_from[:8]}"
        rows.append((attempt.number, attempt.state.value, slots, start, took, end))
    console.stdout().print()
    console.print_table(
        ["Attempt", "State", "Slots", "From", "Took", "End"], rows, right=["Attempt"]
    )


MetricGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        metavar="NAME",
        help="Metric group: training, validation, or another one.",
    ),
]


@trial_app.command()
def metrics(
    trial: options.TrialId, group: MetricGroup = None, json: options.JsonLines = False
) -> None:
    """Print the reported metrics of a trial.

    Reports that a later attempt repeated appear once.
    """

    with connect() as client:
        _print_metrics(f"trial {trial}", [client.get_trial(trial)], group, json=json)


@experiment_app.command("metrics")
def experiment_metrics(
    experiment: options.ExperimentId, group: MetricGroup = None, json: options.JsonLines = False
) -> None:
    """Print the reported metrics of all trials of an experiment: the curves of a search.

    Reports that a later attempt repeated appear once.
    """

    with connect() as client:
        trials = client.get_experiment(experiment).trials()
        _print_metrics(f"experiment {experiment}", trials, group, json=json, shows_trials=True)


def _print_metrics(
    what: str,
    trials: "Sequence[Trial]",
    group: str | None,
    *,
    json: bool,
    shows_trials: bool = False,
) -> None:
    """Print the metrics of trials, all of a group or all of them.

    Raises:
        CommandError: No trial has reported the group.
    """
    if group is not None:
        known: set[str] = set()
        for trial in trials:
            # Trials of a list come without their summaries.
            known |= (trial.data.summary or trial.reload().data.summary).keys()
            if group in known:
                break
        else:
            told = ", ".join(sorted(known)) or "none yet"
            raise CommandError(
                f"`--group` must be one that {what} reported ({told}), but got {group!r}."
            )
    rows = ((trial.id, row) for trial in trials for row in trial.iter_metrics(group))
    if json:
        for trial_id, row in rows:
            line = row.model_dump() | {"metrics": encode_metrics(row.metrics)}
            console.print_json_line({"trial_id": trial_id, **line} if shows_trials else line)
        return
    columns = ["Trial"] * shows_trials
    console.print_table(
        [*columns, "Group", "Batches", "Attempt", "Metrics"],
        [
            (trial_id, r.group, r.steps_completed, r.attempt, console.format_values(r.metrics))[
                not shows_trials :
            ]
            for trial_id, r in rows
        ],
        right=[*columns, "Batches", "Attempt"],
        empty="No metrics yet.",
    )


@trial_app.command("time")
def show_time(trial: options.TrialId, json: options.Json = False) -> None:
    """Show how the time of a trial was spent: training, starts, lost work."""

    with connect() as client:
        spent = client.get_trial(trial).time()
    if json:
        console.print_json(spent)
    else:
        console.print_time_table(spent.model_dump(), spent.total_s, spent.goodput)


@trial_app.command()
def logs(
    trial: options.TrialId,
    follow: options.Follow = False,
    tail: options.Tail = None,
    rank: options.Rank = None,
    level: options.Level = None,
    stream: options.Stream = None,
    search: options.Search = None,
    pattern: options.Pattern = None,
    timestamps: options.Timestamps = False,
    json: options.JsonLines = False,
) -> None:
    """Print the output of a trial."""
    from paceline.cli._experiment_follower import print_damaged_log_lines, print_log_lines

    with connect() as client:
        found = client.get_trial(trial)
        lines = found.iter_logs(
            follow=follow,
            tail=tail,
            rank=rank,
            level=level,
            stream=stream,
            search=search,
            pattern=pattern,
        )
        print_log_lines(lines, json=json, timestamps=timestamps)
        print_damaged_log_lines(found.num_damaged_lines)


TrialIds = Annotated[
    list[int],
    typer.Argument(help="Numbers of the trials.", metavar="ID...", autocompletion=complete_trial),
]


@trial_app.command()
def kill(trials: TrialIds) -> None:
    """Kill trials at once, without a checkpoint."""

    with connect() as client:
        # None is touched if one of them is not there.
        killed = [trial.kill() for trial in [*map(client.get_trial, trials)]]
    told = [f"Trial {trial.id} is {trial.data.shown_state.value}." for trial in killed]
    console.print_answer([trial.data for trial in killed], "\n".join(told))


@trial_app.command()
def stop(trials: TrialIds) -> None:
    """Stop trials for good: each stores a checkpoint and ends. The search continues without them.

    They are CANCELED then; STOPPED are those that the search has stopped.
    """
    with connect() as client:
        stopped = [trial.stop() for trial in [*map(client.get_trial, trials)]]
    told = [
        f"Trial {trial.id} is {trial.data.shown_state.value}."
        f"{' It stores a checkpoint and ends.' if trial.data.is_running else ''}"
        for trial in stopped
    ]
    console.print_answer([trial.data for trial in stopped], "\n".join(told))


@trial_app.command("continue", has_fields=result_fields)
def continue_trial(
    trial: Annotated[
        str | None,
        typer.Argument(
            help="Number of the trial. With --best it is left out.",
            metavar="ID",
            autocompletion=complete_trial,
        ),
    ] = None,
    directory: options.ChangedCode = None,
    best: Annotated[
        int | None,
        typer.Option(
            metavar="EXPERIMENT",
            help="Continue the best trial of this experiment.",
            autocompletion=complete_experiment,
        ),
    ] = None,
    follow: options.Follow = False,
    overrides: options.Overrides = [],  # noqa: B006
    paused: Annotated[
        bool, typer.Option("--paused", help="Create it, but do not start it.")
    ] = False,
    key: options.RequestKey = None,
) -> None:
    """Continue a trial, or the best one of an experiment, in a new experiment.

    The new experiment starts from the latest checkpoint of the trial, or from another one by
    `--config searcher.source_checkpoint_uuid=UUID`. It is a `single` search of the same length;
    `--config searcher.max_length.epochs=20` gives another one. With DIR it has the code there;
    `paceline e diff` shows the changes.
    """
    is_number = trial is not None and trial.isdecimal()
    # The first word is the directory where no trial is named.
    if best is not None and trial is not None and directory is None and not is_number:
        directory, trial = Path(trial), None
    if (trial is None) is (best is None) or (best is None and not is_number):
        raise typer.BadParameter(
            f"must be the number of a trial or `--best EXPERIMENT`, but got {trial or 'neither'}"
            f"{'' if best is None else ' and --best'}.",
            param_hint="ID",
        )
    with connect() as client:
        changes = options.nested_overrides(overrides)
        number = _best_trial(client.get_experiment(best)) if best is not None else int(trial or 0)
        experiment = client.get_trial(number).continue_(
            changes, activate=not paused, key=key, code=directory
        )
        text = f"Created experiment {experiment.id}, which continues trial {number}."
        print_created(experiment, client, text, is_followed=follow)


def _best_trial(experiment: "Experiment") -> int:
    number = experiment.data.best_trial_id
    if number is None:
        raise CommandError(
            f"Experiment {experiment.id} must have a best trial, but no trial has reported a finite"
            f" `{experiment.metric}`. Hint: `paceline e list-trials {experiment.id}` lists them."
        )
    return number


@trial_app.command()
def download(
    trial: options.TrialId,
    latest: Annotated[
        bool, typer.Option("--latest", help="Copy the latest checkpoint, not the best.")
    ] = False,
    output: OutputDirectory = None,
) -> None:
    """Copy the best checkpoint of a trial into a new directory.

    `paceline trial continue` starts from the latest one, which `--latest` copies.
    """

    with connect() as client:
        checkpoint = _latest_of_trial(client.get_trial(trial)) if latest else None
        chosen = checkpoint or client.get_trial(trial).top_checkpoint()
        path: Path = chosen.download(output)
    console.print_answer({"path": str(path), "uuid": chosen.uuid}, str(path))
    measured = "" if chosen.metric is None else f", metric {console.format_number(chosen.metric)}"
    console.print_hint(f"checkpoint {chosen.uuid} of batch {chosen.steps_completed}{measured}.")


def _latest_of_trial(trial: "Trial") -> "Checkpoint":
    stored = [c for c in trial.checkpoints() if c.state.value == "COMPLETED"]
    if not stored:
        raise CommandError(f"Trial {trial.id} must have a checkpoint, but has none.")
    return max(stored, key=lambda c: (c.data.attempt, c.steps_completed))


# Digits of a commit that people know it by.
_SHORT = 10


def print_environments(environments: "list[AttemptEnvironment]", *, is_whole: bool) -> None:
    """Print the environment of the newest attempt in short, or all environments in full."""

    known = [one for one in environments if one.environment is not None]
    if is_whole:
        _print_whole(environments)
    elif known:
        console.stdout().print()
        console.print_facts(_environment_facts(known[-1].environment or {}, known[-1].source))


def _print_whole(environments: "list[AttemptEnvironment]") -> None:
    import yaml

    found: list[dict[str, Any]] = []
    # Equal environments are shown once.
    for before, one in zip([None, *environments], environments, strict=False):
        content: dict[str, Any] = {"environment": one.environment, "source": one.source}
        if before is not None and one.model_copy(update={"number": before.number}) == before:
            content = {"environment": f"that of attempt {before.number}"}
        found.append({"attempt": one.number, **content})
    console.stdout().print()
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    console.stdout().print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _environment_facts(
    found: dict[str, Any], source: dict[str, Any] | None
) -> list[tuple[str, Any]]:
    python, host = found.get("python", {}), found.get("host", {})
    packages: dict[str, str] = found.get("packages", {})
    named = [f"{name} {packages[name]}" for name in ("torch",) if name in packages]
    named.append(f"{len(packages)} packages")
    return [
        ("Python", f"{python.get('version')}, {', '.join(named)} ({python.get('executable')})"),
        ("Paceline", found.get("paceline")),
        ("Start", found.get("start")),
        ("Host", f"{host.get('name')}, {host.get('platform')}, {host.get('num_cores')} cores"),
        ("GPUs", _gpus(found.get("gpus"))),
        ("Code", _code_facts(source)),
    ]


def _gpus(gpus: dict[str, Any] | None) -> str | None:
    if not gpus:
        return None
    return ", ".join([*gpus.get("models", []), f"driver {gpus.get('driver')}"])


def _code_facts(source: dict[str, Any] | None) -> str | None:
    if source is None:
        return None
    text = f"commit {source['commit'][:_SHORT]}"
    if source.get("branch"):
        text += f" of {source['branch']}"
    if source.get("num_diff_bytes"):
        text += f", {source['num_diff_bytes']} bytes of changes"
    if source.get("num_untracked_files"):
        number = source["num_untracked_files"]
        text += f", {number} new file{'s' * (number != 1)}"
    return text
