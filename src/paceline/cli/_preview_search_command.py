"""`paceline preview-search`: a preview of a search."""

from typing import TYPE_CHECKING, Any

from paceline.cli._command_options import ConfigFile, Json, Overrides

if TYPE_CHECKING:
    from paceline.config import ExperimentConfig
    from paceline.search import Preview


def preview_search(config: ConfigFile, overrides: Overrides = [], json: Json = False) -> None:  # noqa: B006
    """Preview the search of a config.

    The command prints the number of trials and their lengths. It needs no master. A real search can
    differ a little, because the order of reports can affect its decisions.
    """
    from paceline.cli._console_output import print_json
    from paceline.config import load_config
    from paceline.search import preview

    checked = load_config(config, overrides)
    result = preview(checked.search_config(), checked.hyperparameters)
    if json:
        print_json(_preview_as_json(checked, result))
    else:
        _print_preview(checked, result)


def _unit(config: "ExperimentConfig") -> str:
    return str(getattr(config.searcher, "time_metric", None) or "units")


def _preview_as_json(config: "ExperimentConfig", result: "Preview") -> dict[str, Any]:
    return {
        "searcher": config.searcher.name,
        "unit": getattr(config.searcher, "time_metric", None),
        "rows": [{"num_trials": row.trials, "length": row.units} for row in result.rows],
        "brackets": [
            {"num_trials": plan.trials, "rungs": list(plan.units)} for plan in result.brackets
        ],
    }


def _print_preview(config: "ExperimentConfig", result: "Preview") -> None:
    from paceline.cli._console_output import console, print_table

    unit = _unit(config)
    total = sum(row.trials for row in result.rows)
    console().print(f"{config.searcher.name}: {total} {'trial' if total == 1 else 'trials'}")
    title = "Trained for" if not result.brackets else f"Trained for ({unit})"
    whole = "their whole length"
    if config.searcher.wants_reports and not result.brackets:
        whole = "at most their whole length"
    rows = [(row.trials, row.units or whole) for row in result.rows]
    print_table(["Trials", title], rows, right=["Trials", title])
    if len(result.brackets) > 1:
        console().print()
        brackets = [
            (number, plan.trials, ", ".join(map(str, plan.units)))
            for number, plan in enumerate(result.brackets, start=1)
        ]
        print_table(["Bracket", "Trials", f"Rungs ({unit})"], brackets, right=["Bracket", "Trials"])
    if result.brackets:
        console().print()
        work = sum(row.trials * (row.units or 0) for row in result.rows)
        console().print(f"In total {work} {unit}.")
