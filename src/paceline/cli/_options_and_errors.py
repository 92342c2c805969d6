"""Classes of commands, shared options and completions, client of the master, errors for users."""

import functools
import inspect
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from paceline._base.arguments_and_errors import wrong_value_text
from paceline._base.files import DamagedSecretError, read_secret

if TYPE_CHECKING:
    from paceline.client._checkpoint import Checkpoint
    from paceline.client._client import Client


_TIMEOUT_S = 0.5
_MOST = 100
# Trials and checkpoints of older experiments would take a request for each.
_NUM_EXPERIMENTS = 5

Suggestions = list[tuple[str, str]]


def complete_experiment(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest numbers of experiments, with their names."""
    rows = _rows(ctx, "experiments", limit=_MOST)
    return _suggestions(((one["id"], one["name"]) for one in rows), incomplete)


def complete_trial(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest numbers of trials of the newest experiments, with their states."""
    rows = _rows_of_newest(ctx, "trials")
    texts = ((one["id"], f"{one['shown_state']}, {name}") for name, one in rows)
    return _suggestions(texts, incomplete)


def complete_checkpoint(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest UUIDs of checkpoints of the newest experiments, with their batches."""
    rows = _rows_of_newest(ctx, "checkpoints")
    texts = ((one["uuid"], f"batch {one['steps_completed']}, {name}") for name, one in rows)
    return _suggestions(texts, incomplete)


def complete_node(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of nodes, with their states."""
    rows = _rows(ctx, "nodes", include_local=True)
    return _suggestions(((one["name"], one["state"]) for one in rows), incomplete)


def complete_pool(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of pools, with their policies."""
    rows = _rows(ctx, "pools")
    return _suggestions(((one["name"], one["policy"]) for one in rows), incomplete)


def complete_token(ctx: typer.Context, incomplete: str) -> Suggestions:
    """Suggest names of valid tokens, with their scopes."""
    rows = [one for one in _rows(ctx, "tokens") if one["revoked_at"] is None]
    return _suggestions(((one["name"], one["scope"]) for one in rows), incomplete)


def complete_run(incomplete: str) -> Suggestions:
    """Suggest names of runs in ./paceline_runs."""
    names = sorted(path.parent.name for path in Path("paceline_runs").glob("*/run.json"))
    texts = [(name, "") for name in names[-_MOST:]]
    return _suggestions([*texts, *([("last", "the newest")] if texts else [])], incomplete)


def _suggestions(texts: Any, incomplete: str) -> Suggestions:
    return [(str(word), help) for word, help in texts if str(word).startswith(incomplete)]


def _rows_of_newest(ctx: typer.Context, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the experiment's name and the row, for the rows below the newest experiments."""
    for experiment in _rows(ctx, "experiments", limit=_NUM_EXPERIMENTS):
        for row in _rows(ctx, f"experiments/{experiment['id']}/{kind}", limit=_MOST):
            yield experiment["name"], row


def _rows(ctx: typer.Context, path: str, **params: Any) -> list[dict[str, Any]]:
    """Return the rows of a list of the master; none if it does not answer in time."""
    from paceline.client._http_session import HttpSession

    try:
        with HttpSession(ctx.find_root().params.get("master")) as session:
            answer = session.http().get(path, params=params, timeout=_TIMEOUT_S).json()
            return list(answer["items"] if isinstance(answer, dict) else answer)
    except Exception:
        # Whatever is wrong, a shell that waits for suggestions has no place for a message.
        return []


_COMMON = {0: "success", 1: "an error", 2: "wrong usage", 130: "interrupted"}
_FOLLOWED = {
    0: "COMPLETED",
    1: "another end, or an error",
    3: "COMPLETED, but records are lost",
    4: "no finite value of the searched metric",
    130: "interrupted; the experiment continues",
}
_EXIT_CODES: dict[str, dict[int, str]] = {
    "experiment wait": _FOLLOWED | {124: "not ended within --timeout"},
    "run": {0: "the script ended with 0", 1: "an error; other codes are the script's"},
    "doctor": {1: "a problem was found, or an error"},
    "verify-resume": {
        1: "the runs differ",
        2: "no verdict, or wrong usage",
        3: "not supported: the command does not resume",
        4: "nothing resumable: no checkpoint was stored",
    },
    "restore": {3: "restored, but files of the backup are damaged"},
    "home check": {1: "differences are left, or an error"},
}
# With `-f` these commands end as the experiment does.
_FOLLOWING = {f"experiment {name}" for name in ("create", "continue", "fork", "logs")}
_FOLLOWING |= {"trial continue"}
_WORDS = {"e": "experiment", "t": "trial", "c": "checkpoint", "s": "slot"}
_WORDS |= {"lt": "list-trials", "lc": "list-checkpoints"}


@cache
def command_examples() -> dict[str, list[str]]:
    """Return the examples of each command, by its full name without `paceline`."""
    text = Path(__file__).with_name("_command_examples.txt").read_text(encoding="utf-8")
    rows = (line.split(": ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: examples.split("; ") for name, examples in rows}


def help_ending(command_path: str) -> str:
    """Return two examples and the exit codes of a command or a group, as lines for its help."""
    path = " ".join(_WORDS.get(word, word) for word in command_path.split()[1:])
    prefix = f"{path} " if path else ""
    below = [each for name, each in command_examples().items() if name.startswith(prefix)]
    # A group shows an example of each of its first two commands.
    of_group = [example for place in zip(*below, strict=True) for example in place]
    shown = command_examples().get(path) or of_group[:2]
    lines = ["", "Examples:", *(f"  paceline {example}" for example in shown), ""]
    codes = _COMMON | _EXIT_CODES.get(path, {})
    for title, group in (("Exit codes", codes), ("Exit codes with -f", _FOLLOWED)):
        if group is codes or path in _FOLLOWING:
            lines += [f"{title}:", *(f"  {code:<4} {group[code]}" for code in sorted(group))]
    if not path:
        skill = Path(__file__).parents[1] / ".agents" / "skills" / "paceline" / "SKILL.md"
        lines += ["", f"For agents: read {skill}"]
    return "\n".join(lines) + "\n"


Function = TypeVar("Function", bound=Callable[..., Any])

_ListFormat = Annotated[
    Literal["table", "json", "tsv"],
    typer.Option("--format", help="Format of the list; `tsv` has whole values, tabs escaped."),
]
_Fields = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help="Print JSON with these fields only."),
]


class PipeClosedError(Exception):
    """Raised when the reader of a command's output has closed its pipe."""


@contextmanager
def _telling_closed_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        # Typer would end the command as failed.
        raise PipeClosedError from error


class _Help:
    """Part of a command: its help and its messages about wrong values."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write two examples and the exit codes."""

        formatter.write(help_ending(ctx.command_path))

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the arguments, or print the help."""
        with _telling_closed_pipe():
            return super().make_context(*args, **options)  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the message about a wrong value is the command line's own."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except typer.BadParameter as error:
            cause: Any = error.__cause__
            if hasattr(cause, "errors"):
                text = wrong_value_text(cause.errors()[0]).removeprefix("is wrong: ")
                error.message = f"{text}."
            raise


class HelpCommand(_Help, TyperCommand):
    """Command whose help ends with examples and exit codes."""


class HelpGroup(_Help, TyperGroup):
    """Group of commands whose help ends with examples and exit codes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write whole first sentences, where click cuts them; groups follow the commands."""
        shown = [one for one in self.commands.values() if not one.hidden]
        for title, is_group in (("Commands", False), ("Groups of commands", True)):
            rows = [
                (str(one.name), one.get_short_help_str(limit=1000))
                for one in shown
                if hasattr(one, "commands") == is_group
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class CommandGroup(typer.Typer):
    """Group whose commands all have `--json`, and its lists also `--format` and `--fields`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=HelpGroup, rich_markup_mode=None, **{"no_args_is_help": True} | settings
        )

    def command(
        self,
        name: str | None = None,
        *,
        is_list: bool = False,
        has_fields: bool | Callable[[], Collection[str]] = False,
        **settings: Any,
    ) -> Callable[[Function], Function]:
        """Return a decorator that adds a function as a command.

        Args:
            name: Name of the command. The default is the function's name.
            is_list: Whether the command prints a list by `print_list`.
            has_fields: Whether it has `--fields` as lists do, for the one object that it prints. A
                function returns their names, which are checked before anything is changed.
            settings: Settings of Typer.
        """
        add = super().command(name, cls=HelpCommand, **settings)

        def decorate(function: Function) -> Function:
            add(_with_formats(function, is_list=is_list, has_fields=has_fields or is_list))
            return function

        return decorate


def _with_formats(
    function: Callable[..., Any], *, is_list: bool, has_fields: bool | Callable[[], Collection[str]]
) -> Callable[..., None]:
    """Return a command function with the options for its format that the function itself lacks."""
    own = inspect.signature(function, eval_str=True)
    options: dict[str, Any] = {} if "json" in own.parameters else {"json": (Json, False)}
    options |= {"format": (_ListFormat, "table")} if is_list else {}
    options |= {"fields": (_Fields, None)} if has_fields else {}

    @functools.wraps(function)
    def command(**values: Any) -> None:
        fields = values.get("fields")
        chosen_fields.set(None if fields is None else fields.split(","))
        # A dry run changes nothing, and prints something else.
        if fields is not None and callable(has_fields) and not values.get("dry_run"):
            check_fields(fields.split(","), has_fields())
        if fields is not None and values.get("format") == "tsv":
            raise typer.BadParameter("must come without `--format tsv`.", param_hint="--fields")
        values["json"] = values["json"] or fields is not None
        output_format.set("json" if values["json"] else values["format"] if is_list else "table")
        with _telling_closed_pipe():
            function(**{name: value for name, value in values.items() if name in own.parameters})
            sys.stdout.flush()

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]
    parameters = [*own.parameters.values(), *added]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    kinds = {name: kind for name, (kind, _) in options.items()}
    command.__annotations__ = get_type_hints(function, include_extras=True) | kinds
    return command


ExperimentId = Annotated[
    int,
    typer.Argument(
        help="Number of the experiment.", metavar="ID", autocompletion=complete_experiment
    ),
]
TrialId = Annotated[
    int,
    typer.Argument(help="Number of the trial.", metavar="ID", autocompletion=complete_trial),
]
Uuid = Annotated[
    str,
    typer.Argument(
        help="UUID of the checkpoint or its beginning.",
        metavar="UUID",
        autocompletion=complete_checkpoint,
    ),
]
AllLogs = Annotated[
    bool, typer.Option("--logs", help="With -f: print all output of a search's trials.")
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON only, one object per line.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check and print the effect, but change nothing.")
]
RequestKey = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="TEXT",
        help="Key of your own, such as a job's name. If you repeat the command with the same key"
        " within a day, the experiment of the first time is returned.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N entries.")]
