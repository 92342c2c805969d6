"""Forks with changed code: what differs, and the tree of what came from what."""

import hashlib
import io
import tarfile
from typing import Any


def upload(master: Any, files: dict[str, bytes]) -> str:
    """Upload code and return its digest."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    reply = master.http.put(f"/contexts/{digest}", content=packed.getvalue())
    assert reply.status_code == 204, reply.text
    return digest


CONFIG = {
    "name": "first",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
}
OLD = {
    "train.py": b"lr = 1\nsteps = 2\n",
    "gone.py": b"x\n",
    "same.py": b"y\n",
    "weights": b"\0\1",
    "large": b"a" * 200_000,
}
NEW = {
    "train.py": b"lr = 2\nsteps = 2\n",
    "new.py": b"z\n",
    "same.py": b"y\n",
    "weights": b"\0\2",
    "large": b"b" * 200_000,
}


def test_a_fork_with_other_code_shows_its_changes(master: Any) -> None:
    body = {"config": CONFIG, "context_digest": upload(master, OLD), "activate": False}
    assert master.http.post("/experiments", json=body).status_code == 201
    changed = {"context_digest": upload(master, NEW), "activate": False}
    source = {"commit": "abc", "diff": "-a\n+b"}
    fork = master.http.post("/experiments/1/fork", json=changed | {"source": source})
    assert fork.status_code == 201, fork.text
    assert master.http.get("/experiments/2/files/train.py").text == "lr = 2\nsteps = 2\n"
    found = master.http.get("/experiments/2/diff").json()
    assert found["since"] == 1
    diffs = {file["path"]: (file["change"], file["diff"]) for file in found["files"]}
    assert diffs.keys() == {"train.py", "gone.py", "new.py", "weights", "large"}
    assert diffs["train.py"] == (
        "changed",
        "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-lr = 1\n+lr = 2\n steps = 2",
    )
    assert (diffs["gone.py"][0], diffs["new.py"][0]) == ("removed", "added")
    assert diffs["weights"] == diffs["large"] == ("changed", None)
    # The other way round, and with itself.
    back = master.http.get("/experiments/1/diff", params={"since": 2}).json()
    assert {file["path"]: file["change"] for file in back["files"]}["gone.py"] == "added"
    assert master.http.get("/experiments/1/diff", params={"since": 1}).json()["files"] == []
    assert master.http.get("/experiments/1/diff").json()["code"] == "no_parent"


def test_files_of_many_lines_are_named_and_not_compared(master: Any) -> None:
    """Lines that repeat and moved about take the third power of their number to compare."""
    lines = [b"%d" % (7919 * number % 150) for number in range(40_000)]
    old = {f"{name}.txt": b"\n".join(lines) for name in range(5)} | {"z.py": b"a\n"}
    body = {"config": CONFIG, "context_digest": upload(master, old), "activate": False}
    assert master.http.post("/experiments", json=body).status_code == 201
    new = {f"{name}.txt": b"\n".join(sorted(lines)) for name in range(5)} | {"z.py": b"b\n"}
    changed = {"context_digest": upload(master, new), "activate": False}
    assert master.http.post("/experiments/1/fork", json=changed).status_code == 201
    found = master.http.get("/experiments/2/diff").json()["files"]
    assert [file["path"] for file in found if file["diff"]] == ["z.py"]
    assert len(found) == 6


def test_code_that_was_not_uploaded_is_refused(master: Any) -> None:
    master.create()
    for path in ("/experiments/1/fork", "/trials/1/continue"):
        for digest in ("0" * 64, "../../etc/passwd"):
            reply = master.http.post(path, json={"context_digest": digest})
            assert (reply.status_code, reply.json()["code"]) == (409, "no_context")


def test_the_tree_has_all_that_came_of_the_root(master: Any) -> None:
    master.create()
    master.create()
    paused = {"activate": False}
    for parent, body in ((1, paused), (3, paused), (1, {"context_digest": upload(master, NEW)})):
        made = master.http.post(f"/experiments/{parent}/fork", json=body)
        assert made.status_code == 201, made.text
    for experiment in (1, 3, 4, 5):
        found = master.http.get(f"/experiments/{experiment}/tree").json()
        shown = [(one["id"], one["parent"], one["has_changed_code"]) for one in found]
        assert shown == [(1, None, False), (3, 1, False), (4, 3, False), (5, 1, True)]
    assert [one["id"] for one in master.http.get("/experiments/2/tree").json()] == [2]
    assert master.http.get("/experiments/9/tree").status_code == 404
    # What came of a deleted experiment stays, without it.
    master.http.post("/experiments/3/kill")
    assert master.http.delete("/experiments/3").status_code == 200
    assert [one["id"] for one in master.http.get("/experiments/4/tree").json()] == [4]
