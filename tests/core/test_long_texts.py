"""Texts of any length are recorded so that a master takes them."""

import json
from pathlib import Path

import pytest

from paceline._base.journal_reading_and_writing import JournalReader, JournalWriter
from paceline._base.journal_records import AttemptStarted, StoreChecked, decode_record
from paceline._cluster.messages.record_checks import check_record
from paceline.core._attempt_journal import record_start, record_store_state


def test_a_master_takes_the_causes_of_restarts_and_the_reasons_of_stores_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RESTART_CAUSES", json.dumps(["x" * 9000]))
    journal = JournalWriter(tmp_path / "journal")
    record_start(
        journal,
        attempt=1,
        generation=0,
        rank=0,
        world_size=1,
        resumed_from=None,
        steps_completed=0,
        restart_causes=["y" * 9000],
        is_parent_notified=False,
    )
    record_store_state(journal, "s3://bucket", "z" * 9000)
    journal.close()
    records = [decode_record(entry.payload) for entry in JournalReader(tmp_path / "journal")]
    assert [type(record) for record in records] == [AttemptStarted, StoreChecked]
    for record in records:
        check_record(record)
