"""`paceline up`, `down` and `status`: the master."""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.process_and_network import LOOPBACK, listening_address
from paceline._base.progress_display import format_duration
from paceline.cli import _console_output as console
from paceline.cli._commands.slot_queue_and_quota_commands import slots_text
from paceline.cli._connection import connect, restart_without_token
from paceline.cli._errors import CommandError
from paceline.cli._options import Home, Json, home_of

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import MasterStatus
    from paceline.client._http_session import MasterFile

_FILE_POLL_S = 0.05
_DEFAULT_PORT = 8080
_DRAIN_S = 30
_THREADS_END_S = 2.0


def up(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = LOOPBACK,
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
            min=0,
            metavar="N",
            help="Number of slots of this machine. The default is one per GPU, or else one per CPU"
            " core. With 0, trials run on other nodes only.",
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
            help="Executor that starts attempts: `local`, or an executor of an installed package.",
        ),
    ] = "local",
    runner_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A runner that is silent for this time is killed. Its trial continues from the"
            " latest checkpoint. The default is 60.",
        ),
    ] = None,
    slow_request: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Requests that take longer are logged in `master.log` as slow. The default is 1.",
        ),
    ] = None,
    unencrypted: Annotated[
        bool,
        typer.Option(
            "--unencrypted",
            help="Allow a `--host` beyond loopback without `--tls-cert`. Tokens, code and secrets"
            " are sent unencrypted, so only in a network that you trust.",
        ),
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate of the master (PEM) with its chain. All requests are encrypted.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key of the certificate, without a passphrase."),
    ] = None,
    pool_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Pools whose runners the master starts. The default is pools.yaml in the home.",
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Start the master, in the foreground or in the background."""

    directory = home_of(home)
    runs, tls_cert, tls_key, pool_file = (
        path and path.expanduser().absolute() for path in (runs, tls_cert, tls_key, pool_file)
    )
    _warn_of_no_runs(runs)
    if detach:
        arguments = {"port": port, "slots": slots, "runs": runs, "executor": executor,
                     "runner-timeout": runner_timeout, "slow-request": slow_request,
                     "tls-cert": tls_cert, "tls-key": tls_key, "pool-file": pool_file}  # fmt: skip
        flags = {"set-aside": set_aside, "unencrypted": unencrypted}
        _up_in_background(directory, host, port, arguments, flags)
        return
    restart_without_token()
    serve = _load_serve()
    try:
        with _master_announced(directory), _interrupt_told(directory):
            serve(
                directory,
                host,
                _DEFAULT_PORT if port is None else port,
                slots,
                runs=runs,
                set_aside=set_aside,
                executor=executor,
                unencrypted=unencrypted,
                tls_cert=tls_cert,
                tls_key=tls_key,
                pool_file=pool_file,
                **({} if runner_timeout is None else {"runner_timeout_s": runner_timeout}),
                **({} if slow_request is None else {"slow_request_s": slow_request}),
            )
    except (TypeError, ValueError) as error:
        # The host, the number of slots, the runs and the executor are checked where they are used.
        raise CommandError(str(error)) from error
    _leave_hanging_threads()


def _leave_hanging_threads() -> None:
    """End this process after its master without waiting for hanging threads."""
    deadline = time.monotonic() + _THREADS_END_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                # `os._exit` writes no buffers.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)


def _load_serve() -> Callable[..., None]:
    """Import the master, a slow import, and return its entry function."""
    # Modules stay loaded: to look for garbage among them would take a third of their loading.
    gc.disable()
    from paceline._cluster.master.server import serve

    gc.freeze()
    gc.enable()
    return serve


def _warn_of_no_runs(directory: Path | None) -> None:
    """Say so if a directory of runs shows nothing yet; it may be made later."""
    shown = ("run.json", "*/run.json", "*tfevents*", "*/*tfevents*", "*/*/*tfevents*")
    if directory is None or any(any(directory.glob(pattern)) for pattern in shown):
        return
    below = next((path.parents[1] for path in directory.glob("*/*/run.json")), None)
    hint = f" Hint: `--runs {below}` shows runs." if below else ""
    console.print_warning(
        f"`--runs {directory}` shows nothing yet: no run or TensorBoard log is in it.{hint}"
    )


def _up_in_background(
    home: Path, host: str, port: int | None, options: dict[str, Any], flags: dict[str, bool]
) -> None:
    """Start a master with options by name; a None value leaves the default to the master."""
    from paceline.cli._master_process import running_master, start_detached

    if (file := running_master(home)) is not None:
        if differences := _differences_from_running(file, host, port, options):
            raise CommandError(
                f"The home {str(home)!r} must have no master to start one {differences[0]}, but one"
                f" runs at {file.shown_url}. Hint: stop it with `paceline down` (`--keep-trials`"
                " lets trials continue), or choose another `--home`."
            )
        text = f"A master runs already at {file.shown_url} (process {file.pid})."
        _print_master(home, file, text, is_new=False)
        if port == 0:
            console.print_note(f"`--port 0` has no effect on it: it stays on port {file.port}.")
        return
    arguments = ["--host", host]
    for name, value in options.items():
        arguments += [] if value is None else [f"--{name}", str(value)]
    arguments += [f"--{name}" for name, is_set in flags.items() if is_set]
    file = start_detached(home, arguments)
    text = f"The master runs at {file.shown_url} (process {file.pid}, home {home})."
    _print_master(home, file, text, is_new=True)
    console.print_note("Stop it with `paceline down`.")


def _differences_from_running(
    file: "MasterFile", host: str, port: int | None, options: dict[str, Any]
) -> list[str]:
    """Return the requested settings missing in the running master, as texts for the message."""
    address = listening_address(host)
    has_address = address in (LOOPBACK, listening_address(file.host))
    wanted = {
        f"on port {port}": port and port != file.port,
        f"on {host}": not has_address,
        "with a certificate": options["tls-cert"] and file.certificate is None,
    }
    return [text for text, is_missing in wanted.items() if is_missing]


@contextmanager
def _master_announced(home: Path) -> Iterator[None]:
    """Print the master's address as soon as the master listens within the block."""
    stop = threading.Event()
    announcer = _daemon_thread(_announce_master, home, stop)
    announcer.start()
    try:
        yield
    finally:
        stop.set()
        announcer.join()