QueryText = Annotated[
    str | None,
    typer.Option(
        "--query",
        "--where",
        metavar="QUERY",
        help='Show only what a query describes, such as "lr < 0.01 and tag:baseline".',
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option("--config", metavar="KEY=VALUE", help="Set a field of the config. Repeatable."),
]
Limits = Annotated[
    list[str],
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="Set a limit of the search, such as max_slot_hours=12; null removes it. Repeatable.",
    ),
]
ConfigFile = Annotated[
    Path, typer.Argument(help="Config file of the experiment.", metavar="CONFIG")
]
ChangedCode = Annotated[
    Path | None,
    typer.Argument(
        help="Directory of changed code. The default is the code as it is.", metavar="DIR"
    ),
]
Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Follow it to its end. Ctrl-C ends only this command."),
]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail", min=1, metavar="N", help="Print the last N lines; with -f, also new lines."
    ),
]
Rank = Annotated[
    int | None, typer.Option("--rank", min=0, metavar="N", help="Print only lines of rank N.")
]
Level = Annotated[
    Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None,
    typer.Option("--level", case_sensitive=False, help="Print only lines of this level or higher."),
]
Stream = Annotated[
    Literal["stdout", "stderr", "master"] | None,
    typer.Option(
        "--stream",
        case_sensitive=False,
        help="Print only this stream of the trial, or the notes of the master.",
    ),
]
Search = Annotated[
    str | None, typer.Option("--search", metavar="TEXT", help="Print only lines with this text.")
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern", metavar="REGEX", help="Print only lines with this regular expression (RE2)."
    ),
]
Timestamps = Annotated[
    bool, typer.Option("--timestamps", "-t", help="Print the time of each line.")
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="File with trusted CA certificates (PEM). The default is"
        " $PACELINE_CA_FILE, or else what the system trusts.",
    ),
]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Home of the master. The default is $PACELINE_HOME, or else ~/.paceline.",
    ),
]


