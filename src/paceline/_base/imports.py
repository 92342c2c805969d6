"""Imports by name: lazy names, entry points, optional libraries, and data frames by them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered_points(group: str, own: Mapping[str, str]) -> "dict[str, EntryPoint]":
    """Return the entry points of a group, by name.

    Args:
        group: The group.
        own: Where Paceline's own classes are, by name.
    """
    # Late import: it takes a fifth of a script's start, and most scripts need no entry points.
    from importlib.metadata import EntryPoint, entry_points

    points = [EntryPoint(name, place, group) for name, place in own.items()]
    return {point.name: point for point in [*points, *entry_points(group=group)]}


def class_named(name: str, group: str, own: Mapping[str, type], base: type, field: str) -> Any:
    """Return a class for the master by name: Paceline's own class, or a package's.

    Args:
        name: The name.
        group: The group of entry points in which packages offer such classes.
        own: Paceline's own ones, by name.
        base: The base class that the class must have.
        field: The name of the user's setting, for messages.

    Raises:
        TypeError: The package that offers it names something else.
        ValueError: Nobody offers one of this name.
    """
    if name in own:
        return own[name]
    offered = offered_points(group, {})
    if name not in offered:
        names = ", ".join(sorted(own.keys() | offered.keys()))
        raise ValueError(
            f"`{field}` must be {names}, but got {name!r}. Hint: install the package that offers"
            " it into the environment of the master."
        )
    return loaded_class(offered[name], base)


def loaded_class(point: "EntryPoint", base: type) -> Any:
    """Return the class named by an entry point.

    Raises:
        ImportError: It cannot be imported.
        TypeError: It is no class of this kind.
    """
    kind = point.load()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(
            f"The entry point {point.name!r} of {point.group!r} must be a class of"
            f" `{base.__name__}`, but {point.value} is {kind!r}."
        )
    return kind


def late_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: Its name.
        places: The module within the package that has each name.
    """

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return load


def show_public_errors(package: str, names: Mapping[str, Any]) -> None:
    """Name the exceptions of a public package by the package, not by their private modules.

    Tracebacks show this name, and pickled exceptions hold it: modules may move.

    Args:
        package: Its name.
        names: Its names with their values; exceptions defined elsewhere keep their module.
    """
    for value in names.values():
        if (
            isinstance(value, type)
            and issubclass(value, BaseException)
            and value.__module__.startswith(f"{package}._")
        ):
            value.__module__ = package


def required_library(module: str, user: str, install: str) -> ModuleType:
    """Return a module of another library.

    Args:
        module: The module.
        user: Who needs it, for the message.
        install: The requirement for pip.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        # Missing dependency of the library: its own error is the useful one.
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"`{user}` needs the package `{library}`, which is not installed. Hint: pip install"
            f" '{install}'"
        ) from error


_MOST_ROWS = 20
_LONGEST = 200


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in HTML; of many rows the first and the last ones.

    Args:
        title: The line above it.
        header: The names of the columns; none for a table of names and values.
        rows: The cells; a number is shown short.
    """
    shown = [[_text(cell) for cell in row] for row in rows]
    if len(shown) > _MOST_ROWS:
        num_left_out = len(shown) - _MOST_ROWS
        half = _MOST_ROWS // 2
        shown = [*shown[:half], [f"... {num_left_out} more ..."], *shown[-half:]]
    lines = [f"<div><b>{escape(title)}</b></div>"]
    if shown:
        lines.append("<table>")
        if header:
            lines.append(_row("th", [escape(name) for name in header]))
        lines += [_row("td", row) for row in shown]
        lines.append("</table>")
    return "\n".join(lines)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns of text, with a rule below the first one."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(map(str.ljust, row, widths)).rstrip() for row in (rows[0], rule, *rows[1:])
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _text(cell: Any) -> str:
    text = f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


class DataFrames:
    """Mixin of what has `rows`: the same rows as a data frame of pandas or Polars."""

    def rows(self) -> Any:
        """Return the rows, each a dictionary of its columns."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        return required_library("pandas", "to_pandas", "pandas").DataFrame(list(self.rows()))

    def to_polars(self) -> Any:
        """Return the rows as a Polars DataFrame.

        Raises:
            ImportError: Polars is not installed.
        """
        polars = required_library("polars", "to_polars", "polars")
        # All rows are looked at: a metric may come late, or be a whole number at first.
        return polars.DataFrame(list(self.rows()), infer_schema_length=None, strict=False)


class Rows(DataFrames, list[dict[str, Any]]):
    """List of rows that data frames are made of; a notebook shows it as a table.

    Args:
        title: What they are.
        rows: The rows; a missing column is empty.
    """

    def __init__(self, title: str, rows: Iterable[dict[str, Any]]) -> None:
        super().__init__(rows)
        self._title = title

    def rows(self) -> "Rows":
        """Return the rows, each a dictionary of its columns."""
        return self

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        cells = [[row.get(name, "") for name in names] for row in self]
        return html_table(f"{len(self)} {self._title}", names, cells)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names, such as "net.width"."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value and "$float" not in value:
            found.update(flatten(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def metric_rows(reports: Iterable[tuple[dict[str, Any], Mapping[str, Any]]]) -> list[Any]:
    """Return a row for each report: its place, then its metrics.

    Reports of the same place become one row, unless they have a metric in common.

    Args:
        reports: The place of each one, such as group and step, and its metrics.
    """
    rows: list[dict[str, Any]] = []
    place: dict[str, Any] = {}
    for now, metrics in reports:
        values = flatten(metrics)
        if rows and now == place and rows[-1].keys().isdisjoint(values):
            rows[-1] |= values
            continue
        place = now
        rows.append({**now, **values})
    return rows
