"""`paceline experiment archive`, `unarchive` and `delete`."""

from typing import Annotated

import typer

from paceline.cli._command_options import ExperimentId


def archive(experiment: ExperimentId) -> None:
    """Archive an ended experiment. Lists do not show archived experiments."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.get_experiment(experiment).archive()
    typer.echo(f"Experiment {experiment} is in the archive.")


def unarchive(experiment: ExperimentId) -> None:
    """Move an experiment out of the archive."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.get_experiment(experiment).unarchive()
    typer.echo(f"Experiment {experiment} is no longer in the archive.")


def delete(
    experiment: ExperimentId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete an ended experiment with all its data.

    This deletes its metrics, logs and checkpoints.
    """
    from paceline.cli._connection import connect
    from paceline.cli._console_output import format_bytes
    from paceline.cli._errors import CommandError
    from paceline.cli._state_words import num_trials_text

    with connect() as client:
        found = client.get_experiment(experiment)
        loss = found.loss()
        if loss.obstacle is not None:
            raise CommandError(loss.obstacle)
        num_checkpoints, size = loss.num_checkpoints, format_bytes(loss.checkpoint_bytes)
        typer.echo(
            f"Deleting experiment {experiment} ({found.name}) takes away"
            f" {num_trials_text(loss.num_trials)}, {loss.num_metric_points} metric values and"
            f" {num_checkpoints} checkpoint{'s' * (num_checkpoints != 1)} ({size})."
        )
        if not yes:
            typer.confirm("Delete it?", abort=True)
        left_behind = found.delete()
    if left_behind:
        raise CommandError(
            f"Experiment {experiment} is deleted, but these could not be removed:"
            f" {', '.join(left_behind)}."
        )
    typer.echo(f"Experiment {experiment} is deleted.")
