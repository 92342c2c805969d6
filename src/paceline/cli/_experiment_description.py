"""Command `paceline experiment describe`: the experiment, its leaderboard and its rungs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.imports import flatten
from paceline._base.progress_display import format_duration
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._connection import connect

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline._cluster.messages.experiment_models import Experiment as ExperimentData
    from paceline._cluster.messages.experiment_models import Trial as TrialData
    from paceline._cluster.messages.search_and_metric_models import FrontTrial, SearchView
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment, Trial
    from paceline.client._experiment_lineage import Repeats


# The most that the master lists at once.
_MOST_WAITING = 1000
_MOST_NODES = 10


def print_trials(found: "list[TrialData]", empty: str) -> None:
    """Print a list of trials."""
    console.print_list(
        found,
        ["Trial", "State", "Batches", "Best metric", "Hyperparameters"],
        [
            (
                trial.id,
                console.state_text(trial.shown_state.value),
                trial.steps_completed,
                trial.best_metric,
                console.format_values(trial.hparams),
            )
            for trial in found
        ],
        right=["Trial", "Batches", "Best metric"],
        empty=empty,
    )


def describe(
    experiment: options.ExperimentId,
    json: options.Json = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Also print the resolved config.")
    ] = False,
) -> None:
    """Show an experiment with its best trial and its rungs."""

    with connect() as client:
        found = client.get_experiment(experiment)
        repeats = found.repeats()
        if json:
            shown = None if repeats is None else asdict(repeats)
            console.print_json({**experiment_result(client, found), "repeats": shown})
            return
        several = _objectives_of(found.data)
        best = None if several else _best_trial(client, found.data)
        waits = waits_for(client, found.data)
        nodes, problems = _nodes_of(client, found.data), _problems_of(client, found.data)
        told = _repeats_text(repeats)
        _print_description(found.data, best, waits, end_note(found), nodes, problems, told)
        search = found.search()
        _print_front(search, console.stdout())
        _print_limits(found.data)
        _print_sampler(search)
        _print_rungs(search)
    if show_config:
        import yaml

        console.stdout().print(yaml.safe_dump(found.config, sort_keys=False).rstrip())


def experiment_result(client: "Client", experiment: "Experiment") -> dict[str, Any]:
    """Return an experiment for JSON, with its best trial, or its Pareto front."""
    best = _best_trial(client, experiment.data)
    plain = {**console.plain_for_console(experiment.data), "best_trial": best and best.data}
    plain |= {"objectives": [], "front": [], "num_in_front": 0}
    if _objectives_of(experiment.data):
        # No trial is the best: the front has those that no other one dominates.
        search = experiment.search()
        told = {name: getattr(search, name) for name in ("objectives", "front", "num_in_front")}
        plain |= {"best_trial": None, **told}
    return plain


def result_fields() -> list[str]:
    """Return the names of the fields of `experiment_result`."""
    from paceline._cluster.messages.experiment_models import Experiment

    return [*Experiment.model_fields, "best_trial", "objectives", "front", "num_in_front"]


def _objectives_of(data: "ExperimentData") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data.config.get("searcher", {}).get("objectives") or []
    return found


def newest_before(client: "Client", key: str | None) -> int:
    """Return the id of the newest experiment before a request with a key; 0 without a key."""
    newest = client.list_experiments(limit=1, archived="all") if key else []
    return newest[0].id if newest else 0


def created_text(experiment: "Experiment", before: int) -> str:
    """Return the beginning of the answer; note that a repeated `--key` has created nothing."""
    text = f"xperiment {experiment.id} ({experiment.name})"
    if experiment.id > before:
        return f"Created e{text}"
    console.print_note(
        "Nothing was created: an earlier request with this `--key` made the experiment."
    )
    return f"E{text}"


def print_created(
    experiment: "Experiment",
    client: "Client",
    text: str,
    *,
    is_followed: bool,
    all_logs: bool = False,
) -> None:
    """Print a new experiment, or follow it to its end and exit.

    With JSON, the document has the state at the end.
    """
    from paceline.cli._experiment_follower import ExperimentFollower, FollowOptions

    if is_followed:
        console.print_note(text)
        raise typer.Exit(
            ExperimentFollower(experiment, client, FollowOptions(all_logs=all_logs)).follow()
        )
    if options.is_json():
        console.print_json(experiment_result(client, experiment))
    else:
        typer.echo(text)
    if options.is_agent() and experiment.data.state.value != "PAUSED":
        console.print_hint(
            f"`paceline e wait {experiment.id} --timeout 600 --json` waits for its end."
        )
    elif experiment.data.state.value == "PAUSED":
        console.print_hint(f"`paceline e activate {experiment.id}` starts it.")
    else:
        console.print_hint(f"`paceline e logs {experiment.id} -f` follows it to its end.")


def end_note(experiment: "Experiment") -> str | None:
    """Return why an otherwise well ended experiment lacks a best trial; None in other cases."""

    data = experiment.data
    if data.is_unmanaged or data.best_metric is not None or data.num_records_lost:
        return None  # The lost lines may have named one.
    if data.state.value != "COMPLETED" and not data.is_unmeasured:
        return None
    return why_no_best(experiment) if data.num_trials else None


def _best_trial(client: "Client", data: "ExperimentData") -> "Trial | None":
    return None if data.best_trial_id is None else client.get_trial(data.best_trial_id)


def waits_for(client: "Client", data: "ExperimentData") -> str | None:
    """Return the slots a queued experiment waits for and their holders; None if not queued."""

    if console.experiment_word(data) != "QUEUED" or data.is_unmanaged:
        return None
    resources = data.config.get("resources", {})
    pool, given = resources.get("pool") or "default", resources.get("slots_per_trial", 1)
    slots = [one for one in client.slots() if one.pool == pool and not one.is_drained]
    if any(slot.experiment_id == data.id for slot in slots):
        return "starting"
    wanted = int(given["min"] if isinstance(given, dict) else given)
    free = sum(slot.experiment_id is None for slot in slots)
    holders = sorted({slot.experiment_id for slot in slots if slot.experiment_id is not None})
    text = f"waiting for {wanted} slot{'s' * (wanted > 1)}"
    text += f" of the pool {pool!r}" if pool != "default" else ""
    text += f"; {free} of {len(slots)} free"
    if holders:
        text += f", held by experiment{'s' * (len(holders) > 1)} "
        text += ", ".join(map(str, holders))
    waiting = client.queue(pool=pool, limit=_MOST_WAITING)
    reason = next((one.detail for one in waiting if one.experiment_id == data.id), None)
    return text if reason is None else f"{text}. {reason}"


def _nodes_of(client: "Client", data: "ExperimentData") -> str | None:
    """Return the nodes with an experiment's running trials, with numbers; None without any."""
    if not data.num_running or data.is_unmanaged:
        return None
    trials: dict[str, set[int | None]] = {}
    for slot in client.slots():
        if slot.experiment_id == data.id:
            trials.setdefault(slot.node, set()).add(slot.trial_id)
    shown = [
        f"{node} ({len(ids)} trial{'s' * (len(ids) > 1)})" for node, ids in list(trials.items())
    ]
    more = f" and {len(shown) - _MOST_NODES} more" if len(shown) > _MOST_NODES else ""
    return ", ".join(shown[:_MOST_NODES]) + more or None