def _daemon_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    """Return a thread that prints in the format of this command."""
    # Values of context variables do not reach a new thread by themselves.
    run = copy_context().run
    return threading.Thread(target=run, args=(target, *arguments), daemon=True)


def _announce_master(home: Path, stop: threading.Event) -> None:
    """Print the master's address once the master listens."""
    from paceline.client._http_session import read_master_file

    while not stop.wait(_FILE_POLL_S):
        file = read_master_file(home)
        # The file may be an earlier master's.
        if file is not None and file.pid == os.getpid():
            text = f"The master runs at {file.shown_url} (home {home}). Ctrl-C stops it."
            if _writes_to_log(home):
                typer.echo(text)
            else:
                _print_master(home, file, text, is_new=True)
                sys.stdout.flush()
            return


def _writes_to_log(home: Path) -> bool:
    """Return whether stdout is the home's log: logs may be shown to others, sign-in links not."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), (home / "master.log").stat())
    except (OSError, ValueError):
        return False


def _print_master(home: Path, file: "MasterFile", text: str, *, is_new: bool) -> None:
    """Print where a master runs, and a link to sign a browser in, usable once."""
    from paceline.cli._master_process import NO_WEB_UI, sign_in_link
    from paceline.client._client import Client
    from paceline.client._http_session import ClientError, read_token

    link = None
    try:
        with Client(file.url, read_token(home)) as client:
            has_web_ui = client.master().has_web_ui
            link = sign_in_link(client, file) if has_web_ui else None
            text += f"\nSign in: {link}" if has_web_ui else f"\n{NO_WEB_UI}"
    except ClientError as error:
        typer.echo(f"No sign-in link could be made: {error}", err=True)
    facts = {"url": file.shown_url, "pid": file.pid, "home": str(home), "is_new": is_new}
    console.print_answer(facts | {"sign_in_url": link}, text)


@contextmanager
def _interrupt_told(home: Path) -> Iterator[None]:
    """Print at the first Ctrl-C why the master still waits; the master handles the signal."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Wakeup descriptor instead of a handler: the handlers belong to the master.
    old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    teller = _daemon_thread(_tell_interrupt, reader, home)
    teller.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        writer.close()
        teller.join()
        reader.close()


