"""Secrets of experiments, in a file of their own: never in the database, a log or an answer."""

import json
import threading
from pathlib import Path

from paceline._sealed_json import seal
from paceline.config import hide_in_text
from paceline.journal import write_atomically
from paceline.master.store import Transaction
from paceline.runner import read_secret_file


class SecretStore:
    """The file `secrets.json` of a home, mode 0600; thread-safe.

    Raises:
        SecretFileError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._secrets = read_secret_file(path)

    def of(self, experiment_id: int) -> dict[str, str]:
        """Return the secrets of an experiment by name."""
        return dict(self._secrets.get(experiment_id, {}))

    def keep(self, transaction: Transaction, experiment_id: int, secrets: dict[str, str]) -> None:
        """Put an experiment's secrets in place of those that it has, before the commit.

        After a rollback those of before are there again.

        Raises:
            OSError: The file cannot be written.
        """
        before = self._secrets.get(experiment_id, {})
        if before == secrets:
            return
        self._set(experiment_id, secrets)
        transaction.after_rollback(lambda: self._set(experiment_id, before))

    def forget(self, experiment_id: int) -> None:
        """Remove an experiment's secrets.

        Raises:
            OSError: The file cannot be written.
        """
        self._set(experiment_id, {})

    def _set(self, experiment_id: int, secrets: dict[str, str]) -> None:
        with self._lock:
            changed = {k: v for k, v in self._secrets.items() if k != experiment_id}
            if secrets:
                changed[experiment_id] = dict(secrets)
            if changed == self._secrets:
                return
            content = {"version": 1, "experiments": changed}
            sealed = seal(json.dumps(content, indent=1).encode())
            write_atomically(self._path, sealed, is_durable=True)
            self._secrets = changed


def text_to_store(submitted: str | None, secrets: dict[str, str]) -> str | None:
    """Return a submitted text without secrets; None if they cannot be told apart."""
    if submitted is None or not secrets:
        return submitted
    return hide_in_text(submitted, secrets.values())
