"""Names for models, with versions and aliases."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paceline.client import _late_models as models
from paceline.client._checkpoint import Checkpoint, filled_directory
from paceline.client._http_session import ApiError, DownloadError, HttpSession

if TYPE_CHECKING:
    pass


_ROUTES = "/api/2.0/mlflow"
_FILES = "/api/2.0/mlflow-artifacts/artifacts"
_CHECKPOINT, _ARTIFACTS, _LOGGED = "checkpoint:/", "mlflow-artifacts:/", "models:/m-"
_PAGE = 1000


class RegistryClient:
    """Part of a client for registered models, shared with MLflow's clients."""

    _session: HttpSession

    def list_models(self) -> "list[models.RegisteredModel]":
        """Return the user's visible registered models, by name, without their versions."""
        pages = self._registered_pages("registered-models/search")
        return [_model_of(one) for one in pages]

    def get_model(self, name: str) -> "models.RegisteredModel":
        """Return a registered model with its versions, the newest first.

        Raises:
            ApiError: There is no such model.
        """
        found = self._registry("GET", "registered-models/get", name=name)["registered_model"]
        text = f"name = '{name}'" if "'" not in name else f'name = "{name}"'
        versions = self._registered_pages("model-versions/search", filter=text)
        shown = sorted(map(_version_of, versions), key=lambda one: -one.version)
        return _model_of(found).model_copy(update={"versions": shown})

    def register_model(
        self, name: str, checkpoint: str, *, alias: str | None = None, notes: str = ""
    ) -> "models.ModelVersion":
        """Make a checkpoint the next version of a new or known model.

        The checkpoint is then neither deleted by a retention policy nor by people.

        Args:
            name: The model's name.
            checkpoint: The UUID.
            alias: An alias to set to the version.
            notes: Notes about the version.

        Raises:
            ApiError: There is no such checkpoint, or the name cannot be.
        """
        self.get_checkpoint(checkpoint)
        is_new = False
        try:
            self._registry("GET", "registered-models/get", name=name)
        except ApiError as error:
            if error.status != 404:
                raise
            self._registry("POST", "registered-models/create", name=name)
            is_new = True
        source = f"{_CHECKPOINT}{checkpoint}"
        try:
            made = self._registry(
                "POST", "model-versions/create", name=name, source=source, description=notes
            )
        except ApiError:
            if is_new:  # Or the name would be taken on the whole master, by a model of nothing.
                self.delete_model(name)
            raise
        version = _version_of(made["model_version"])
        if alias is not None:
            self.set_model_alias(name, alias, version.version)
            version = version.model_copy(update={"aliases": [alias]})
        return version

    def set_model_alias(self, name: str, alias: str, version: int | None) -> None:
        """Let an alias such as "champion" mean a version of a model; None takes it away.

        Raises:
            ApiError: There is no such model or version.
        """
        if version is None:
            self._registry("DELETE", "registered-models/alias", name=name, alias=alias)
        else:
            fields = {"name": name, "alias": alias, "version": str(version)}
            self._registry("POST", "registered-models/alias", **fields)

    def delete_model(self, name: str, *, version: int | None = None) -> None:
        """Delete a model's name and versions, or a single version; checkpoints and files stay.

        Raises:
            ApiError: There is no such model or version.
        """
        if version is None:
            self._registry("DELETE", "registered-models/delete", name=name)
        else:
            self._registry("DELETE", "model-versions/delete", name=name, version=str(version))

    def download_model(
        self, name: str, path: str | Path, *, version: int | None = None, alias: str | None = None
    ) -> Path:
        """Copy the files of a model's version into a new or empty directory, and return that.

        Args:
            name: The model's name.
            path: The directory.
            version: The version; without one and without an alias the newest.
            alias: An alias instead.

        Raises:
            ApiError: There is no such model, version or alias.
            DownloadError: The directory holds files already, or the files are elsewhere.
        """
        found = self._find_version(name, version, alias)
        target = Path(path)
        if found.location.startswith(_CHECKPOINT):
            uuid = found.location.removeprefix(_CHECKPOINT)
            return self.get_checkpoint(uuid).download(target)
        place = self._artifact_place(found)
        with filled_directory(target) as partial:
            for name_below in self._files_below(place, ""):
                file = partial / name_below
                file.parent.mkdir(parents=True, exist_ok=True)
                address = f"{self._session.url}{_FILES}/{quote(f'{place}/{name_below}')}"
                self._session.stream_to_file(address, file)
        return target

    def get_checkpoint(self, uuid: str) -> Checkpoint:
        """Return a checkpoint by its UUID."""
        data = self._session.get(f"checkpoints/{uuid}", models.Checkpoint)
        return Checkpoint(self._session, data)

    def _find_version(
        self, name: str, version: int | None, alias: str | None
    ) -> "models.ModelVersion":
        if alias is not None:
            found = self._registry("GET", "registered-models/alias", name=name, alias=alias)
            return _version_of(found["model_version"])
        if version is not None:
            fields = {"name": name, "version": str(version)}
            return _version_of(
                self._registry("GET", "model-versions/get", **fields)["model_version"]
            )
        versions = self.get_model(name).versions
        if not versions:
            raise DownloadError(f"The model {name!r} must have a version, but has none.")
        return versions[0]

    def _artifact_place(self, version: "models.ModelVersion") -> str:
        location = version.location
        if location.startswith(_LOGGED):
            path = f"logged-models/{quote(location.removeprefix('models:/'), safe='')}"
            location = self._registry("GET", path)["model"]["info"]["artifact_uri"]
        if not location.startswith(_ARTIFACTS):
            raise DownloadError(
                f"The files of the version must lie with the master, but lie at {location!r}."
            )
        return location.removeprefix(_ARTIFACTS).strip("/")

    def _files_below(self, place: str, below: str) -> Iterator[str]:
        from paceline._base.run_directory import check_file_path

        address = f"{self._session.url}{_FILES}"
        path = f"{place}/{below}".rstrip("/")
        for file in self._ask("GET", address, {"path": path})["files"]:
            # Names come from whoever logged the model: none may lead out of the target.
            name = check_file_path(f"{below}/{file['path']}".lstrip("/"))
            if file["is_dir"]:
                yield from self._files_below(place, name)
            else:
                yield name

    def _registered_pages(self, route: str, **given: str) -> Iterator[dict[str, Any]]:
        token: str | None = None
        while True:
            more = {} if token is None else {"page_token": token}
            found = self._registry("GET", route, max_results=str(_PAGE), **given, **more)
            yield from found.get("registered_models", found.get("model_versions", []))
            token = found.get("next_page_token")
            if not token:
                return

    def _registry(self, method: str, route: str, **given: str) -> Any:
        return self._ask(method, f"{self._session.url}{_ROUTES}/{route}", given)

    def _ask(self, method: str, address: str, given: Mapping[str, str]) -> Any:
        if method == "GET":
            return json.loads(self._session.send(method, address, params=given).content)
        content = json.dumps(given).encode()
        return json.loads(self._session.send(method, address, content=content).content)


def _model_of(found: Mapping[str, Any]) -> "models.RegisteredModel":
    newest = [int(one["version"]) for one in found.get("latest_versions", [])]
    return models.RegisteredModel(
        name=found["name"],
        notes=found["description"],
        aliases={one["alias"]: int(one["version"]) for one in found["aliases"]},
        newest_version=max(newest, default=None),
        changed_at=found["last_updated_timestamp"] / 1000,
        versions=[],
    )


def _version_of(found: Mapping[str, Any]) -> "models.ModelVersion":
    return models.ModelVersion(
        version=int(found["version"]),
        source=found["source"],
        location=found["location"],
        notes=found["description"],
        aliases=found["aliases"],
        owner=found["user_id"],
        run_id=found["run_id"] or None,
        created_at=found["creation_timestamp"] / 1000,
    )
