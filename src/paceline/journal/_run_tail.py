"""Following all journals of a run directory."""

from collections.abc import Mapping

from paceline.journal._journal_reader import Entry, JournalReader
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
            if max_entries <= 0:
                break
            reader = self._reader(key)
            entries = reader.read(max_entries)
            if not entries and _is_before(key, keys[-1]):
                # Attempts follow each other, so this one will write no more.
                entries = reader.finish()
                self._finished.add(key)
                self._readers.pop(key, None)
            if entries:
                found.append((key, entries))
                max_entries -= len(entries)
        return found

    def finish(self) -> list[tuple[JournalKey, list[Entry]]]:
        """Return entries in the place of damaged lines at the ends of journals, each once.

        For a run that is over and of which everything was read.
        """
        found = [(key, reader.finish()) for key, reader in sorted(self._readers.items())]
        return [(key, entries) for key, entries in found if entries]

    def _reader(self, key: JournalKey) -> JournalReader:
        if key not in self._readers:
            self._readers[key] = self._run.reader(key, after=self._marks.get(key, -1))
        return self._readers[key]


def _is_before(key: JournalKey, newest: JournalKey) -> bool:
    return (key.attempt, key.generation) < (newest.attempt, newest.generation)