def home_of(home: Path | None) -> Path:
    """Return the home named by an option, or the default home, as an absolute path."""
    from paceline.client._http_session import home_directory

    return home_directory() if home is None else home.expanduser().absolute()


# Set by `--json` and `--format`, before the command runs.
output_format: ContextVar[Literal["table", "json", "tsv"]] = ContextVar(
    "output_format", default="table"
)
# Set by `--fields`.
chosen_fields: ContextVar[list[str] | None] = ContextVar("chosen_fields", default=None)


def is_json() -> bool:
    """Return whether standard output is for a JSON document alone."""
    return output_format.get() == "json"


def is_agent() -> bool:
    """Return whether an agent, and no person, reads what the commands print."""
    return any(os.environ.get(name) for name in ("PACELINE_AGENT", "AI_AGENT"))


# Set by the `--master` option, before the command runs.
chosen_master: ContextVar[str | None] = ContextVar("chosen_master", default=None)


def trust(ca_file: Path) -> None:
    """Trust the certificate authorities in a file, in this process and its children."""
    from paceline._base.certificates import CA_FILE_VARIABLE

    os.environ[CA_FILE_VARIABLE] = str(ca_file.expanduser().absolute())


@contextmanager
def connect() -> "Iterator[Client]":
    """Yield a client of the master named by the options or the environment."""
    from paceline.client._client import Client

    with Client(chosen_master.get()) as client:
        yield client


