"""Results of a search: its trials, the best of them, and a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.display import html_table
from paceline.masterless_search import TrialOutcome
from paceline.train._checkpoint import Checkpoint

_HEADER = ("trial", "state", "reports")


@dataclass(slots=True, kw_only=True)
class TrialResult(TrialOutcome):
    """One trial of a search.

    It has `number`, `config`, `run_dir`, `state`, `value`, `metrics`, `num_reports`, `time` and
    `error`; see `TrialOutcome`.
    """

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the trial; None if it has saved none."""
        try:
            return Checkpoint.from_path(self.run_dir)
        except FileNotFoundError:
            return None


class SearchResults(Sequence[TrialResult]):
    """The trials of a search, in the order of their creation.

    Args:
        trials: The trials.
        metric: The metric that was searched for.
        smaller_is_better: Whether smaller values of it are better.
        directory: The directory of the search.
    """

    def __init__(
        self,
        trials: Sequence[TrialResult],
        *,
        metric: str,
        smaller_is_better: bool,
        directory: Path,
    ) -> None:
        self._trials = list(trials)
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.directory = directory

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: Any) -> Any:
        return self._trials[index]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self._trials)

    @property
    def best_trial(self) -> TrialResult | None:
        """The trial with the best value of the metric; None if none has reported a finite one."""
        best = next(iter(self.ranked()), None)
        has_value = best is not None and best.value is not None and math.isfinite(best.value)
        return best if has_value else None

    @property
    def best_config(self) -> dict[str, Any] | None:
        """The config of the best trial."""
        best = self.best_trial
        return None if best is None else best.config

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the best trial."""
        best = self.best_trial
        return None if best is None else best.checkpoint

    def ranked(self) -> list[TrialResult]:
        """Return the trials, the best first, and those without a finite value last."""

        def key(trial: TrialResult) -> tuple[bool, float, int]:
            value = math.nan if trial.value is None else trial.value
            value = value if self.smaller_is_better else -value
            is_bad = not math.isfinite(value)
            return is_bad, 0.0 if is_bad else value, trial.number

        return sorted(self._trials, key=key)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain dictionary for each trial, such as a data frame takes."""
        return [
            {
                "trial": trial.number,
                "state": trial.state,
                "reports": trial.num_reports,
                self.metric: trial.value,
                **{f"config.{name}": value for name, value in trial.config.items()},
            }
            for trial in self._trials
        ]

    def __repr__(self) -> str:
        best = self.best_trial
        told = "no value yet"
        if best is not None:
            told = f"best {self.metric} {best.value:.6g} by trial {best.number}"
        return f"SearchResults({len(self)} trial(s), {told})"

    def __str__(self) -> str:
        """Return a table of the trials, the best first."""
        header, rows = self._cells()
        lines = [header, *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([repr(self), *(line.rstrip() for line in text)])

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return html_table(repr(self), *self._cells())

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        # What all trials have in common tells nothing.
        names = [
            name
            for name in dict.fromkeys(name for trial in self._trials for name in trial.config)
            if len({repr(trial.config.get(name)) for trial in self._trials}) > 1
        ]
        header = [*_HEADER, self.metric, *names]
        rows = [
            [
                str(trial.number),
                trial.state,
                str(trial.num_reports),
                "-" if trial.value is None else f"{trial.value:.6g}",
                *(_short(trial.config.get(name)) for name in names),
            ]
            for trial in self.ranked()
        ]
        return header, rows


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
