"""Journal of a search: all inputs in their order, from which every decision follows."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from paceline import core, faults
from paceline.journal import (
    JournalKey,
    RunDirectory,
    RunMetadataSet,
    SearchInputTaken,
    encode_metrics,
)
from paceline.search import Input, message_to_json

faults.register("train.search.input")


class SearchJournal:
    """Directory of a search, which is a run directory with the inputs of the search as its journal.

    Args:
        directory: The directory, for a new search or to go on in; a new one below
            ``./paceline_runs`` by default.
        setup: What the search is made with. An earlier search must have the same.
        seed: The seed of a new search; drawn by default.

    Raises:
        RuntimeError: Another process works on the search.
        ValueError: The directory has a search with another setup.
    """

    def __init__(self, directory: Path | None, setup: Mapping[str, Any], seed: int | None) -> None:
        self._lock = ExitStack()
        self._opened = opened = core.open_run(
            name=f"{core.run_name()}-search",
            directory=directory,
            seed=seed,
            hparams=setup["space"],
            is_resumable=False,
            lock=self._lock,
        )
        self._run = RunDirectory(opened.path)
        try:
            self._check_same(setup)
        except BaseException:
            self._lock.close()
            raise
        self._journal = core.begin_journal(self._run, opened)
        self._journal.append(RunMetadataSet(time=time.time(), metadata=dict(setup)))

    @property
    def path(self) -> Path:
        """The directory."""
        return self._opened.path

    @property
    def seed(self) -> int:
        """The seed of the search."""
        return self._opened.seed

    def earlier(self) -> Iterator[SearchInputTaken]:
        """Yield the inputs of earlier attempts."""
        for record in self._records():
            if isinstance(record, SearchInputTaken):
                yield record

    def add(self, given: Input, number: int = 0, metrics: Mapping[str, Any] | None = None) -> None:
        """Append an input; it counts even if this process is killed next."""
        self._journal.append(
            SearchInputTaken(
                time=time.time(),
                input=msgspec.json.decode(message_to_json(given)),
                number=number,
                metrics=None if metrics is None else encode_metrics(dict(metrics)),
            )
        )
        if faults.is_active():
            faults.reach("train.search.input")

    def close(self, error: BaseException | None) -> None:
        """Record the end."""
        # After Ctrl-C it can go on, as its trials can.
        is_interrupted = isinstance(error, KeyboardInterrupt)
        outcome = core.Outcome.PREEMPTED if is_interrupted else core.outcome_of(error)
        core.end_journal(self._journal, outcome, error)
        self._lock.close()

    def _records(self) -> Iterator[Any]:
        for attempt in range(self._opened.attempt):
            for entry in self._run.reader(JournalKey(attempt, 0, 0)):
                yield entry.decode()

    def _check_same(self, setup: Mapping[str, Any]) -> None:
        stored = next((r.metadata for r in self._records() if isinstance(r, RunMetadataSet)), None)
        if self._opened.attempt and stored is None:
            raise ValueError(
                f"`directory` must be new or that of a search, but {str(self.path)!r} has another"
                " run."
            )
        for name, value in setup.items():
            if stored is not None and stored.get(name) != value:
                raise ValueError(
                    f"A search must go on with the same `{name}`, which is {stored.get(name)!r} in"
                    f" {str(self.path)!r}, but got {value!r}. Hint: another `directory` for a new"
                    " search."
                )
