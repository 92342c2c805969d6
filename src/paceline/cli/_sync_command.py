"""`paceline sync`: send runs without a master to the master."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.client import RunSync, SyncResult

_WATCH_S = 1.0


def sync(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, or names of runs in ./paceline_runs.", metavar="RUN_DIR"
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Continue to send until the runs have ended.")
    ] = False,
) -> None:
    """Send runs without a master to the master.

    If you send a run again, only its new data is sent.
    """
    from paceline.cli._connection import connect
    from paceline.client import RunSync

    with connect() as client:
        # All are opened first, so that a wrong name is found before anything is sent.
        syncs = [RunSync(client, _find_runs(path)) for path in runs]
        going_on = [one for one in syncs if _send_run(one).is_alive]
        if watch:
            _watch_runs(going_on)


def _find_runs(path: Path) -> Path:
    in_runs = Path("paceline_runs") / path
    return in_runs if not path.exists() and in_runs.exists() else path


def _send_run(sync: "RunSync") -> "SyncResult":
    result = sync.send()
    records = "1 record" if result.num_records == 1 else f"{result.num_records} records"
    going_on = "; the run goes on" if result.is_alive else ""
    typer.echo(f"{sync.name} is experiment {result.experiment_id}: sent {records}{going_on}.")
    return result


def _watch_runs(going_on: "list[RunSync]") -> None:
    """Send what is new about every second until all have ended; Ctrl-C leaves the runs alone."""
    import time

    from paceline.client import MasterUnreachableError

    is_away = False
    while going_on:
        time.sleep(_WATCH_S)
        for sync in list(going_on):
            try:
                result = sync.send()
            except MasterUnreachableError as error:
                if not is_away:
                    typer.echo(f"{error} Trying again until one answers.", err=True)
                is_away = True
                break
            is_away = False
            if not result.is_alive:
                going_on.remove(sync)
                typer.echo(f"{sync.name} has ended.")
