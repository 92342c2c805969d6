"""`paceline experiment fork` and `download`: starting from what an experiment was made of."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._command_options import AllLogs, ExperimentId, Follow, Overrides


def fork(
    experiment: ExperimentId,
    overrides: Overrides = [],  # noqa: B006
    paused: Annotated[
        bool, typer.Option("--paused", help="Create it, but do not start it.")
    ] = False,
    follow: Follow = False,
    logs: AllLogs = False,
) -> None:
    """Create a copy of an experiment.

    The copy has the same code and config, with your changes.
    """
    from paceline.cli._config_overrides import nested_overrides
    from paceline.cli._connection import connect

    with connect() as client:
        found = client.get_experiment(experiment)
        made = found.fork(nested_overrides(overrides), activate=not paused)
        typer.echo(f"Created experiment {made.id} ({made.name}) from experiment {experiment}.")
        if follow:
            from paceline.cli._experiment_follower import ExperimentFollower, FollowOptions

            raise typer.Exit(
                ExperimentFollower(made, client, FollowOptions(all_logs=logs)).follow()
            )


def download(
    experiment: ExperimentId,
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="New or empty directory. The default is ./experiment-ID.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Copy the code and config of an experiment into a directory."""
    from paceline.cli._connection import connect

    target = Path(f"experiment-{experiment}") if directory is None else directory
    with connect() as client:
        num_files = client.get_experiment(experiment).download_code(target)
    typer.echo(f"Wrote config.yaml and {num_files} file{'s' * (num_files != 1)} into {target}.")
