"""Rows for data frames and notebooks: pandas and Polars are imported when they are asked for."""

from collections.abc import Iterable, Mapping
from typing import Any

from paceline._base.imports import required_library
from paceline._base.notebook_tables import html_table


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
