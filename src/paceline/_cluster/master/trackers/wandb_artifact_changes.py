"""Changes of W&B's artifacts by its clients: created, committed, used, edited, deleted."""

import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.logged_runs import change_document, get_document
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.run_files import (
    LIMIT_REACHED,
    bytes_left,
    get_file,
    list_files,
    put_file,
)
from paceline._cluster.master.trackers import wandb_runs
from paceline._cluster.master.trackers.wandb_artifacts import (
    ARTIFACT,
    CLIENT_ID,
    COLLECTION,
    LATEST,
    MAX_FILES,
    UPLOADS,
    USE,
    artifact_document,
    artifact_view,
    files_prefix,
    manifest_of,
    manifest_path,
    read_manifest,
)
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError
from paceline._cluster.master.trackers.wandb_values import storable

_MAX_METADATA = 1024 * 1024


def mutation_fields(asked: wandb_runs.Asked) -> wandb_runs.Fields:
    """Return the fields of a mutation that are about artifacts."""
    return {
        "createArtifact": partial(_create, asked),
        "createArtifactManifest": partial(_create_manifest, asked),
        "updateArtifactManifest": partial(_create_manifest, asked),
        "createArtifactFiles": partial(_create_files, asked),
        "commitArtifact": partial(_commit, asked),
        "useArtifact": partial(_use, asked),
        "updateArtifact": partial(_update, asked),
        "addAliases": partial(_change_aliases, asked, True),
        "deleteAliases": partial(_change_aliases, asked, False),
        "deleteArtifact": partial(_delete, asked),
    }


