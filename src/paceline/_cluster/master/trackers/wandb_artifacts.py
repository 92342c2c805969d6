"""Artifacts of W&B's clients: collections, versions, aliases, files by digest."""

import json
import secrets
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from sqlalchemy import func, literal, select, update

from paceline._cluster.master.experiments.logged_runs import (
    change_document,
    get_document,
    list_documents,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.run_files import (
    LIMIT_REACHED,
    bytes_left,
    get_file,
    list_files,
    put_file,
)
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError, page
from paceline._cluster.master.trackers.wandb_runs import (
    Asked,
    Fields,
    RunPlace,
    checked_name,
    checked_place,
    decode_id,
    encode_id,
    file_view,
    iso_time,
    signed_url,
    stored_path,
    upsert_project,
)
from paceline._cluster.master.trackers.wandb_values import storable

ARTIFACT, COLLECTION = "wandb-artifact", "wandb-collection"
_CLIENT_ID, _USE = "wandb-client-id", "wandb-use"
_MAX_FILES = 100_000
_MAX_METADATA = 1024 * 1024
_MAX_MANIFEST = 256 * 1024 * 1024
_UPLOADS = "artifact-uploads"
_LATEST = "latest"


def query_fields(asked: Asked) -> Fields:
    """Return the fields of a query that are about artifacts."""

    def by_id(arguments: Mapping[str, Any]) -> Fields | None:
        asked.check_may_list()
        number = decode_id(arguments.get("id"), "Artifact")[0]
        document = _document(asked, number)
        return None if document is None else _view(asked, number, document)

    def collection(arguments: Mapping[str, Any]) -> Fields | None:
        asked.check_may_list()
        entity, project, name = [*decode_id(arguments.get("id"), "Collection"), "", "", ""][:3]
        return _collection_by_name(asked, f"{entity}/{project}", {"name": name})

    def client_id(arguments: Mapping[str, Any]) -> Fields | None:
        number = get_document(
            asked.connection, _CLIENT_ID, "", str(arguments.get("clientID"))[:200]
        )
        return None if number is None else {"serverID": encode_id("Artifact", number)}

    return {"artifact": by_id, "artifactCollection": collection, "clientIDMapping": client_id}


def mutation_fields(asked: Asked) -> Fields:
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


def project_fields(asked: Asked, parent: str) -> Fields:
    """Return the fields of a project that are about its artifacts."""

    def types(arguments: Mapping[str, Any]) -> Fields:
        asked.check_may_list()
        names = {row.content["type"]: row for row in _collections(asked, parent)}
        return page(sorted(names), arguments, partial(_type_view, asked, parent))

    def kind(arguments: Mapping[str, Any]) -> Fields | None:
        asked.check_may_list()
        name = arguments.get("name")
        is_there = any(row.content["type"] == name for row in _collections(asked, parent))
        return _type_view(asked, parent, str(name)) if is_there else None

    def membership(arguments: Mapping[str, Any]) -> Fields | None:
        asked.check_may_list()
        name, _, alias = str(arguments.get("name")).partition(":")
        document = get_document(asked.connection, COLLECTION, parent, name)
        return None if document is None else _membership(asked, parent, name, document, alias)

    def artifact(arguments: Mapping[str, Any]) -> Fields | None:
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


def run_fields(asked: Asked, place: RunPlace) -> Fields:
    """Return the fields of a run that are about its artifacts."""

    def outputs(arguments: Mapping[str, Any]) -> Fields:
        documents = tables.documents
        run = asked.known_run(place)[1]
        query = select(documents).where(
            documents.c.kind == ARTIFACT, documents.c.experiment_id == run.experiment_id
        )
        rows = asked.connection.execute(query.order_by(documents.c.created_at))
        found = [(row.name, row.content) for row in rows if row.content["state"] == "COMMITTED"]
        return page(found, arguments, lambda each: _view(asked, *each))

    def inputs(arguments: Mapping[str, Any]) -> Fields:
        rows = list_documents(asked.connection, _USE, "/".join(place))
        found = [(row.name, _document(asked, row.name)) for row in rows]
        there = [(number, document) for number, document in found if document is not None]
        return page(there, arguments, lambda each: _view(asked, *each))

    return {"outputArtifacts": outputs, "inputArtifacts": inputs}


# ---- what is stored ----------------------------------------------------------------------------


def _document(asked: Asked, number: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = get_document(asked.connection, ARTIFACT, "", number)
    return found


def _known(asked: Asked, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the number and the document of the artifact that a mutation names."""
    number = decode_id(given.get("artifactID"), "Artifact")[0]
    document = _document(asked, number)
    if document is None:
        raise NotFoundError(f"There is no artifact {given.get('artifactID')!r:.200}.")
    return number, document


def _store(asked: Asked, number: str, document: dict[str, Any]) -> None:
    connection = asked.writer.connection
    change_document(
        connection, ARTIFACT, "", number, lambda _: document,
        experiment_id=document["experiment_id"],
    )  # fmt: skip


def _collections(asked: Asked, parent: str) -> list[Any]:
    return list_documents(asked.connection, COLLECTION, parent)


def _change_collection(asked: Asked, document: Mapping[str, Any], change: Any) -> Any:
    return change_document(
        asked.writer.connection, COLLECTION, document["parent"], document["collection"], change
    )


@lru_cache(maxsize=8)
def _manifest(master: Master, digest: str) -> dict[str, Any]:
    """Return the entries of a manifest by the paths of their files."""
    with master.files.open(digest) as file:
        content = file.read(_MAX_MANIFEST)
    try:
        entries = json.loads(content)["contents"]
        return {stored_path(str(path)): dict(entry) for path, entry in entries.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise GraphqlError(
            f"The manifest of an artifact cannot be read: {error!r:.200}."
        ) from error


def _manifest_of(asked: Asked, document: Mapping[str, Any]) -> dict[str, Any]:
    digest = document.get("manifest")
    return {} if digest is None else _manifest(asked.master, digest)


# ---- what clients see --------------------------------------------------------------------------


def _view(asked: Asked, number: str, document: Mapping[str, Any]) -> Fields:
    parent, name = document["parent"], document["collection"]
    collection = get_document(asked.connection, COLLECTION, parent, name) or {}
    sequence = _collection_view(asked, parent, name, collection)
    aliases = [
        {"__typename": "ArtifactAlias", "id": encode_id("Alias", number, alias), "alias": alias,
         "artifactCollection": sequence, "artifactCollectionName": name}
        for alias, target in collection.get("aliases", {}).items() if target == number
    ]  # fmt: skip
    memberships = [
        {"node": _membership(asked, parent, name, collection, f"v{document['version']}")}
    ]
    return {
        "__typename": "Artifact",
        "id": encode_id("Artifact", number),
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
        "createdAt": iso_time(document["created"]),
        "updatedAt": iso_time(document["created"]),
        "currentManifest": lambda _: _manifest_view(asked, number, document),
        "files": partial(_files_page, asked, document),
        "createdBy": _run_view(RunPlace(*document["run"])),
        "usedBy": lambda _: {"edges": [*_used_by(asked, number)]},
        "artifactMemberships": lambda _: {"edges": [each for each in memberships if each["node"]]},
    }


def _run_view(place: RunPlace) -> Fields:
    project = {"name": place.project, "entity": {"name": place.entity}, "entityName": place.entity}
    ids = {"id": place.parent, "internalId": place.parent}
    return {"__typename": "Run", "id": place.id, "name": place.name, "project": project | ids}


def _used_by(asked: Asked, number: str) -> Iterator[Fields]:
    for row in list_documents(asked.connection, _USE, name=number):
        yield {"node": _run_view(RunPlace(*row.parent.split("/")))}


def _collection_view(asked: Asked, parent: str, name: str, document: Mapping[str, Any]) -> Fields:
    entity, _, project = parent.partition("/")
    owner = {"id": parent, "internalId": parent, "name": project, "entityName": entity}

    def version_page(arguments: Mapping[str, Any]) -> Fields:
        numbers = [number for number in document["versions"] if number]
        # The order is that of the versions; by default the newest comes first.
        is_falling = str(arguments.get("order") or "-").startswith("-")
        numbers = numbers[::-1] if is_falling else numbers
        found = [(number, _document(asked, number)) for number in numbers]
        there = [each for each in found if each[1] is not None]
        shown = page(there, arguments, lambda each: _view(asked, *each))
        for edge in shown["edges"]:
            edge["version"] = f"v{edge['node']['versionIndex']}"
        return shown

    def latest(_: Any) -> Fields | None:
        number = document.get("aliases", {}).get(_LATEST)
        if number is None or number not in document["versions"]:
            return None
        index = document["versions"].index(number)
        return {"id": encode_id("Artifact", number), "versionIndex": index}

    def aliases(arguments: Mapping[str, Any]) -> Fields:
        return page(sorted(document.get("aliases", {})), arguments, lambda alias: {
            "__typename": "ArtifactAlias", "id": encode_id("Alias", name, alias), "alias": alias
        })  # fmt: skip

    created = iso_time(document.get("created", 0.0))
    return {
        "__typename": "ArtifactSequence",
        "id": encode_id("Collection", entity, project, name),
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


def _collection_by_name(asked: Asked, parent: str, arguments: Mapping[str, Any]) -> Fields | None:
    asked.check_may_list()
    name = str(arguments.get("name"))
    document = get_document(asked.connection, COLLECTION, parent, name)
    return None if document is None else _collection_view(asked, parent, name, document)


def _collection_page(
    asked: Asked, parent: str, kind: str | None, arguments: Mapping[str, Any]
) -> Fields:
    asked.check_may_list()
    rows = [row for row in _collections(asked, parent) if kind in (None, row.content["type"])]
    return page(rows, arguments, lambda row: _collection_view(asked, parent, row.name, row.content))


def _type_view(asked: Asked, parent: str, name: str) -> Fields:
    def collection(arguments: Mapping[str, Any]) -> Fields | None:
        found = _collection_by_name(asked, parent, arguments)
        is_this = found is not None and found["defaultArtifactType"]["name"] == name
        return found if is_this else None

    return {
        "__typename": "ArtifactType",
        "id": encode_id("ArtifactType", parent, name),
        "name": name,
        "description": None,
        "createdAt": iso_time(0.0),
        "artifactCollection": collection,
        "artifactCollections": partial(_collection_page, asked, parent, name),
    }


def _membership(
    asked: Asked, parent: str, name: str, document: Mapping[str, Any], alias: str
) -> Fields | None:
    """Return a version of a collection by an alias such as `latest` or `v3`."""
    versions, aliases = document.get("versions", []), document.get("aliases", {})
    number = aliases.get(alias or _LATEST)
    if number is None and alias[:1] == "v" and alias[1:].isdecimal() and len(alias) < 10:
        index = int(alias[1:])
        number = versions[index] if index < len(versions) else None
    found = None if number is None else _document(asked, number)
    if found is None:
        return None
    names = [each for each, target in aliases.items() if target == number]
    view: Fields = {
        "__typename": "ArtifactCollectionMembership",
        "id": encode_id("Membership", parent, name, number),
        "versionIndex": versions.index(number),
        "createdAt": iso_time(found["created"]),
        "aliases": [{"__typename": "ArtifactAlias", "id": each, "alias": each} for each in names],
        "artifactCollection": lambda _: _collection_view(asked, parent, name, document),
        "artifact": None,
        "files": partial(_files_page, asked, found),
    }
    # A version shows its memberships, and these the version: each is made when it is asked for.
    return view | {"artifact": _Lazy(asked, number, found)}


class _Lazy(dict[str, Any]):
    """Fields of an artifact, made when the first is asked for."""

    def __init__(self, asked: Asked, number: str, document: Mapping[str, Any]) -> None:
        self._make = partial(_view, asked, number, document)

    def __contains__(self, name: object) -> bool:
        if not len(self):
            self.update(self._make())
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field."""
        return super().get(name, default) if name in self else default


def _manifest_view(asked: Asked, number: str, document: Mapping[str, Any]) -> Fields:
    url = signed_url(asked, "GET", document["trial_id"], _manifest_path(number, document))
    identity = encode_id("ArtifactManifest", number)
    return {"id": identity, "file": {"id": identity, "directUrl": url}}


def _manifest_path(number: str, document: Mapping[str, Any]) -> str:
    if document["version"] is None:
        return f"{_UPLOADS}/{number}/manifest.json"
    return f"artifact-manifests/{document['collection']}/v{document['version']}.json"


def _prefix(number: str, document: Mapping[str, Any]) -> str:
    if document["version"] is None:
        return f"{_UPLOADS}/{number}/files/"
    return f"artifacts/{document['collection']}/v{document['version']}/"


def _files_page(asked: Asked, document: Mapping[str, Any], arguments: Mapping[str, Any]) -> Fields:
    prefix, trial_id = _prefix("", document), document["trial_id"]
    rows = list_files(asked.connection, trial_id, prefix=prefix, limit=_MAX_FILES)
    there = {row.path.removeprefix(prefix): row for row in rows}
    # References to what lies elsewhere have no file here.
    entries = {**dict.fromkeys(there, {}), **_manifest_of(asked, document)}
    names = {str(name) for name in arguments.get("names") or ()} or set(entries)

    def show(name: str) -> Fields:
        row, entry = there.get(name), entries[name]
        if row is None:
            fields = {"name": name, "displayName": name, "id": encode_id("File", name), "url": ""}
            fields |= {"directUrl": str(entry.get("ref", "")), "sizeBytes": entry.get("size", 0)}
        else:
            fields = file_view(asked, row, name)
        return fields | {"__typename": "File", "md5": entry.get("digest", ""), "storagePath": name}

    return page(sorted(names & set(entries)), arguments, show)


def artifact_file(asked: Asked, number: str, md5_hex: str) -> Any:
    """Return the row of an artifact's file by the MD5 that its manifest has, None without one."""
    asked.check_may_list()
    document = _document(asked, number)
    if document is None or document["state"] != "COMMITTED":
        return None
    digest = _base64_of(md5_hex)
    for name, entry in _manifest_of(asked, document).items():
        if entry.get("digest") == digest:
            path = f"{_prefix(number, document)}{name}"
            return get_file(asked.connection, document["trial_id"], path)
    return None


def _base64_of(md5_hex: str) -> str:
    try:
        return b64encode(bytes.fromhex(md5_hex)).decode()
    except ValueError:
        return ""


# ---- mutations ---------------------------------------------------------------------------------


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


def _create(asked: Asked, given: Mapping[str, Any]) -> Fields:
    names = given.get("artifactCollectionName") or given.get("artifactCollectionNames")
    name = checked_name(names[0] if isinstance(names, list) and names else names, "")
    place = checked_place(given.get("entityName"), given.get("projectName"), given.get("runName"))
    _, run = asked.known_run(place)
    kind, digest = str(given.get("artifactTypeName"))[:200], str(given.get("digest"))[:200]
    new: Fields = {"type": kind, "created": time.time(), "description": None, "aliases": {}}
    new |= {"versions": [], "digests": {}}
    known = get_document(asked.connection, COLLECTION, place.parent, name) or new
    if known["type"] != kind:
        raise GraphqlError(
            f"The artifact {name!r} must have the type {known['type']!r}, as before, but got"
            f" {kind!r}."
        )
    upsert_project(asked, place.entity, place.project)
    number = known["digests"].get(digest)
    document = None if number is None else _document(asked, number)
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
        change_document(asked.connection, _CLIENT_ID, "", client_id, lambda _: number)
    _change_collection(
        asked, document | {"parent": place.parent, "collection": name}, lambda _: known
    )
    return {"artifact": _view(asked, number, document)}


def _create_manifest(asked: Asked, given: Mapping[str, Any]) -> Fields:
    if given.get("artifactManifestID") is not None:
        number = decode_id(given["artifactManifestID"], "ArtifactManifest")[0]
        given = {"artifactID": encode_id("Artifact", number)}
    number, document = _known(asked, given)
    path = f"{_UPLOADS}/{number}/manifest.json"
    url = signed_url(asked, "PUT", document["trial_id"], path)
    identity = encode_id("ArtifactManifest", number)
    file = {"id": identity, "uploadUrl": url, "uploadHeaders": []}
    return {"artifactManifest": {"id": identity, "file": file}}


def _create_files(asked: Asked, given: Mapping[str, Any]) -> Fields:
    edges, bases = [], {}
    for each in given.get("artifactFiles") or ():
        number, document = _known(asked, each)
        path = f"{_UPLOADS}/{number}/files/{stored_path(str(each.get('name')))}"
        if number not in bases:
            if not bytes_left(asked.connection, document["trial_id"]):
                # A refused upload would tell the client nothing but that it has failed.
                raise GraphqlError(LIMIT_REACHED)
            bases[number] = _base(asked, document)
        known = bases[number].get((each.get("name"), each.get("md5")))
        url = None
        if known is None:
            url = signed_url(asked, "PUT", document["trial_id"], path)
        else:
            _, run = asked.known_run(RunPlace(*document["run"]))
            row = get_file(asked.connection, *known)
            assert row is not None
            put_file(asked.connection, run.trial, path, row.digest, row.size, row.media_type)
        identity = encode_id("Artifact", number)
        node = {"name": each.get("name"), "storagePath": path, "uploadUrl": url}
        node |= {"id": encode_id("File", path), "uploadHeaders": [], "uploadMultipartUrls": None}
        edges.append({"node": node | {"artifact": {"id": identity}}})
    return {"files": {"edges": edges}}


def _base(asked: Asked, document: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, str]]:
    """Return where the files of the newest version lie, by name and MD5: no need to send them."""
    collection = get_document(
        asked.connection, COLLECTION, document["parent"], document["collection"]
    )
    number = (collection or {}).get("aliases", {}).get(_LATEST)
    base = None if number is None else _document(asked, number)
    if base is None:
        return {}
    prefix, trial_id = _prefix(number, base), base["trial_id"]
    rows = list_files(asked.connection, trial_id, prefix=prefix, limit=_MAX_FILES)
    there = {row.path for row in rows}
    return {
        (name, entry.get("digest", "")): (trial_id, f"{prefix}{name}")
        for name, entry in _manifest_of(asked, base).items()
        if f"{prefix}{name}" in there
    }


def _commit(asked: Asked, given: Mapping[str, Any]) -> Fields:
    number, document = _known(asked, given)
    if document["state"] == "PENDING":
        trial_id = document["trial_id"]
        manifest = get_file(asked.connection, trial_id, _manifest_path(number, document))
        if manifest is None:
            raise GraphqlError("The manifest of an artifact must be uploaded before the commit.")
        before = _prefix(number, document)
        rows = list_files(asked.connection, trial_id, prefix=before, limit=_MAX_FILES)
        sizes = {row.path.removeprefix(before): row.size for row in rows}
        for name, entry in _manifest(asked.master, manifest.digest).items():
            if entry.get("ref") is None and sizes.get(name) != entry.get("size", sizes.get(name)):
                raise GraphqlError(
                    f"The file {name!r:.300} of an artifact must be uploaded with"
                    f" {entry.get('size')} bytes before the commit, but has {sizes.get(name)}."
                )
        document["manifest"] = manifest.digest
        document |= {"size": sum(sizes.values()), "num_files": len(sizes)}
        collection = _change_collection(asked, document, partial(_add_version, number, document))
        document |= {"state": "COMMITTED", "version": collection["versions"].index(number)}
        _move(asked, trial_id, before, _prefix(number, document))
        _move(asked, trial_id, manifest.path, _manifest_path(number, document))
        _store(asked, number, document)
    return {"artifact": _view(asked, number, document)}


def _add_version(number: str, document: Mapping[str, Any], collection: Any) -> Any:
    if number not in collection["versions"]:
        collection["versions"].append(number)
    collection["digests"][document["digest"]] = number
    names = [*document["wanted_aliases"], _LATEST]
    collection["aliases"] |= dict.fromkeys(names, number)
    return collection


def _move(asked: Asked, trial_id: int, before: str, after: str) -> None:
    """Give the files whose paths begin with `before` paths that begin with `after`."""
    files = tables.run_files
    where = (files.c.path >= before, files.c.path < before + "\U0010ffff")
    moved = literal(after).concat(func.substr(files.c.path, len(before) + 1))
    statement = update(files).where(files.c.trial_id == trial_id, *where).values(path=moved)
    asked.writer.connection.execute(statement)


def _use(asked: Asked, given: Mapping[str, Any]) -> Fields:
    asked.check_may_list()
    number, document = _known(asked, given)
    place = checked_place(given.get("entityName"), given.get("projectName"), given.get("runName"))
    _, run = asked.known_run(place)
    change_document(
        asked.connection, _USE, "/".join(place), number, lambda _: True,
        experiment_id=run.experiment_id,
    )  # fmt: skip
    return {"artifact": _view(asked, number, document)}


def _update(asked: Asked, given: Mapping[str, Any]) -> Fields:
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
    return {"artifact": _view(asked, number, document)}


def _change_aliases(asked: Asked, is_added: bool, given: Mapping[str, Any]) -> Fields:
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


def _delete(asked: Asked, given: Mapping[str, Any]) -> Fields:
    asked.check_may_list()
    number, document = _known(asked, given)
    collection = get_document(
        asked.connection, COLLECTION, document["parent"], document["collection"]
    )
    names = [a for a, one in (collection or {}).get("aliases", {}).items() if one == number]
    if set(names) - {_LATEST} and not given.get("deleteAliases"):
        raise GraphqlError(f"An artifact with the aliases {names} can only be deleted with these.")

    def change(found: Any) -> Any:
        versions = [None if one == number else one for one in found["versions"]]
        digests = {key: one for key, one in found["digests"].items() if one != number}
        aliases = {key: one for key, one in found["aliases"].items() if one != number}
        there = [one for one in versions if one]
        if there and _LATEST not in aliases:
            aliases[_LATEST] = there[-1]
        return found | {"versions": versions, "digests": digests, "aliases": aliases}

    _change_collection(asked, document, change)
    files, prefix = tables.run_files, _prefix(number, document)
    where = (files.c.path >= prefix, files.c.path < prefix + "\U0010ffff")
    statement = files.delete().where(files.c.trial_id == document["trial_id"], *where)
    asked.connection.execute(statement)
    change_document(asked.connection, ARTIFACT, "", number, lambda _: None)
    return {"artifact": {"id": encode_id("Artifact", number)}}
