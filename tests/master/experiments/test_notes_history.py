"""Versions of an experiment's notes."""

from typing import Any

from sqlalchemy import update

from paceline._cluster.master.experiments import experiment_edits
from paceline._cluster.master.store import tables


def test_each_save_of_notes_is_kept_with_its_user(master: Any, monkeypatch: Any) -> None:
    number = master.create()

    def save(text: str) -> None:
        reply = master.http.patch(f"/experiments/{number}", json={"notes": text})
        assert reply.status_code == 200, reply.text

    def history() -> list[tuple[int, str, str | None]]:
        reply = master.http.get(f"/experiments/{number}/notes-history")
        assert reply.status_code == 200, reply.text
        return [(one["number"], one["text"], one["user"]) for one in reply.json()]

    assert history() == []
    save("one")
    save("one")
    assert history() == [(1, "one", "admin")]
    # What something else has written is kept too, without a name.
    other = update(tables.experiments).values(notes="of W&B")
    master.core.database.write(lambda job: job.connection.execute(other)).result()
    save("two")
    assert history() == [(3, "two", "admin"), (2, "of W&B", None), (1, "one", "admin")]
    monkeypatch.setattr(experiment_edits, "_MOST_VERSIONS", 3)
    for text in ("three", "four", "five"):
        save(text)
    assert [text for _, text, _ in history()] == ["five", "four", "three"]
    assert master.http.get("/experiments/77/notes-history").status_code == 404
