"""`paceline up`, `down` and `status`: the master."""

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli._errors import CommandError
from paceline.cli._options import Home, Json

if TYPE_CHECKING:
    from paceline.client import MasterFile

_FILE_POLL_S = 0.05


def up(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Slots to offer; one per GPU, else per CPU core, by default."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; `down` stops it.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Also show, live, the runs in DIR made without a master."
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Start the master: in the foreground until Ctrl-C, or in the background."""
    from paceline.client import home_directory

    directory = home_directory() if home is None else home.expanduser().absolute()
    if runs is not None:
        runs = runs.expanduser().absolute()
    if detach:
        _up_in_background(directory, host, port, slots, runs)
        return
    from paceline.master import serve

    stop = threading.Event()
    announcer = threading.Thread(target=_announce, args=(directory, stop), daemon=True)
    announcer.start()
    try:
        serve(directory, host, port, slots, runs=runs)
    except ValueError as error:
        # The host, the number of slots and the runs are checked where they are used.
        raise CommandError(str(error)) from error
    finally:
        stop.set()
        announcer.join()


def _up_in_background(
    home: Path, host: str, port: int, slots: int | None, runs: Path | None
) -> None:
    from paceline.cli._master_process import running_master, start_detached

    if (file := running_master(home)) is not None:
        typer.echo(f"A master runs already at {file.url} (process {file.pid}).")
        return
    arguments = ["--host", host, "--port", str(port)]
    if slots is not None:
        arguments += ["--slots", str(slots)]
    if runs is not None:
        arguments += ["--runs", str(runs)]
    file = start_detached(home, arguments)
    typer.echo(f"The master runs at {file.url} (process {file.pid}, home {home}).")
    typer.echo("Stop it with `paceline down`.")


def _announce(home: Path, stop: threading.Event) -> None:
    """Say where the master listens, once it does."""
    from paceline.client import read_master_file

    while not stop.wait(_FILE_POLL_S):
        file = read_master_file(home)
        if file is not None and file.pid == os.getpid():
            typer.echo(f"The master runs at {file.url} (home {home}). Ctrl-C stops it.")
            return


def down(
    keep_trials: Annotated[
        bool, typer.Option("--keep-trials", help="Leave running trials to go on by themselves.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that trials get to store a checkpoint.")
    ] = 30.0,
    home: Home = None,
) -> None:
    """Stop the master; its experiments go on when it starts again."""
    from paceline.cli._master_process import is_alive
    from paceline.client import home_directory, read_master_file

    directory = home_directory() if home is None else home.expanduser().absolute()
    file = read_master_file(directory)
    if file is None or not is_alive(file.pid):
        typer.echo(f"No master runs in {directory}.")
        return
    _shut_down(file, directory, keep_trials, timeout)
    typer.echo(f"Stopped the master at {file.url}.")


def _shut_down(file: "MasterFile", home: Path, keep_trials: bool, timeout_s: float) -> None:
    from paceline.cli._master_process import answers, end_process, wait_for_end
    from paceline.client import Client

    # A master that does not answer cannot be asked; one that does gets the time it was promised,
    # and a moment for its own end.
    patience_s = 0.0
    if answers(file):
        patience_s = 15.0 if keep_trials else timeout_s + 15.0
        token = (home / "token").read_text(encoding="utf-8").strip()
        with Client(file.url, token) as client:
            client.shut_down(keep_trials=keep_trials, timeout_s=timeout_s)
    if not wait_for_end(file.pid, patience_s):
        end_process(file.pid)


def status(json: Json = False) -> None:
    """Show whether a master runs, and how busy it is."""
    import time

    from paceline.cli._connection import connect
    from paceline.cli._output import format_duration, print_facts, print_json

    with connect() as client:
        info = client.master()
        url = client.url
    if json:
        print_json({"url": url, **info.model_dump(mode="json")})
        return
    print_facts(
        [
            ("Master", url),
            ("Version", info.version),
            ("Home", info.home),
            ("Running for", format_duration(time.time() - info.started_at)),
            ("Slots", f"{info.num_slots_used} of {info.num_slots} in use"),
            ("Active experiments", info.num_active_experiments),
        ]
    )