# Shorter ones fit too many checkpoints by chance.
SHORTEST_PREFIX = 4


def checkpoint_by_prefix(client: "Client", text: str) -> "Checkpoint":
    """Return the checkpoint whose UUID is, or alone begins with, a text.

    Raises:
        ApiError: There is no such checkpoint.
        CommandError: The text is the beginning of several.
    """
    found = client.find_checkpoints(text) if len(text) >= SHORTEST_PREFIX else []
    exact = [one for one in found if one.uuid == text]
    if len(found) > 1 and not exact:
        uuids = [f"{one.uuid} (trial {one.data.trial_id})" for one in found]
        raise CommandError(f"`UUID` must fit one checkpoint, but {text!r} fits {', '.join(uuids)}.")
    return (exact or found)[0] if found else client.get_checkpoint(text)


def nested_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return changes like `searcher.max_length=5` as nested fields.

    Raises:
        ConfigError: A change is not of the form `key=value`.
    """
    from paceline.config._read_yaml import apply_overrides

    return apply_overrides({}, overrides)


# By name: to import all of their modules would slow every command down.
_USER_ERRORS = frozenset(
    f"paceline.{name}"
    for name in (
        "_base.journal_reading_and_writing.JournalVersionError",
        "_base.run_directory.NotARunDirectoryError",
        "_base.run_directory.RunVersionError",
        "_cluster.master.home_directory.HomeInUseError",
        "_cluster.master.home_directory.HomeUnusableError",
        "_cluster.master.home_directory.LostDatabaseError",
        "_cluster.master.server.PortInUseError",
        "_cluster.master.store.database.DatabaseVersionError",
        "_cluster.master.upkeep.backup_directories.BackupError",
        "_cluster.runner.attempt_directory.SecretFileError",
        "_cluster.runner.node_runner.NodeStoppedError",
        "client.ClientError",
        "config.ConfigError",
        "core.NotOfferedError",
        "search.SpaceError",
        "search.SearchMethodError",
        "storage.CheckpointError",
        "storage.CheckpointMismatchError",
    )
)


class CommandError(Exception):
    """Raised when a command cannot do the requested work."""


def is_cli_user_error(error: BaseException) -> bool:
    """Return whether an error is for the user to fix, so only its text is shown."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return isinstance(error, CommandError) or not kinds.isdisjoint(_USER_ERRORS)