def _problems_of(client: "Client", data: "ExperimentData") -> str | None:
    """Return the master's problems holding up an experiment; None without any."""
    if data.ended_at is not None:
        return None
    problems = client.status().problems
    ours = (f"Experiment {data.id} ", "The disk ")
    return "\n".join(one for one in problems if one.startswith(ours)) or None


def _print_description(
    data: "ExperimentData",
    best_trial: "Trial | None",
    waits: str | None,
    note: str | None,
    nodes: str | None,
    problems: str | None,
    repeats: str | None,
) -> None:

    lost = None
    if data.num_records_lost:
        lost = f"{console.lost_records_text(data.num_records_lost)}; the trials' logs say which"
    took = None if data.ended_at is None else format_duration(data.ended_at - data.created_at)
    console.print_facts(
        [
            ("Experiment", f"{data.id} ({data.name})"),
            ("Description", data.description or None),
            ("Labels", ", ".join(data.labels) or None),
            ("State", console.state_text(console.experiment_word(data))),
            ("Owner", f"{data.owner}, in the project {data.project}"),
            ("Waits", waits),
            ("Problem", problems),
            ("Runs on", nodes),
            ("Error", data.error),
            ("Warning", "\n".join(data.warnings) or None),
            ("Lost", lost),
            ("Progress", console.progress_text(data)),
            ("Made", data.run_dir and f"without a master, in {data.run_dir}"),
            ("Search", _search_text(data)),
            ("Trials", f"{data.num_trials}, {data.num_running} running"),
            *_best_facts(data, best_trial, note),
            ("Repeats", repeats),
            ("Continues", data.parent_trial_id and f"trial {data.parent_trial_id}"),
            ("Created", console.format_moment(data.created_at)),
            ("Took", took),
            ("Ended", data.end_reason),
        ]
    )


