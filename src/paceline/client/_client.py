"""The client: all that can be asked of a master."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.client._checkpoint import Checkpoint
from paceline.client._cluster_client import ClusterClient
from paceline.client._code_context import pack_context
from paceline.client._event_stream import EventStream
from paceline.client._experiment import Experiment
from paceline.client._http_session import HttpSession
from paceline.client._trial import Trial

if TYPE_CHECKING:
    from paceline.config import ExperimentConfig
    from paceline.messages.events import Event
    from paceline.messages.experiments import Source
    from paceline.messages.master_info import MasterInfo, MasterStatus
    from paceline.messages.searches import SearchPreview
    from paceline.messages.tokens import CreatedToken, Token


class Client(ClusterClient):
    """A connection to one master.

    Args:
        master: The master's URL; by default `PACELINE_MASTER`, else the master that runs in
            `PACELINE_HOME`.
        token: The token; by default `PACELINE_TOKEN`, else the one in `PACELINE_HOME`.
        ca_file: The certificates (PEM) of authorities that are trusted; by default
            `PACELINE_CA_FILE`, else those that the system trusts.
    """

    def __init__(
        self,
        master: str | None = None,
        token: str | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._session = HttpSession(master, token, None if ca_file is None else os.fspath(ca_file))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._session.close()

    @property
    def url(self) -> str:
        """The master's URL."""
        return self._session.url

    def master(self) -> "MasterInfo":
        """Return what the master is and how busy it is."""
        from paceline.messages.master_info import MasterInfo

        return self._session.get("master", MasterInfo)

    def status(self) -> "MasterStatus | MasterInfo":
        """Return what the master is, how busy it is, and what is wrong.

        A master of before tells less.
        """
        from paceline.client._errors import ApiError
        from paceline.messages.master_info import MasterStatus

        try:
            return self._session.get("status", MasterStatus)
        except ApiError as error:
            if error.status != 404:
                raise
            return self.master()

    def shut_down(self, *, keep_trials: bool = False, timeout_s: float = 30.0) -> None:
        """Ask the master to stop; it answers before it does.

        Args:
            keep_trials: Leave running trials to go on without it.
            timeout_s: Seconds that trials get for a checkpoint otherwise.
        """
        from paceline.messages.master_info import Shutdown

        body = Shutdown(keep_trials=keep_trials, timeout_s=timeout_s).model_dump_json().encode()
        self._session.send("POST", "master/shutdown", content=body)

    def sign_in_link(self) -> str:
        """Return a link that signs a browser in, once."""
        from paceline.messages.sign_ins import SignInLink

        return self._session.call("POST", "sign-in-links", SignInLink).url

    def set_password(self, password: str, *, user: str = "admin") -> None:
        """Give a user a password for the web UI and end the user's sign-ins.

        Raises:
            ValueError: The password has fewer than 8 characters.
        """
        if len(password) < 8:
            raise ValueError("`password` must have at least 8 characters.")
        from paceline.messages.sign_ins import NewPassword

        body = NewPassword(password=password).model_dump_json().encode()
        self._session.send("PUT", f"users/{user}/password", content=body)

    def create_token(
        self,
        name: str,
        scope: Literal["read", "submit", "admin", "runner", "report"] = "read",
        *,
        expires_in_s: float | None = 90 * 24 * 3600.0,
        node: str | None = None,
        pool: str | None = None,
    ) -> "CreatedToken":
        """Make a token; its `secret` cannot be read again.

        Args:
            name: What to call it: letters, digits, ``_``, ``.`` and ``-``.
            scope: What it allows: to read everything, to submit and change experiments as well,
                everything, or to run the attempts of one node and nothing else.
            expires_in_s: Seconds until it expires; None for never.
            node: The only node that it registers, of a token of the scope `runner`; None for any.
            pool: The only pool that its nodes may be in; None for any.

        Raises:
            ValueError: An argument cannot be, or `node` or `pool` are given with another scope.
            ApiError: The master refused; `name_taken` if a token of that name is valid.
        """
        from paceline.messages.tokens import CreatedToken, TokenScope, make_new_token

        body = make_new_token(
            name=name, scope=TokenScope(scope), expires_in_s=expires_in_s, node=node, pool=pool
        )
        return self._session.call("POST", "tokens", CreatedToken, body=body)

    def list_tokens(self) -> "list[Token]":
        """Return the tokens without their secrets, the newest first."""
        from paceline.messages.tokens import Token

        return self._session.get("tokens", list[Token])

    def revoke_token(self, token: "int | str") -> "Token":
        """Revoke a token for good and return it.

        Args:
            token: Its id, or the name of a token that is not revoked.

        Raises:
            LookupError: There is no such token.
        """
        found = [
            one
            for one in self.list_tokens()
            if one.id == token or (one.name == token and one.revoked_at is None)
        ]
        if not found:
            raise LookupError(f"`token` must be the id or name of a token, but got {token!r}.")
        self._session.send("DELETE", f"tokens/{found[0].id}")
        return found[0]

    def renew_home_token(self) -> str:
        """Put another token in place of that of the master's home, and return it."""
        from paceline.messages.tokens import HomeToken

        return self._session.call("PUT", "home-token", HomeToken).secret

    def create_experiment(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        model_dir: str | Path | None = None,
        activate: bool = True,
        *,
        overrides: Sequence[str] = (),
        submitted_config: str | None = None,
    ) -> Experiment:
        """Check a configuration, send the code and create an experiment.

        Args:
            config: The configuration, or the path of a YAML file that holds it.
            model_dir: The directory with the code; None sends none, also when `config` is a file.
            activate: Whether to start at once; otherwise the experiment waits, paused.
            overrides: Changes of the configuration, such as "searcher.max_trials=4".
            submitted_config: The text to show as what was submitted; by default the file's.

        Raises:
            ConfigError: The configuration is wrong.
            ContextError: The directory cannot be sent.
            ApiError: The master refused.
            MasterUnreachableError: No master answers.
        """
        from paceline.messages.experiments import CreateExperiment
        from paceline.messages.experiments import Experiment as ExperimentData

        checked = _load_config(config, overrides)
        if checked.environment.uv:
            _check_lock(Path() if model_dir is None else Path(model_dir))
        digest = None if model_dir is None else self._upload_context(Path(model_dir))
        body = CreateExperiment(
            config=checked.to_json(),
            submitted_config=submitted_config or _submitted_text(config),
            context_digest=digest,
            activate=activate,
            source=None if model_dir is None else _git_source_of(Path(model_dir)),
        )
        data = self._session.call("POST", "experiments", ExperimentData, body=body, has_key=True)
        return Experiment(self._session, data)

    def preview_search(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        *,
        overrides: Sequence[str] = (),
    ) -> "SearchPreview":
        """Return how many trials a configuration's search would train how long."""
        from paceline.messages.searches import PreviewSearch, SearchPreview

        body = PreviewSearch(config=_load_config(config, overrides).to_json())
        return self._session.call("POST", "preview-search", SearchPreview, body=body)

    def get_experiment(self, experiment_id: int) -> Experiment:
        """Return an experiment by its number."""
        from paceline.messages.experiments import Experiment as ExperimentData

        data = self._session.get(f"experiments/{experiment_id}", ExperimentData)
        return Experiment(self._session, data)

    def list_experiments(
        self,
        *,
        state: str | None = None,
        limit: int | None = None,
        archived: Literal["no", "only", "all"] = "no",
    ) -> list[Experiment]:
        """Return experiments, the newest first.

        Args:
            state: Only those in this state, such as "ACTIVE".
            limit: At most this many.
            archived: Whether those in the archive are left out, alone or among the others.
        """
        from paceline.messages.experiments import Experiment as ExperimentData

        pages = self._session.pages(
            "experiments", ExperimentData, limit=limit, state=state, archived=archived
        )
        return [Experiment(self._session, data) for data in pages]

    def get_trial(self, trial_id: int) -> Trial:
        """Return a trial by its number, with its summary and attempts."""
        from paceline.messages.trials import Trial as TrialData

        return Trial(self._session, self._session.get(f"trials/{trial_id}", TrialData))

    def get_checkpoint(self, uuid: str) -> Checkpoint:
        """Return a checkpoint by its UUID."""
        from paceline.messages.checkpoints import Checkpoint as CheckpointData

        data = self._session.get(f"checkpoints/{uuid}", CheckpointData)
        return Checkpoint(self._session, data)

    def events(
        self, *, after: int | None = None, experiment_id: int | None = None
    ) -> "Iterator[Event]":
        """Yield events for ever; goes on after the last one when the connection breaks.

        Args:
            after: The cursor (`Event.id`) to start after; None for new events only.
            experiment_id: Only events of this experiment.

        Raises:
            ApiError: The master refused.
            MasterUnreachableError: No master answered for ten minutes.
        """
        stream = EventStream(self._session, after=after, experiment_id=experiment_id)
        return (event for event in stream if event is not None)

    def _upload_context(self, directory: Path) -> str:
        with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
            digest = pack_context(directory, file)
            file.flush()
            self._session.send("PUT", f"contexts/{digest}", content=Path(file.name))
        return digest


def _load_config(
    config: "ExperimentConfig | dict[str, Any] | str | Path", overrides: Sequence[str]
) -> "ExperimentConfig":
    from paceline.config import ExperimentConfig, load_config

    if isinstance(config, ExperimentConfig):
        return load_config(config.to_json(), overrides) if overrides else config
    return load_config(config, overrides)


def _submitted_text(config: "ExperimentConfig | dict[str, Any] | str | Path") -> str | None:
    """Return the configuration as the user wrote it, to show it with the experiment."""
    if isinstance(config, (str, Path)):
        return Path(config).read_text(encoding="utf-8")
    if isinstance(config, dict):
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False))
    return None


def _check_lock(directory: Path) -> None:
    from paceline.client._errors import ContextError
    from paceline.runner import LOCK_NAME, missing_lock

    if not (directory / LOCK_NAME).is_file():
        raise ContextError(missing_lock(directory))


def _git_source_of(directory: Path) -> "Source | None":
    from paceline.core import describe_source
    from paceline.messages.experiments import Source

    found = describe_source(directory)
    return None if found is None else Source(**found)