def error_code(error: BaseException) -> str:
    """Return the stable code of an error, for programs: the master's, or one from its class."""
    name = type(error).__name__.removesuffix("Error")
    return str(getattr(error, "code", None) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Ask on a terminal whether to continue, unless `--yes` was given.

    Raises:
        CommandError: There is no terminal.
        typer.Abort: The answer is no.
    """
    if is_confirmed:
        return
    if is_agent() or not sys.stdin.isatty():
        where = "by an agent" if is_agent() else "without a terminal"
        raise CommandError(
            f"`--yes` must be given to confirm {where}: {question} Hint: add `--yes`."
        )
    typer.confirm(question, abort=True, err=True)


def report_error(message: str, code: str = "command") -> None:
    """Print an error to stderr: the problem in red, the hint below; with `--json`, one JSON line.

    Args:
        message: The problem, and the hint behind `Hint:`.
        code: Code of the error for programs.
    """
    from rich.text import Text

    from paceline.cli._console_output import error_console, print_json_line

    lines = [line.partition("Hint:") for line in message.strip().splitlines()]
    parts = [(problem.strip(), hint.strip()) for problem, _, hint in lines]
    if is_json():
        problems, hints = ("\n".join(filter(None, texts)) for texts in zip(*parts, strict=True))
        error = {"code": code, "message": problems, "hint": hints or None}
        print_json_line(error, sys.stderr)
        return
    console = error_console()
    for problem, hint in parts:
        if problem:
            text = Text("Error: ", style="bold red").append(problem, style="not bold red")
            console.print(text, soft_wrap=True)
        if hint:
            text = Text("Hint: ", style="bold").append(hint, style="not bold")
            console.print(text, soft_wrap=True)


# Spelled out, as the client takes long to load.
_TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret
# Set by the `paceline` command: a program that calls one of its functions must not be restarted.
is_paceline_command: ContextVar[bool] = ContextVar("is_paceline_command", default=False)


def restart_without_token() -> None:
    """Restart this process without the user's token if the environment has a token.

    The process keeps its id, its arguments and its open files. Call this before any other work.
    """
    if not os.environ.get(_TOKEN_VARIABLE) or not _can_restart():
        return
    del os.environ[_TOKEN_VARIABLE]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell


def _can_restart() -> bool:
    """Return whether the arguments of this process belong to the command."""
    arguments = sys.argv[1:]
    first = len(sys.orig_argv) - len(arguments)
    return is_paceline_command.get() and sys.orig_argv[first:] == arguments


def check_token_file(path: Path) -> None:
    """Refuse a token file unless only its owner may read the token in the file."""
    try:
        mode = path.expanduser().stat().st_mode
        token = read_secret(path.expanduser())
    except OSError as error:
        raise CommandError(
            f"`--token-file` must be a file with a token, but {str(path)!r} cannot be read"
            f" ({error.strerror})."
        ) from error
    except DamagedSecretError as error:
        raise CommandError(f"{error} Hint: copy the token there again.") from error
    if not token:
        raise CommandError(
            f"`--token-file` must be a file with a token, but {str(path)!r} is empty. Hint:"
            " `paceline token create NAME --scope runner` makes one on the machine of the master."
        )
    if stat.S_IMODE(mode) & 0o077:
        raise CommandError(
            f"`--token-file` must be a file that only its owner may read, but {str(path)!r} has"
            f" mode {stat.S_IMODE(mode):04o}. Hint: chmod 600 {path}"
        )


def check_fields(fields: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of `--fields` that an object does not have."""
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise CommandError(
            f"`--fields` must name fields that there are ({', '.join(sorted(known))}), but got"
            f" {unknown[0]!r}."
        )
