"""`paceline up`, `down` and `status`: the master."""

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._errors import CommandError
from paceline.cli._options import Home, Json, home_of

_FILE_POLL_S = 0.05
_DEFAULT_PORT = 8080
_DRAIN_S = 30


def up(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help=f"Port to listen on. 0 chooses a free port. The default is {_DEFAULT_PORT}.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of slots. The default is one per GPU, or else one per CPU core.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background. `down` stops the master.")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="DIR", help="Also show the runs without a master in DIR, live."
        ),
    ] = None,
    set_aside: Annotated[
        bool,
        typer.Option(
            "--set-aside",
            help="Move files that the database does not know, or a damaged database with all"
            " files, into `set_aside` in the home, and start.",
        ),
    ] = False,
    executor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What starts the attempts: `local`, or one that an installed package offers.",
        ),
    ] = "local",
    runner_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long a runner may give no sign of life. Then it is ended, and its trial goes"
            " on from the latest checkpoint. The default is 60.",
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Start the master, in the foreground or in the background."""

    directory = home_of(home)
    if runs is not None:
        runs = runs.expanduser().absolute()
    if detach:
        _up_in_background(directory, host, port, slots, runs, set_aside, executor, runner_timeout)
        return
    # Modules stay loaded: to look for garbage among them would take a third of their loading.
    gc.disable()
    from paceline.master import serve

    gc.freeze()
    gc.enable()
    stop = threading.Event()
    announcer = threading.Thread(target=_announce, args=(directory, stop), daemon=True)
    announcer.start()
    try:
        with _interrupt_told(directory):
            serve(
                directory,
                host,
                _DEFAULT_PORT if port is None else port,
                slots,
                runs=runs,
                set_aside=set_aside,
                executor=executor,
                **({} if runner_timeout is None else {"runner_timeout_s": runner_timeout}),
            )
    except (TypeError, ValueError) as error:
        # The host, the number of slots, the runs and the executor are checked where they are used.
        raise CommandError(str(error)) from error
    finally:
        stop.set()
        announcer.join()


def _up_in_background(
    home: Path,
    host: str,
    port: int | None,
    slots: int | None,
    runs: Path | None,
    set_aside: bool,
    executor: str,
    runner_timeout: float | None,
) -> None:
    from paceline.cli._master_process import running_master, start_detached

    if (file := running_master(home)) is not None:
        if port and port != file.port:
            raise CommandError(
                f"The home {str(home)!r} must have no master to start one on port {port}, but one"
                f" runs at {file.url}. Hint: stop it with `paceline down`, or choose another"
                " `--home`."
            )
        typer.echo(f"A master runs already at {file.url} (process {file.pid}).")
        _tell_sign_in_link(home, file.url)
        return
    arguments = ["--host", host]
    if port is not None:
        arguments += ["--port", str(port)]
    if slots is not None:
        arguments += ["--slots", str(slots)]
    if runs is not None:
        arguments += ["--runs", str(runs)]
    if set_aside:
        arguments.append("--set-aside")
    arguments += ["--executor", executor]
    if runner_timeout is not None:
        arguments += ["--runner-timeout", str(runner_timeout)]
    file = start_detached(home, arguments)
    typer.echo(f"The master runs at {file.url} (process {file.pid}, home {home}).")
    _tell_sign_in_link(home, file.url)
    typer.echo("Stop it with `paceline down`.")


def _announce(home: Path, stop: threading.Event) -> None:
    """Say where the master listens, once it does."""
    from paceline.client import read_master_file

    while not stop.wait(_FILE_POLL_S):
        file = read_master_file(home)
        if file is not None and file.pid == os.getpid():
            typer.echo(f"The master runs at {file.url} (home {home}). Ctrl-C stops it.")
            _tell_sign_in_link(home, file.url)
            return


def _tell_sign_in_link(home: Path, url: str) -> None:
    """Print a link that signs a browser in, once, or that there is no web UI."""
    from paceline.cli._master_process import NO_WEB_UI
    from paceline.client import Client, ClientError

    token = (home / "token").read_text(encoding="utf-8").strip()
    try:
        with Client(url, token) as client:
            has_web_ui = client.master().has_web_ui
            typer.echo(f"Sign in: {client.sign_in_link()}" if has_web_ui else NO_WEB_UI)
    except ClientError as error:
        typer.echo(f"No sign-in link could be made: {error}", err=True)


@contextmanager
def _interrupt_told(home: Path) -> Iterator[None]:
    """Say at the first Ctrl-C what the master waits for; the master itself handles the signal."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    teller = threading.Thread(target=_tell_interrupt, args=(reader, home), daemon=True)
    teller.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        writer.close()
        teller.join()
        reader.close()


def _tell_interrupt(signals: socket.socket, home: Path) -> None:
    from paceline.cli._master_process import count_running_attempts
    from paceline.cli._states import num_trials_text

    while received := signals.recv(1):
        if received[0] not in (signal.SIGINT, signal.SIGTERM):
            continue
        if num_trials := count_running_attempts(home):
            gets = "gets" if num_trials == 1 else "get"
            typer.echo(
                f"\nStopping: {num_trials_text(num_trials)} {gets} up to {_DRAIN_S} s to store"
                " checkpoints and will go on at the next `paceline up`. Ctrl-C again leaves what"
                " runs running."
            )
        return


def down(
    keep_trials: Annotated[
        bool, typer.Option("--keep-trials", help="Keep trials running without the master.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time for trials to store a checkpoint."),
    ] = 30.0,
    home: Home = None,
) -> None:
    """Stop the master. The next `up` continues its experiments."""
    from paceline.cli._master_process import count_running_attempts, is_alive, shut_down
    from paceline.cli._states import num_trials_text
    from paceline.client import read_master_file

    directory = home_of(home)
    file = read_master_file(directory)
    if file is None or not is_alive(file.pid):
        typer.echo(f"No master runs in {directory}.")
        _tell_left_running(directory)
        return
    num_trials = count_running_attempts(directory)
    if num_trials and not keep_trials:
        gets = "gets" if num_trials == 1 else "get"
        typer.echo(
            f"Stopping: {num_trials_text(num_trials)} {gets} up to {timeout:g} s to store"
            " checkpoints and will go on at the next `paceline up`."
        )
    shut_down(file, directory, keep_trials=keep_trials, timeout_s=timeout)
    typer.echo(f"Stopped the master at {file.url}.")
    _tell_left_running(directory)


def _tell_left_running(home: Path) -> None:
    """Say how many trials run without a master, if any do."""
    from paceline.cli._master_process import count_running_attempts
    from paceline.cli._states import num_trials_text

    if num_trials := count_running_attempts(home):
        goes = "goes" if num_trials == 1 else "go"
        typer.echo(
            f"{num_trials_text(num_trials)} {goes} on without a master; the next `paceline up`"
            " takes over what was reported.",
            err=True,
        )


def status(json: Json = False) -> None:
    """Show whether a master runs, and its load."""
    import time

    from paceline.cli._connection import connect
    from paceline.cli._output import format_duration, print_facts, print_json
    from paceline.client import MasterUnreachableError, home_directory

    with connect() as client:
        try:
            info = client.master()
        except MasterUnreachableError:
            _tell_left_running(home_directory())
            raise
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
