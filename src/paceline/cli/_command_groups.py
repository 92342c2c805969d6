"""Groups of commands: their help, and the options for formats."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from paceline._base.arguments_and_errors import wrong_value_text
from paceline.cli._options import Json, check_fields, chosen_fields, output_format

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