def _known(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the number and the document of the artifact that a mutation names."""
    number = wandb_runs.decode_id(given.get("artifactID"), "Artifact")[0]
    document = artifact_document(asked, number)
    if document is None:
        raise NotFoundError(f"There is no artifact {given.get('artifactID')!r:.200}.")
    return number, document


def _store(asked: wandb_runs.Asked, number: str, document: dict[str, Any]) -> None:
    connection = asked.writer.connection
    change_document(
        connection, ARTIFACT, "", number, lambda _: document,
        experiment_id=document["experiment_id"],
    )  # fmt: skip


def _change_collection(asked: wandb_runs.Asked, document: Mapping[str, Any], change: Any) -> Any:
    return change_document(
        asked.writer.connection, COLLECTION, document["parent"], document["collection"], change
    )


def _text(value: Any, limit: int) -> str | None:
    if value is None:
        return None
    text = str(storable(value))
    if len(text) > limit:
        raise GraphqlError(f"A text of an artifact must have at most {limit:,} characters.")
    return text


def _aliases(given: Mapping[str, Any]) -> list[str]:
    found = [each.get("alias") for each in given.get("aliases") or () if isinstance(each, dict)]
    return [str(storable(alias))[:200] for alias in found[:1000] if alias]


def _create(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    names = given.get("artifactCollectionName") or given.get("artifactCollectionNames")
    name = wandb_runs.checked_name(names[0] if isinstance(names, list) and names else names, "")
    place = wandb_runs.checked_place(
        given.get("entityName"), given.get("projectName"), given.get("runName")
    )
    _, run = asked.known_run(place)
    kind, digest = str(given.get("artifactTypeName"))[:200], str(given.get("digest"))[:200]
    new: wandb_runs.Fields = {
        "type": kind,
        "created": time.time(),
        "description": None,
        "aliases": {},
    }
    new |= {"versions": [], "digests": {}}
    known = get_document(asked.connection, COLLECTION, place.parent, name) or new
    if known["type"] != kind:
        raise GraphqlError(
            f"The artifact {name!r} must have the type {known['type']!r}, as before, but got"
            f" {kind!r}."
        )
    wandb_runs.upsert_project(asked, place.entity, place.project)
    number = known["digests"].get(digest)
    document = None if number is None else artifact_document(asked, number)
    aliases = _aliases(given)
    if number is not None and document is not None and given.get("enableDigestDeduplication"):
        known["aliases"] |= dict.fromkeys(aliases, number)
    else:
        number = str(secrets.randbits(62))
        document = {
            "type": kind,
            "parent": place.parent,
            "collection": name,
            "version": None,
            "state": "PENDING",
            "digest": digest,
            "description": _text(given.get("description"), 65536),
            "metadata": _text(given.get("metadata"), _MAX_METADATA),
            "wanted_aliases": aliases,
            "tags": [str(tag.get("tagName"))[:200] for tag in given.get("tags") or ()],
            "history_step": given.get("historyStep"),
            "created": time.time(),
            "run": [*place],
            "trial_id": run.trial.id,
            "experiment_id": run.experiment_id,
            "size": 0,
            "num_files": 0,
        }
        _store(asked, number, document)
    client_id = str(given.get("clientID") or "")[:200]
    if client_id:
        change_document(asked.connection, CLIENT_ID, "", client_id, lambda _: number)
    _change_collection(
        asked, document | {"parent": place.parent, "collection": name}, lambda _: known
    )
    return {"artifact": artifact_view(asked, number, document)}


def _create_manifest(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    if given.get("artifactManifestID") is not None:
        number = wandb_runs.decode_id(given["artifactManifestID"], "ArtifactManifest")[0]
        given = {"artifactID": wandb_runs.encode_id("Artifact", number)}
    number, document = _known(asked, given)
    path = f"{UPLOADS}/{number}/manifest.json"
    url = wandb_runs.signed_url(asked, "PUT", document["trial_id"], path)
    identity = wandb_runs.encode_id("ArtifactManifest", number)
    file = {"id": identity, "uploadUrl": url, "uploadHeaders": []}
    return {"artifactManifest": {"id": identity, "file": file}}


def _create_files(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    edges, bases = [], {}
    for each in given.get("artifactFiles") or ():
        number, document = _known(asked, each)
        path = f"{UPLOADS}/{number}/files/{wandb_runs.stored_path(str(each.get('name')))}"
        if number not in bases:
            if not bytes_left(asked.connection, document["trial_id"]):
                # A refused upload would tell the client nothing but that it has failed.
                raise GraphqlError(LIMIT_REACHED)
            bases[number] = _base(asked, document)
        known = bases[number].get((each.get("name"), each.get("md5")))
        url = None
        if known is None:
            url = wandb_runs.signed_url(asked, "PUT", document["trial_id"], path)
        else:
            _, run = asked.known_run(wandb_runs.RunPlace(*document["run"]))
            row = get_file(asked.connection, *known)
            assert row is not None
            put_file(asked.connection, run.trial, path, row.digest, row.size, row.media_type)
        identity = wandb_runs.encode_id("Artifact", number)
        node = {"name": each.get("name"), "storagePath": path, "uploadUrl": url}
        node |= {
            "id": wandb_runs.encode_id("File", path),
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
        }
        edges.append({"node": node | {"artifact": {"id": identity}}})
    return {"files": {"edges": edges}}


def _base(
    asked: wandb_runs.Asked, document: Mapping[str, Any]
) -> dict[tuple[str, str], tuple[int, str]]:
    """Return where the files of the newest version lie, by name and MD5: no need to send them."""
    collection = get_document(
        asked.connection, COLLECTION, document["parent"], document["collection"]
    )
    number = (collection or {}).get("aliases", {}).get(LATEST)
    base = None if number is None else artifact_document(asked, number)
    if base is None:
        return {}
    prefix, trial_id = files_prefix(number, base), base["trial_id"]
    rows = list_files(asked.connection, trial_id, prefix=prefix, limit=MAX_FILES)
    there = {row.path for row in rows}
    return {
        (name, entry.get("digest", "")): (trial_id, f"{prefix}{name}")
        for name, entry in manifest_of(asked, base).items()
        if f"{prefix}{name}" in there
    }


def _commit(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    number, document = _known(asked, given)
    if document["state"] == "PENDING":
        trial_id = document["trial_id"]
        manifest = get_file(asked.connection, trial_id, manifest_path(number, document))
        if manifest is None:
            raise GraphqlError("The manifest of an artifact must be uploaded before the commit.")
        before = files_prefix(number, document)
        rows = list_files(asked.connection, trial_id, prefix=before, limit=MAX_FILES)
        sizes = {row.path.removeprefix(before): row.size for row in rows}
        for name, entry in read_manifest(asked.master, manifest.digest).items():
            if entry.get("ref") is None and sizes.get(name) != entry.get("size", sizes.get(name)):
                raise GraphqlError(
                    f"The file {name!r:.300} of an artifact must be uploaded with"
                    f" {entry.get('size')} bytes before the commit, but has {sizes.get(name)}."
                )
        document["manifest"] = manifest.digest
        document |= {"size": sum(sizes.values()), "num_files": len(sizes)}
        collection = _change_collection(asked, document, partial(_add_version, number, document))
        document |= {"state": "COMMITTED", "version": collection["versions"].index(number)}
        _move(asked, trial_id, before, files_prefix(number, document))
        _move(asked, trial_id, manifest.path, manifest_path(number, document))
        _store(asked, number, document)
    return {"artifact": artifact_view(asked, number, document)}


def _add_version(number: str, document: Mapping[str, Any], collection: Any) -> Any:
    if number not in collection["versions"]:
        collection["versions"].append(number)
    collection["digests"][document["digest"]] = number
    names = [*document["wanted_aliases"], LATEST]
    collection["aliases"] |= dict.fromkeys(names, number)
    return collection


def _move(asked: wandb_runs.Asked, trial_id: int, before: str, after: str) -> None:
    """Give the files whose paths begin with `before` paths that begin with `after`."""
    files = tables.run_files
    where = (files.c.path >= before, files.c.path < before + "\U0010ffff")
    moved = sa.literal(after).concat(sa.func.substr(files.c.path, len(before) + 1))
    statement = sa.update(files).where(files.c.trial_id == trial_id, *where).values(path=moved)
    asked.writer.connection.execute(statement)


def _use(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    asked.check_may_list()
    number, document = _known(asked, given)
    place = wandb_runs.checked_place(
        given.get("entityName"), given.get("projectName"), given.get("runName")
    )
    _, run = asked.known_run(place)
    change_document(
        asked.connection, USE, "/".join(place), number, lambda _: True,
        experiment_id=run.experiment_id,
    )  # fmt: skip
    return {"artifact": artifact_view(asked, number, document)}


def _update(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    number, document = _known(asked, given)
    for name, limit in (("description", 65536), ("metadata", _MAX_METADATA)):
        if given.get(name) is not None:
            document[name] = _text(given[name], limit)
    added = [str(tag.get("tagName"))[:200] for tag in given.get("tagsToAdd") or ()]
    gone = {str(tag.get("tagName")) for tag in given.get("tagsToDelete") or ()}
    kept = [tag for tag in [*document["tags"], *added] if tag not in gone]
    document["tags"] = list(dict.fromkeys(kept))[:1000]
    _store(asked, number, document)
    if isinstance(given.get("aliases"), list):
        wanted = _aliases(given)

        def change(collection: Any) -> Any:
            kept = {alias: one for alias, one in collection["aliases"].items() if one != number}
            return collection | {"aliases": kept | dict.fromkeys(wanted, number)}

        _change_collection(asked, document, change)
    return {"artifact": artifact_view(asked, number, document)}


def _change_aliases(
    asked: wandb_runs.Asked, is_added: bool, given: Mapping[str, Any]
) -> wandb_runs.Fields:
    number, document = _known(asked, given)
    names = _aliases(given)
    added = dict.fromkeys(names, number) if is_added else {}

    def change(collection: Any) -> Any:
        kept = {
            alias: one
            for alias, one in collection["aliases"].items()
            if alias not in names or one != number
        }
        return collection | {"aliases": kept | added}

    _change_collection(asked, document, change)
    return {"success": True}


def _delete(asked: wandb_runs.Asked, given: Mapping[str, Any]) -> wandb_runs.Fields:
    asked.check_may_list()
    number, document = _known(asked, given)
    collection = get_document(
        asked.connection, COLLECTION, document["parent"], document["collection"]
    )
    names = [a for a, one in (collection or {}).get("aliases", {}).items() if one == number]
    if set(names) - {LATEST} and not given.get("deleteAliases"):
        raise GraphqlError(f"An artifact with the aliases {names} can only be deleted with these.")

    def change(found: Any) -> Any:
        versions = [None if one == number else one for one in found["versions"]]
        digests = {key: one for key, one in found["digests"].items() if one != number}
        aliases = {key: one for key, one in found["aliases"].items() if one != number}
        there = [one for one in versions if one]
        if there and LATEST not in aliases:
            aliases[LATEST] = there[-1]
        return found | {"versions": versions, "digests": digests, "aliases": aliases}

    _change_collection(asked, document, change)
    files, prefix = tables.run_files, files_prefix(number, document)
    where = (files.c.path >= prefix, files.c.path < prefix + "\U0010ffff")
    statement = files.delete().where(files.c.trial_id == document["trial_id"], *where)
    asked.connection.execute(statement)
    change_document(asked.connection, ARTIFACT, "", number, lambda _: None)
    return {"artifact": {"id": wandb_runs.encode_id("Artifact", number)}}
