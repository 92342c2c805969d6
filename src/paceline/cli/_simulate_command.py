"""Command `paceline simulate-search`: what a search would take and reach, before it runs."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from paceline._base.progress_display import format_duration
from paceline.cli._console_output import console, print_json, print_table
from paceline.cli._options_and_errors import CommandError, ConfigFile, Json, Overrides, connect

if TYPE_CHECKING:
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.search._preview_and_simulation import Curve, SlotsResult

_MOST_CURVES = 200
_NUM_TIMES = 10
# Units that a trial of a search without any length trains for.
_WHOLE = 100


def simulate_search(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    curves: Annotated[
        str | None,
        typer.Option(
            metavar="ID|FILE",
            help="Number of an experiment whose trials were measured, or a JSON file of curves."
            " The default is imaginary curves, with a second for each unit.",
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, metavar="N", help="Slots of the cluster.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="K", help="Number of simulated searches.")
    ] = 10,
    json: Json = False,
) -> None:
    """Simulate a search: its time, slot hours, trials for each length, and best values.

    Each simulated trial takes the measured curve of the nearest hyperparameters.
    """
    from paceline.config._validate_config import load_config

    checked = load_config(config, overrides)
    each = int(checked.to_json()["resources"].get("slots_per_trial") or 1)
    if each > slots:
        raise CommandError(
            f"`--slots` must be at least the {each} slots of a trial, but got {slots}."
        )
    given = None if curves is None else _read_curves(curves, checked)
    results = [_simulate(checked, seed, given, slots // each) for seed in range(seeds)]
    shown = _as_json(checked, results, each, None if given is None else len(given))
    if json:
        print_json(shown)
    else:
        _print(shown, checked)


def _simulate(
    config: "ExperimentConfig", seed: int, curves: "Sequence[Curve] | None", num_at_once: int
) -> "SlotsResult":
    from paceline.search._hyperparameter_space import parse_space
    from paceline.search._preview_and_simulation import (
        imaginary_curves,
        nearest_curves,
        simulate_slots,
    )
    from paceline.search._samplers import asking, make_sampler

    searcher, space = config.searcher, parse_space(config.hyperparameters)
    longest = max((c.points[-1][0] for c in curves or () if c.points), default=_WHOLE)
    # Without a length, a unit of the search is a whole trial.
    unit = longest if searcher.length is None else 1.0
    if curves is None:
        made = imaginary_curves(
            searcher.length or longest, smaller_is_better=searcher.smaller_is_better
        )
    else:
        try:
            made = nearest_curves(space, curves)
        except ValueError as error:
            raise CommandError(str(error)) from error
    spec = searcher.sampler_spec()
    sampler = None if spec.name == "random" else make_sampler(spec.name, spec.options, seed)
    return simulate_slots(
        config.search_config(),
        config.hyperparameters,
        seed,
        made,
        slots=num_at_once,
        unit=unit,
        ask=None if sampler is None else asking(sampler, space, seed),
        is_asking=sampler is not None,
    )


def _read_curves(text: str, config: "ExperimentConfig") -> "list[Curve]":

    from paceline.search._preview_and_simulation import Curve

    if text.isdecimal():
        return _measured_curves(int(text), config)
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=list[Curve])
    except (OSError, msgspec.MsgspecError) as error:
        raise CommandError(
            f"`--curves` must be the number of an experiment, or a JSON list of curves"
            f" ({{hparams, points: [[time, value]], seconds_per_unit}}), but {text!r} is not:"
            f" {error}"
        ) from error


def _measured_curves(number: int, config: "ExperimentConfig") -> "list[Curve]":
    """Return the validation curves of the trials of an experiment, with their speed."""
    from paceline.search._preview_and_simulation import Curve

    searcher, found = config.searcher, []
    with connect() as client:
        for trial in client.get_experiment(number).trials(limit=_MOST_CURVES):
            points = []
            for row in trial.iter_metrics("validation"):
                metrics = {"batches": row.steps_completed, **row.metrics}
                time, value = metrics.get(searcher.time_name), metrics.get(searcher.metric)
                if isinstance(time, int | float) and isinstance(value, int | float):
                    points.append((float(time), float(value)))
            points.sort()
            spent = trial.time()
            if points and points[-1][0] > 0:
                seconds = (spent.total_s - spent.waiting_s) / points[-1][0]
                found.append(Curve(hparams=trial.hparams, points=points, seconds_per_unit=seconds))
    return found


def _as_json(
    config: "ExperimentConfig", results: "list[SlotsResult]", each: int, num_curves: int | None
) -> dict[str, Any]:
    longest_s = max(result.wall_s for result in results)
    times = [longest_s * part / _NUM_TIMES for part in range(1, _NUM_TIMES + 1)]
    lengths = sorted({length for result in results for length in result.trained})
    trained = [[result.trained.get(length, 0) for result in results] for length in lengths]
    best = [[result.best_at(time) for result in results] for time in times]
    return {
        "searcher": config.searcher.name,
        "unit": config.searcher.length_unit,
        "num_searches": len(results),
        "num_curves": num_curves,
        "wall_s": _spread([result.wall_s for result in results]),
        "slot_hours": _spread([result.slot_s * each / 3600 for result in results]),
        "trials": [
            {"length": None if config.searcher.length is None else length, **_spread(counts)}
            for length, counts in zip(lengths, trained, strict=True)
        ],
        "best": [
            {"time_s": time, **spread}
            for time, values in zip(times, best, strict=True)
            if (spread := _spread(values))
        ],
    }


def _spread(values: "Sequence[float | None]") -> dict[str, float]:
    """Return mean, least and greatest of the known values; empty for none."""
    known = [value for value in values if value is not None and isfinite(value)]
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def _print(shown: dict[str, Any], config: "ExperimentConfig") -> None:
    curves = "imaginary curves" if shown["num_curves"] is None else f"{shown['num_curves']} curves"
    output, wall = console(), shown["wall_s"]
    output.print(
        f"{shown['searcher']}: {shown['num_searches']} simulated searches on {curves}\n"
        f"Takes {format_duration(wall['mean'])} ({format_duration(wall['min'])} to"
        f" {format_duration(wall['max'])}), {shown['slot_hours']['mean']:.3g} slot hours.\n"
    )
    trained = [(row["length"] or "whole", row) for row in shown["trials"]]
    best = [(format_duration(row["time_s"]), row) for row in shown["best"]]
    for titles, found in (
        ([f"Trained for ({shown['unit'] or 'units'})", "Trials", "From", "To"], trained),
        (["After", f"Best {config.searcher.metric}", "From", "To"], best),
    ):
        rows = [(first, row["mean"], row["min"], row["max"]) for first, row in found]
        print_table(titles, rows, right=titles)
        output.print()
