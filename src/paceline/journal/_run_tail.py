"""Following all journals of a run directory."""

from collections.abc import Mapping

from paceline.journal._reader import Entry, JournalReader
from paceline.journal._run_directory import JournalKey, RunDirectory


class RunTail:
    """Read what a run's ranks have written since the last call, in the order of its attempts.

    Args:
        run: The run directory; it may still be written to.
        marks: The sequence number to go on after, for journals that were read before.
    """

    def __init__(self, run: RunDirectory, marks: Mapping[JournalKey, int]) -> None:
        self._run = run
        self._marks = marks
        self._readers: dict[JournalKey, JournalReader] = {}
        self._finished: set[JournalKey] = set()

    def read(self, max_entries: int = 1000) -> list[tuple[JournalKey, list[Entry]]]:
        """Return the next entries, at most `max_entries` in all; fewer mean that these are all.

        An attempt's entries come only after all of the earlier attempts'.

        Raises:
            JournalVersionError: A journal was written in another format version.
        """
        found: list[tuple[JournalKey, list[Entry]]] = []
        keys = [key for key in self._run.journal_keys() if key not in self._finished]
        for key in keys:
            if max_entries == 0:
                break
            entries = self._reader(key).read(max_entries)
            if entries:
                found.append((key, entries))
                max_entries -= len(entries)
            elif (key.attempt, key.generation) < (keys[-1].attempt, keys[-1].generation):
                # Attempts follow each other, so this one will write no more.
                self._finished.add(key)
                self._readers.pop(key, None)
        return found

    def _reader(self, key: JournalKey) -> JournalReader:
        if key not in self._readers:
            self._readers[key] = self._run.reader(key, after=self._marks.get(key, -1))
        return self._readers[key]
