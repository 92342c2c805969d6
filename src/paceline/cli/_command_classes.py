"""Classes of commands: output for programs, helps that end with examples, plain messages."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from paceline._base.arguments_and_errors import wrong_value_text
from paceline.cli._options_and_errors import Json, output_format

Function = TypeVar("Function", bound=Callable[..., Any])

_ListFormat = Annotated[
    Literal["table", "json", "tsv"],
    typer.Option("--format", help="Format of the list; `tsv` has whole values, tabs escaped."),
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
        from paceline.cli._command_examples import help_ending

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
    """Group whose commands all have `--json`, and its lists also `--format`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=HelpGroup, rich_markup_mode=None, **{"no_args_is_help": True} | settings
        )

    def command(
        self, name: str | None = None, *, is_list: bool = False, **settings: Any
    ) -> Callable[[Function], Function]:
        """Return a decorator that adds a function as a command.

        Args:
            name: Name of the command. The default is the function's name.
            is_list: Whether the command prints a list by `print_list`.
            settings: Settings of Typer.
        """
        add = super().command(name, cls=HelpCommand, **settings)

        def decorate(function: Function) -> Function:
            add(_with_formats(function, is_list=is_list))
            return function

        return decorate


def _with_formats(function: Callable[..., Any], *, is_list: bool) -> Callable[..., None]:
    """Return a command function with the options for its format that the function itself lacks."""
    own = inspect.signature(function, eval_str=True)
    options: dict[str, Any] = {} if "json" in own.parameters else {"json": (Json, False)}
    if is_list:
        options["format"] = (_ListFormat, "table")

    @functools.wraps(function)
    def command(**values: Any) -> None:
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