def _search_text(data: "ExperimentData") -> str | None:
    """Return the search method and metric; None for a run without a master and its search."""
    if data.is_unmanaged:
        return None
    several = _objectives_of(data) or [
        {"metric": data.metric, "smaller_is_better": data.smaller_is_better}
    ]
    ways = [
        f"{one['metric']} ({'smaller' if one['smaller_is_better'] else 'larger'} is better)"
        for one in several
    ]
    return f"{data.searcher} on {' and '.join(ways)}"


def _best_facts(
    data: "ExperimentData", best_trial: "Trial | None", note: str | None
) -> list[tuple[str, str | None]]:

    if best_trial is None:
        return [("Best", note)]
    best = f"{console.format_number(data.best_metric)} (trial {best_trial.id})"
    return [("Best", best), ("With", console.format_values(best_trial.hparams) or None)]


def _print_limits(data: "ExperimentData") -> None:
    rows = [
        (
            each.name,
            console.format_number(each.limit),
            console.format_number(each.used),
            console.format_number(each.left),
        )
        for each in data.limits
    ]
    if rows:
        console.stdout().print()
        titles = ["Limit", "Value", "Used", "Left"]
        console.print_table(titles, rows, right=titles[1:])


def _repeats_text(found: "Repeats | None") -> str | None:
    """Return what repeats say; None without repeats."""
    if found is None:
        return None
    told = f"trial {found.trial}: {console.format_number(found.mean)}"
    if found.deviation is not None:
        told += f" (standard deviation {console.format_number(found.deviation)})"
    told += f" over {found.num_repeats} seeds"
    if found.num_missing:
        told += f", {found.num_missing} missing"
    if found.interval is None:
        return told
    low, high = map(console.format_number, found.interval)
    verdict = {True: "real", False: "not beyond the noise", None: "not known yet"}[found.is_real]
    return (
        f"{told}\ngain over trial {found.baseline}: {console.format_number(found.gain)}, in 95 %"
        f" between {low} and {high} ({found.num_pairs} pairs): {verdict}"
    )


def _print_sampler(search: "SearchView") -> None:
    facts: list[tuple[str, str | None]] = []
    if (found := search.sampler) is not None:
        drawn = f", {found.num_fallbacks} of them drawn at random instead"
        text = f"{found.name}, {found.num_proposed} trials{drawn if found.num_fallbacks else ''}"
        facts += [("Sampler", text), ("Last fault", found.last_fault)]
    if search.num_out_of_memory:
        facts.append(("Out of memory", f"{search.num_out_of_memory} trials"))
    if facts:
        console.stdout().print()
        console.print_facts(facts)


def _print_rungs(search: "SearchView") -> None:

    rows = []
    for number, bracket in enumerate(search.brackets, start=1):
        for rung in bracket:
            counts = rung.num_by_decision
            rows.append((number, rung.length, sum(counts.values()), counts.get("stopped", 0)))
    if rows:
        console.stdout().print()
        titles = ["Bracket", "Rung", "Reached", "Stopped"]
        console.print_table(titles, rows, right=titles)


def _print_front(search: "SearchView", output: "Console") -> None:
    """Print the trials that no other dominates, for a search of several objectives."""
    if not search.front:
        return
    shown = search.front[:_MOST_IN_FRONT]
    names = _varying_in_leaderboard(shown)
    table = console.make_table()
    for title in ("Trial", *(one.metric for one in search.objectives)):
        table.add_column(title, justify="right")
    table.add_column("Hyperparameters", overflow="fold")
    for one in shown:
        values = flatten(one.hparams)
        told = _joined(names, [console.format_number(values.get(name)) for name in names])
        table.add_row(str(one.trial_id), *map(console.format_number, one.values), told)
    output.print()
    output.print(f"Pareto front: {console.num_trials_text(search.num_in_front)}", style="bold")
    output.print(table)
    if more := search.num_in_front - len(shown):
        output.print(f"and {more} more, see `--json`")


