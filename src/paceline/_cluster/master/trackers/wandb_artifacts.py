"""Artifacts of W&B's clients as they read them: collections, versions, aliases, files."""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.logged_runs import get_document, list_documents
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.run_files import get_file, list_files
from paceline._cluster.master.trackers import wandb_runs
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError, page

ARTIFACT, COLLECTION = "wandb-artifact", "wandb-collection"
CLIENT_ID, USE = "wandb-client-id", "wandb-use"
MAX_FILES = 100_000
_MAX_MANIFEST = 256 * 1024 * 1024
UPLOADS = "artifact-uploads"
LATEST = "latest"


def query_fields(asked: wandb_runs.Asked) -> wandb_runs.Fields:
    """Return the fields of a query that are about artifacts."""

    def by_id(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        asked.check_may_list()
        number = wandb_runs.decode_id(arguments.get("id"), "Artifact")[0]
        document = artifact_document(asked, number)
        return None if document is None else artifact_view(asked, number, document)

    def collection(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        asked.check_may_list()
        entity, project, name = [
            *wandb_runs.decode_id(arguments.get("id"), "Collection"),
            "",
            "",
            "",
        ][:3]
        return _collection_by_name(asked, f"{entity}/{project}", {"name": name})

    def client_id(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        number = get_document(asked.connection, CLIENT_ID, "", str(arguments.get("clientID"))[:200])
        return None if number is None else {"serverID": wandb_runs.encode_id("Artifact", number)}

    return {"artifact": by_id, "artifactCollection": collection, "clientIDMapping": client_id}


def project_fields(asked: wandb_runs.Asked, parent: str) -> wandb_runs.Fields:
    """Return the fields of a project that are about its artifacts."""

    def types(arguments: Mapping[str, Any]) -> wandb_runs.Fields:
        asked.check_may_list()
        names = {row.content["type"]: row for row in _collections(asked, parent)}
        return page(sorted(names), arguments, partial(_type_view, asked, parent))

    def kind(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        asked.check_may_list()
        name = arguments.get("name")
        is_there = any(row.content["type"] == name for row in _collections(asked, parent))
        return _type_view(asked, parent, str(name)) if is_there else None

    def membership(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        asked.check_may_list()
        name, _, alias = str(arguments.get("name")).partition(":")
        document = get_document(asked.connection, COLLECTION, parent, name)
        return None if document is None else _membership(asked, parent, name, document, alias)

    def artifact(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        found = membership(arguments)
        return None if found is None else found["artifact"]

    return {
        "artifactTypes": types,
        "artifactType": kind,
        "artifactCollectionMembership": membership,
        "artifact": artifact,
        "artifactCollection": partial(_collection_by_name, asked, parent),
        "artifactCollections": partial(_collection_page, asked, parent, None),
    }


def run_fields(asked: wandb_runs.Asked, place: wandb_runs.RunPlace) -> wandb_runs.Fields:
    """Return the fields of a run that are about its artifacts."""

    def outputs(arguments: Mapping[str, Any]) -> wandb_runs.Fields:
        documents = tables.documents
        run = asked.known_run(place)[1]
        query = sa.select(documents).where(
            documents.c.kind == ARTIFACT, documents.c.experiment_id == run.experiment_id
        )
        rows = asked.connection.execute(query.order_by(documents.c.created_at))
        found = [(row.name, row.content) for row in rows if row.content["state"] == "COMMITTED"]
        return page(found, arguments, lambda each: artifact_view(asked, *each))

    def inputs(arguments: Mapping[str, Any]) -> wandb_runs.Fields:
        rows = list_documents(asked.connection, USE, "/".join(place))
        found = [(row.name, artifact_document(asked, row.name)) for row in rows]
        there = [(number, document) for number, document in found if document is not None]
        return page(there, arguments, lambda each: artifact_view(asked, *each))

    return {"outputArtifacts": outputs, "inputArtifacts": inputs}


# ---- what is stored ----------------------------------------------------------------------------


def artifact_document(asked: wandb_runs.Asked, number: str) -> dict[str, Any] | None:
    """Return the document of an artifact by its number, or None."""
    found: dict[str, Any] | None = get_document(asked.connection, ARTIFACT, "", number)
    return found


def _collections(asked: wandb_runs.Asked, parent: str) -> list[Any]:
    return list_documents(asked.connection, COLLECTION, parent)


@lru_cache(maxsize=8)
def read_manifest(master: Master, digest: str) -> dict[str, Any]:
    """Return the entries of a manifest by the paths of their files."""
    with master.files.open(digest) as file:
        content = file.read(_MAX_MANIFEST)
    try:
        entries = json.loads(content)["contents"]
        return {wandb_runs.stored_path(str(path)): dict(entry) for path, entry in entries.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise GraphqlError(
            f"The manifest of an artifact cannot be read: {error!r:.200}."
        ) from error


def manifest_of(asked: wandb_runs.Asked, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an artifact's stored manifest by the paths of their files."""
    digest = document.get("manifest")
    return {} if digest is None else read_manifest(asked.master, digest)


# ---- what clients see --------------------------------------------------------------------------


def artifact_view(
    asked: wandb_runs.Asked, number: str, document: Mapping[str, Any]
) -> wandb_runs.Fields:
    """Return an artifact as clients read it."""
    parent, name = document["parent"], document["collection"]
    collection = get_document(asked.connection, COLLECTION, parent, name) or {}
    sequence = _collection_view(asked, parent, name, collection)
    aliases = [
        {"__typename": "ArtifactAlias", "id": wandb_runs.encode_id("Alias", number, alias),
         "alias": alias, "artifactCollection": sequence, "artifactCollectionName": name}
        for alias, target in collection.get("aliases", {}).items() if target == number
    ]  # fmt: skip
    memberships = [
        {"node": _membership(asked, parent, name, collection, f"v{document['version']}")}
    ]
    return {
        "__typename": "Artifact",
        "id": wandb_runs.encode_id("Artifact", number),
        "artifactSequence": sequence,
        "artifactType": {"name": document["type"]},
        "versionIndex": document["version"],
        "aliases": aliases,
        "description": document["description"],
        "metadata": document["metadata"],
        "ttlDurationSeconds": -2,
        "ttlIsInherited": True,
        "tags": [{"__typename": "Tag", "id": tag, "name": tag} for tag in document["tags"]],
        "historyStep": document["history_step"],
        "state": document["state"],
        "size": document["size"],
        "fileCount": document["num_files"],
        "digest": document["digest"],
        "digestAlgorithm": "MANIFEST_MD5",
        "commitHash": number,
        "createdAt": wandb_runs.iso_time(document["created"]),
        "updatedAt": wandb_runs.iso_time(document["created"]),
        "currentManifest": lambda _: _manifest_view(asked, number, document),
        "files": partial(_files_page, asked, document),
        "createdBy": _run_view(wandb_runs.RunPlace(*document["run"])),
        "usedBy": lambda _: {"edges": [*_used_by(asked, number)]},
        "artifactMemberships": lambda _: {"edges": [each for each in memberships if each["node"]]},
    }


def _run_view(place: wandb_runs.RunPlace) -> wandb_runs.Fields:
    project = {"name": place.project, "entity": {"name": place.entity}, "entityName": place.entity}
    ids = {"id": place.parent, "internalId": place.parent}
    return {"__typename": "Run", "id": place.id, "name": place.name, "project": project | ids}


def _used_by(asked: wandb_runs.Asked, number: str) -> Iterator[wandb_runs.Fields]:
    for row in list_documents(asked.connection, USE, name=number):
        yield {"node": _run_view(wandb_runs.RunPlace(*row.parent.split("/")))}


def _collection_view(
    asked: wandb_runs.Asked, parent: str, name: str, document: Mapping[str, Any]
) -> wandb_runs.Fields:
    entity, _, project = parent.partition("/")
    owner = {"id": parent, "internalId": parent, "name": project, "entityName": entity}

    def version_page(arguments: Mapping[str, Any]) -> wandb_runs.Fields:
        numbers = [number for number in document["versions"] if number]
        # The order is that of the versions; by default the newest comes first.
        is_falling = str(arguments.get("order") or "-").startswith("-")
        numbers = numbers[::-1] if is_falling else numbers
        found = [(number, artifact_document(asked, number)) for number in numbers]
        there = [each for each in found if each[1] is not None]
        shown = page(there, arguments, lambda each: artifact_view(asked, *each))
        for edge in shown["edges"]:
            edge["version"] = f"v{edge['node']['versionIndex']}"
        return shown

    def latest(_: Any) -> wandb_runs.Fields | None:
        number = document.get("aliases", {}).get(LATEST)
        if number is None or number not in document["versions"]:
            return None
        index = document["versions"].index(number)
        return {"id": wandb_runs.encode_id("Artifact", number), "versionIndex": index}

    def aliases(arguments: Mapping[str, Any]) -> wandb_runs.Fields:
        return page(sorted(document.get("aliases", {})), arguments, lambda alias: {
            "__typename": "ArtifactAlias", "id": wandb_runs.encode_id("Alias", name, alias),
            "alias": alias,
        })  # fmt: skip

    created = wandb_runs.iso_time(document.get("created", 0.0))
    return {
        "__typename": "ArtifactSequence",
        "id": wandb_runs.encode_id("Collection", entity, project, name),
        "name": name,
        "state": "READY",
        "description": document.get("description"),
        "createdAt": created,
        "updatedAt": created,
        "project": owner | {"entity": {"id": entity, "name": entity}},
        "defaultArtifactType": {"name": document.get("type")},
        "tags": {"edges": []},
        "aliases": aliases,
        "artifacts": version_page,
        "latestArtifact": latest,
        "artifactMembership": lambda given: _membership(
            asked, parent, name, document, str(given.get("aliasName"))
        ),
    }


def _collection_by_name(
    asked: wandb_runs.Asked, parent: str, arguments: Mapping[str, Any]
) -> wandb_runs.Fields | None:
    asked.check_may_list()
    name = str(arguments.get("name"))
    document = get_document(asked.connection, COLLECTION, parent, name)
    return None if document is None else _collection_view(asked, parent, name, document)


def _collection_page(
    asked: wandb_runs.Asked, parent: str, kind: str | None, arguments: Mapping[str, Any]
) -> wandb_runs.Fields:
    asked.check_may_list()
    rows = [row for row in _collections(asked, parent) if kind in (None, row.content["type"])]
    return page(rows, arguments, lambda row: _collection_view(asked, parent, row.name, row.content))


def _type_view(asked: wandb_runs.Asked, parent: str, name: str) -> wandb_runs.Fields:
    def collection(arguments: Mapping[str, Any]) -> wandb_runs.Fields | None:
        found = _collection_by_name(asked, parent, arguments)
        is_this = found is not None and found["defaultArtifactType"]["name"] == name
        return found if is_this else None

    return {
        "__typename": "ArtifactType",
        "id": wandb_runs.encode_id("ArtifactType", parent, name),
        "name": name,
        "description": None,
        "createdAt": wandb_runs.iso_time(0.0),
        "artifactCollection": collection,
        "artifactCollections": partial(_collection_page, asked, parent, name),
    }


def _membership(
    asked: wandb_runs.Asked, parent: str, name: str, document: Mapping[str, Any], alias: str
) -> wandb_runs.Fields | None:
    """Return a version of a collection by an alias such as `latest` or `v3`."""
    versions, aliases = document.get("versions", []), document.get("aliases", {})
    number = aliases.get(alias or LATEST)
    if number is None and alias[:1] == "v" and alias[1:].isdecimal() and len(alias) < 10:
        index = int(alias[1:])
        number = versions[index] if index < len(versions) else None
    found = None if number is None else artifact_document(asked, number)
    if found is None:
        return None
    names = [each for each, target in aliases.items() if target == number]
    view: wandb_runs.Fields = {
        "__typename": "ArtifactCollectionMembership",
        "id": wandb_runs.encode_id("Membership", parent, name, number),
        "versionIndex": versions.index(number),
        "createdAt": wandb_runs.iso_time(found["created"]),
        "aliases": [{"__typename": "ArtifactAlias", "id": each, "alias": each} for each in names],
        "artifactCollection": lambda _: _collection_view(asked, parent, name, document),
        "artifact": None,
        "files": partial(_files_page, asked, found),
    }
    # A version shows its memberships, and these the version: each is made when it is asked for.
    return view | {"artifact": _Lazy(asked, number, found)}


class _Lazy(dict[str, Any]):
    """Fields of an artifact, made when the first is asked for."""

    def __init__(self, asked: wandb_runs.Asked, number: str, document: Mapping[str, Any]) -> None:
        self._make = partial(artifact_view, asked, number, document)

    def __contains__(self, name: object) -> bool:
        if not len(self):
            self.update(self._make())
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field."""
        return super().get(name, default) if name in self else default


def _manifest_view(
    asked: wandb_runs.Asked, number: str, document: Mapping[str, Any]
) -> wandb_runs.Fields:
    url = wandb_runs.signed_url(asked, "GET", document["trial_id"], manifest_path(number, document))
    identity = wandb_runs.encode_id("ArtifactManifest", number)
    return {"id": identity, "file": {"id": identity, "directUrl": url}}


def manifest_path(number: str, document: Mapping[str, Any]) -> str:
    """Return the path of an artifact's manifest among the files of its trial."""
    if document["version"] is None:
        return f"{UPLOADS}/{number}/manifest.json"
    return f"artifact-manifests/{document['collection']}/v{document['version']}.json"


def files_prefix(number: str, document: Mapping[str, Any]) -> str:
    """Return the beginning of the paths of an artifact's files."""
    if document["version"] is None:
        return f"{UPLOADS}/{number}/files/"
    return f"artifacts/{document['collection']}/v{document['version']}/"


def _files_page(
    asked: wandb_runs.Asked, document: Mapping[str, Any], arguments: Mapping[str, Any]
) -> wandb_runs.Fields:
    prefix, trial_id = files_prefix("", document), document["trial_id"]
    rows = list_files(asked.connection, trial_id, prefix=prefix, limit=MAX_FILES)
    there = {row.path.removeprefix(prefix): row for row in rows}
    # References to what lies elsewhere have no file here.
    entries = {**dict.fromkeys(there, {}), **manifest_of(asked, document)}
    names = {str(name) for name in arguments.get("names") or ()} or set(entries)

    def show(name: str) -> wandb_runs.Fields:
        row, entry = there.get(name), entries[name]
        if row is None:
            fields = {
                "name": name,
                "displayName": name,
                "id": wandb_runs.encode_id("File", name),
                "url": "",
            }
            fields |= {"directUrl": str(entry.get("ref", "")), "sizeBytes": entry.get("size", 0)}
        else:
            fields = wandb_runs.file_view(asked, row, name)
        return fields | {"__typename": "File", "md5": entry.get("digest", ""), "storagePath": name}

    return page(sorted(names & set(entries)), arguments, show)


def artifact_file(asked: wandb_runs.Asked, number: str, md5_hex: str) -> Any:
    """Return the row of an artifact's file by the MD5 that its manifest has, None without one."""
    asked.check_may_list()
    document = artifact_document(asked, number)
    if document is None or document["state"] != "COMMITTED":
        return None
    digest = _base64_of(md5_hex)
    for name, entry in manifest_of(asked, document).items():
        if entry.get("digest") == digest:
            path = f"{files_prefix(number, document)}{name}"
            return get_file(asked.connection, document["trial_id"], path)
    return None


def _base64_of(md5_hex: str) -> str:
    try:
        return b64encode(bytes.fromhex(md5_hex)).decode()
    except ValueError:
        return ""
