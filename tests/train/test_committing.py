"""What becomes of checkpoints that cannot be committed."""

from pathlib import Path

import pytest

from paceline.journal import JournalWriter
from paceline.storage import DirectoryStorage
from paceline.train._committing import Committer
from paceline.train._spec import RunSpec


def test_checkpoint_that_cannot_be_committed_is_not_waited_for(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path / "checkpoints")
    spec = RunSpec(
        run_id="run",
        run_dir=str(tmp_path),
        storage=storage.url,
        attempt=0,
        generation=0,
        seed=0,
        num_shards=1,
    )
    journal = JournalWriter(tmp_path / "journal.jsonl")
    committer = Committer(storage, journal, spec, world_size=1)
    uuid = "6558c952-a9a2-5b5b-8bfa-a0a6ecf191c0"
    with pytest.raises(Exception, match=uuid):
        committer.add({"uuid": uuid, "number": 1, "steps_completed": 0, "score": None})
    assert committer.num_pending == 0
    journal.close()