_MOST_IN_FRONT = 20
_NUM_SHOWN = 10
_LINE_WIDTH = 80
_GAP = 2


def print_leaderboard(experiment: "Experiment", output: "Console") -> None:
    """Print the ten best trials of a search, and the hyperparameters of the best trial.

    Of a search of several objectives, print the Pareto front.
    """
    if _objectives_of(experiment.data) and (search := experiment.search()).front:
        _print_front(search, output)
        return
    found = experiment.trials(sort_by="metric", limit=_NUM_SHOWN)
    trials = [trial for trial in found if trial.best_metric is not None]
    if not trials:
        output.print(why_no_best(experiment), style="yellow", soft_wrap=True)
        return
    best = trials[0]
    value = console.format_number(best.best_metric)
    place = f"after {best.data.best_step} batches"
    if experiment.data.num_trials == 1:
        output.print(f"Best {experiment.metric}: {value} {place}", style="bold green")
        return
    direction = "smaller" if experiment.smaller_is_better else "larger"
    shown = f"Best {len(trials)} of {experiment.data.num_trials} trials"
    output.print()
    output.print(f"{shown} by {experiment.metric} ({direction} is better)", style="bold")
    output.print(leaderboard_table(trials, experiment.metric))
    output.print()
    output.print(f"Best: trial {best.id}, {experiment.metric} {value} {place}", style="bold green")
    for name, hparam in sorted(flatten(best.hparams).items()):
        output.print(f"  {name} = {console.format_number(hparam)}")


def why_no_best(experiment: "Experiment") -> str:
    """Return why no trial has a best value of the searched metric."""
    metric = experiment.metric
    # The best leaves out values that are not finite, the latest does not.
    told = [trial for trial in experiment.trials() if trial.data.latest_metric is not None]
    if not told:
        return f"No trial reported the metric `{metric}` in a validation."
    summaries = [trial.reload().data.summary.get("validation", {}).get(metric) for trial in told]
    num_reports = sum(summary.count for summary in summaries if summary is not None)
    reports = "the only report" if num_reports == 1 else f"all {num_reports} reports"
    of = "" if experiment.data.num_trials == 1 else f" of {console.num_trials_text(len(told))}"
    return f"The metric `{metric}` was NaN or infinite in {reports}{of}."


def leaderboard_table(trials: "Sequence[Trial]", metric: str) -> "Table":
    """Return the table; its first row, the best trial, stands out.

    Hyperparameters have a column each if that fits a terminal of 80 characters.
    """
    names = _varying_in_leaderboard(trials)
    titles = ["#", "Trial", metric, "Batches", *names]
    rows = [_leaderboard_row(place, trial, names) for place, trial in enumerate(trials, start=1)]
    is_wide = _width([titles, *rows]) <= _LINE_WIDTH
    if names and not is_wide:
        titles = [*titles[:4], "Hyperparameters"]
        rows = [[*row[:4], _joined(names, row[4:])] for row in rows]
    table = console.make_table()
    for number, title in enumerate(titles):
        is_number = number < 4 or is_wide
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold green" if number == 0 else None)
    return table


def _leaderboard_row(place: int, trial: "Trial", names: list[str]) -> list[str]:
    values = flatten(trial.hparams)
    result = [str(place), str(trial.id), console.format_number(trial.best_metric)]
    result.append(console.format_number(trial.data.best_step))
    return result + [console.format_number(values.get(name)) for name in names]


def _joined(names: list[str], values: list[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _width(rows: list[list[str]]) -> int:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return sum(widths) + _GAP * (len(widths) - 1)


def _varying_in_leaderboard(trials: "Sequence[Trial | FrontTrial]") -> list[str]:
    """Return the hyperparameters with differing values; all of them for a single trial."""
    rows = [flatten(trial.hparams) for trial in trials]
    names = sorted({name for row in rows for name in row})
    if len(rows) == 1:
        return names
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