def _tell_interrupt(signals: socket.socket, home: Path) -> None:
    from paceline.cli._master_process import count_running_trials
    from paceline.client._http_session import read_master_file

    while received := signals.recv(1):
        if received[0] not in (signal.SIGINT, signal.SIGTERM):
            continue
        file = read_master_file(home)
        if file is None or file.pid != os.getpid():
            return
        if num_trials := count_running_trials(file, home):
            gets = "gets" if num_trials == 1 else "get"
            console.print_note(
                f"\nStopping: {console.num_trials_text(num_trials)} {gets} up to {_DRAIN_S} s to"
                " store checkpoints and will go on at the next `paceline up`. Ctrl-C again leaves"
                " what runs running."
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
    from paceline.cli._master_process import count_running_trials, is_alive, shut_down
    from paceline.client._http_session import read_master_file

    directory = home_of(home)
    file = read_master_file(directory)
    if file is None or not is_alive(file.pid):
        facts = {"home": str(directory), "url": None, "was_running": False}
        console.print_answer(facts, f"No master runs in {directory}.")
        _tell_left_running(directory)
        return
    num_trials = count_running_trials(file, directory)
    # A master whose database was deleted can ask no trial for a checkpoint; trials continue without
    # it.
    if num_trials and not keep_trials and (directory / "master.sqlite").exists():
        gets = "gets" if num_trials == 1 else "get"
        console.print_note(
            f"Stopping: {console.num_trials_text(num_trials)} {gets} up to {timeout:g} s to store"
            " checkpoints and will go on at the next `paceline up`."
        )
    shut_down(file, directory, keep_trials=keep_trials, timeout_s=timeout)
    facts = {"home": str(directory), "url": file.shown_url, "was_running": True}
    console.print_answer(facts, f"Stopped the master at {file.shown_url}.")
    # Nobody can be asked about other nodes any more.
    _tell_left_running(directory, num_trials if keep_trials else None)


def _tell_left_running(home: Path, num_trials: int | None = None) -> None:
    """Print the number of trials running without a master, by default on this machine."""
    from paceline.cli._master_process import count_running_attempts

    if num_trials is None:
        num_trials = count_running_attempts(home)
    if num_trials:
        goes = "goes" if num_trials == 1 else "go"
        typer.echo(
            f"{console.num_trials_text(num_trials)} {goes} on without a master; the next `paceline"
            " up` takes over what was reported.",
            err=True,
        )


def status(json: Json = False) -> None:
    """Show whether a master runs, its load, its sizes and its problems."""
    from paceline.client._http_session import MasterUnreachableError, home_directory

    with connect() as client:
        try:
            info = client.status()
        except MasterUnreachableError:
            _tell_left_running(home_directory())
            raise
        url = client.url
    if json:
        console.print_json({"url": url, **info.model_dump(mode="json")})
        return
    facts = [
        ("Master", url),
        ("Version", info.version),
        ("Home", info.home),
        ("Running for", format_duration(time.time() - info.started_at)),
        ("Slots", slots_text(info, info.num_slots, verb=" in use")),
        ("Active experiments", info.num_active_experiments),
    ]
    console.print_facts([*facts, *_status_facts(info)])


def _status_facts(info: "MasterStatus") -> list[tuple[str, Any]]:
    """Return the status facts of a master with status support; earlier releases have none."""

    def by_state(numbers: dict[str, int]) -> str:
        parts = [f"{number:,} {state.lower()}" for state, number in sorted(numbers.items())]
        return ", ".join(parts) or "none"

    lag = info.ingest_lag_s
    sizes = [
        f"{name.replace('_', ' ')} {console.format_bytes(n)}"
        for name, n in sorted(info.sizes.items())
    ]
    return [
        ("Waiting trials", info.num_waiting),
        ("Experiments", by_state(info.experiments)),
        ("Trials", by_state(info.trials)),
        ("Attempts", by_state(info.attempts)),
        ("Checkpoints", f"{info.num_checkpoints:,}, {console.format_bytes(info.checkpoint_bytes)}"),
        ("Metric points", f"{info.num_metric_points:,}"),
        ("Newest records", "none yet" if lag is None else f"stored {lag:.1f} s after the report"),
        ("Requests", f"{info.num_requests:,}, {info.num_slow_requests:,} slow"),
        ("Connections", info.num_connections),
        ("Memory", console.format_bytes(info.memory_bytes)),
        ("Disk", f"{', '.join(sizes)}; {console.format_bytes(info.free_bytes)} free"),
        ("Users", f"{info.num_users}, you are {info.user}{', an administrator' * info.is_admin}"),
        *([("Sign-in by OIDC", info.oidc_issuer)] if info.oidc_issuer else ()),
        ("Problems", "\n".join(info.problems) or "none"),
    ]
