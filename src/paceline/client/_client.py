"""Client of a master: all its calls, as methods and as plain functions."""

import atexit
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from paceline.client import _late_models as models
from paceline.client._checkpoint import Checkpoint
from paceline.client._event_stream import EventStream
from paceline.client._experiment_and_trial import Experiment, Trial
from paceline.client._experiment_lineage import upload_code
from paceline.client._http_session import (
    MASTER_VARIABLE,
    TOKEN_VARIABLE,
    HttpSession,
    checked_key,
    home_directory,
)
from paceline.client._interactive_streams import InteractiveClient
from paceline.client._model_registry import RegistryClient
from paceline.client._projects_and_rules import ProjectClient, load_given_config

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import BulkWord
    from paceline.config._experiment_config import ExperimentConfig


# Few enough that a cut connection leaves little undone, and progress shows.
_IDS_PER_REQUEST = 50


class BulkClient:
    """Part of a client for actions on many experiments and checkpoints."""

    _session: HttpSession

    def preview_action(
        self,
        action: "BulkWord",
        query: str,
        *,
        archived: Literal["no", "only", "all"] = "no",
        to: str | None = None,
        add_labels: Sequence[str] = (),
        remove_labels: Sequence[str] = (),
    ) -> "models.BulkPreview":
        """Return the preview of an action on the experiments of a query.

        Args:
            action: "pause", "activate", "cancel", "kill", "archive", "unarchive", "delete",
                "move" or "label".
            query: As for `list_trials`.
            archived: Whether those in the archive are left out, alone or among the others.
            to: The project into which "move" puts them.
            add_labels: Labels that "label" adds,
            remove_labels: and those that it takes away.

        Raises:
            ApiError: The query has an error, or the arguments do not fit the action.
        """

        return self._session.get(
            "bulk-preview",
            models.BulkPreview,
            action=action,
            query=query,
            archived=archived,
            to=to,
            add_label=list(add_labels) or None,
            remove_label=list(remove_labels) or None,
        )

    def act_on(
        self,
        action: "BulkWord",
        experiment_ids: Sequence[int],
        *,
        to: str | None = None,
        add_labels: Sequence[str] = (),
        remove_labels: Sequence[str] = (),
    ) -> "Iterator[models.BulkResult]":
        """Apply an action to experiments, in pieces, and yield how each went.

        Each experiment is changed as a whole or not at all. After a cut, those that are not done
        are as they were. The arguments are those of `preview_action`.

        Raises:
            ApiError: The arguments do not fit the action.
        """

        for start in range(0, len(experiment_ids), _IDS_PER_REQUEST):
            body = models.BulkAction(
                action=action,
                experiment_ids=list(experiment_ids[start : start + _IDS_PER_REQUEST]),
                to=to,
                add_labels=list(add_labels),
                remove_labels=list(remove_labels),
            )
            yield from self._session.call(
                "POST", "bulk-actions", list[models.BulkResult], body=body
            )

    def preview_checkpoint_deletion(
        self, query: str, *, keep_best: int = 0, keep_latest: int = 0
    ) -> "models.CheckpointPreview":
        """Return the preview of a deletion of the checkpoints of a query's trials.

        Checkpoints stay that a trial needs: its own before its end, or one that it starts from.

        Args:
            query: As for `list_trials`; archived experiments count too.
            keep_best: So many checkpoints of each trial stay, those with the best metric,
            keep_latest: and so many that have the most batches.

        Raises:
            ApiError: The query has an error.
        """

        return self._session.get(
            "checkpoint-preview",
            models.CheckpointPreview,
            query=query,
            keep_best=keep_best,
            keep_latest=keep_latest,
        )


class ClusterClient:
    """Part of a client for nodes, pools and the queue."""

    _session: HttpSession

    def slots(self) -> "list[models.Slot]":
        """Return the master's slots and who uses them."""

        return self._session.get("slots", list[models.Slot])

    def drain_slot(self, node: str, slot: int, *, finish: bool = False) -> None:
        """Drain a slot: nothing more is placed there.

        Args:
            node: The name of its node; `local` is the master's own machine.
            slot: Its number on the node.
            finish: A trial that runs there ends there; otherwise it stores a checkpoint and
                resumes elsewhere.

        Raises:
            ApiError: There is no such slot.
        """
        self._drain(f"nodes/{node}/slots/{slot}/drain", finish)

    def resume_slot(self, node: str, slot: int) -> None:
        """Take a drained slot back; raises like `drain_slot`."""
        self._session.send("POST", f"nodes/{node}/slots/{slot}/resume")

    def nodes(self, *, include_local: bool = False) -> "list[models.Node]":
        """Return the machines with registered runners, and the work running there.

        Args:
            include_local: Put the master's own machine before them, as the node `local`, if it has
                slots.
        """

        return self._session.get("nodes", list[models.Node], include_local=include_local or None)

    def drain_node(self, name: str, *, finish: bool = False) -> None:
        """Place nothing more on a node.

        Args:
            name: The node's name.
            finish: Trials that run there end there; otherwise they store a checkpoint and continue
                elsewhere.

        Raises:
            ApiError: There is no such node.
        """
        self._drain(f"nodes/{name}/drain", finish)

    def resume_node(self, name: str) -> None:
        """Take a drained node back; raises like `drain_node`."""
        self._session.send("POST", f"nodes/{name}/resume")

    def reserve_node(
        self, name: str, *, user: str, begins_at: float, ends_at: float
    ) -> "models.Reservation":
        """Reserve a node for the trials of a user.

        Args:
            name: The node's name.
            user: The user.
            begins_at: Its beginning in seconds since the epoch. Trials of others leave then.
            ends_at: Its end.

        Raises:
            ApiError: There is no such node or user, or the end is not later.
        """

        body = models.NewReservation(user=user, begins_at=begins_at, ends_at=ends_at)
        path = f"nodes/{name}/reservations"
        return self._session.call("POST", path, models.Reservation, body=body)

    def end_reservation(self, name: str, reservation_id: int) -> None:
        """End a reservation of a node, also before it began."""
        self._session.send("DELETE", f"nodes/{name}/reservations/{reservation_id}")

    def forget_node(self, name: str) -> None:
        """Forget a node in the state lost, left or drained.

        Raises:
            ApiError: There is no such node, or it has attempts, or is not lost,
                has not left and is not drained.
        """
        self._session.send("DELETE", f"nodes/{name}")

    def pools(self) -> "list[models.Pool]":
        """Return the pools with nodes or settings."""

        return self._session.get("pools", list[models.Pool])

    def notify_channels(self) -> "list[models.NotifyChannel]":
        """Return the channels for messages to people, without their addresses."""

        return self._session.get("notify-channels", list[models.NotifyChannel])

    def test_notify_channel(self, name: str) -> "models.NotifyTest":
        """Send a test message to a channel, and return the outcome.

        Args:
            name: The name of the channel.

        Raises:
            ApiError: There is no such channel, or the token is not an administrator's.
        """

        return self._session.call("POST", f"notify-channels/{name}/test", models.NotifyTest)

    def set_pool(
        self,
        name: str,
        *,
        policy: "models.Policy" = "fifo",
        max_slots: int | None = None,
        labels: Mapping[str, str] | None = None,
        **rules: Any,
    ) -> None:
        """Set the sharing rules of a pool; arguments not given get their defaults.

        Args:
            name: The name of the pool; there need be no node in it yet.
            policy: `fifo`, `priority` or `fair_share`.
            max_slots: How many of its slots may be in use at once; None is no limit.
            labels: Nodes that have all of these, and name no pool themselves, belong to it.
            rules: `backfill`: whether trials run in the gap in front of one that needs more slots
                than are free; they store a checkpoint and leave once it has room.
                `half_life_hours`: under `fair_share`, past use counts by half for each so many
                hours. `silent_after_s` and `unused_after_s`: seconds without a report of a trial,
                or without use of its slots, after which there is an alert; `pause_after_s` after
                it, its experiment is paused. `open_to`: users, groups (`@NAME`) and projects
                (`project:NAME`) whose trials it takes. `best_priority`: the best one that only
                administrators of a project exceed. `own_runners`: whether trials start only on
                runners of their user. `interactive_first`: hours in which interactive trials come
                first, such as `09:00-18:00 mon-fri Europe/Berlin`.

        Raises:
            ApiError: One of them is not possible.
        """

        fields = {"policy": policy, "max_slots": max_slots, "labels": dict(labels or {}), **rules}
        body = models.SetPool.model_validate(fields)
        self._session.send("PUT", f"pools/{name}", body=body)

    def reset_pool(self, name: str) -> None:
        """Share a pool first come, first served, without a limit and without labels.

        Raises:
            ApiError: It has no settings.
        """
        self._session.send("DELETE", f"pools/{name}")

    def queue(self, *, pool: str | None = None, limit: int = 100) -> "list[models.QueueEntry]":
        """Return the trials waiting for slots, the next first, with the reason of each wait."""

        return self._session.get("queue", list[models.QueueEntry], pool=pool, limit=limit)

    def move_in_queue(
        self,
        experiment_id: int,
        *,
        ahead_of: int | None = None,
        behind: int | None = None,
        to: Literal["front", "end"] | None = None,
    ) -> None:
        """Move an experiment in the queue of its pool, among experiments of the same priority.

        Args:
            experiment_id: The experiment.
            ahead_of: It goes right ahead of this experiment,
            behind: or right behind this one,
            to: or to an end of the queue.

        Raises:
            ApiError: One of them has ended or waits in another pool, or not exactly one is given.
        """

        body = models.MoveExperiment(
            experiment_id=experiment_id, ahead_of=ahead_of, behind=behind, to=to
        )
        self._session.send("POST", "queue/move", body=body)

    def _drain(self, path: str, finish: bool) -> None:

        self._session.send("POST", path, body=models.DrainNode(finish=finish))


class Client(ClusterClient, BulkClient, ProjectClient, RegistryClient, InteractiveClient):
    """Connection to a master.

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

    def scope(self) -> str | None:
        """Return the scope of the token, such as "read"; None if the master does not know it."""

        return self._session.get("session", models.Session).scope

    def master(self) -> "models.MasterInfo":
        """Return the master's facts and its load."""

        return self._session.get("master", models.MasterInfo)

    def status(self) -> "models.MasterStatus":
        """Return the master's facts, its load and its problems."""

        return self._session.get("status", models.MasterStatus)

    def shut_down(self, *, keep_trials: bool = False, timeout_s: float = 30.0) -> None:
        """Ask the master to stop; the answer comes before the stop.

        Args:
            keep_trials: Leave running trials to continue without it.
            timeout_s: Seconds that trials get for a checkpoint otherwise.
        """

        body = models.Shutdown(keep_trials=keep_trials, timeout_s=timeout_s)
        self._session.send("POST", "master/shutdown", body=body)

    def sign_in_link(self, *, user: str | None = None) -> str:
        """Return a link to sign a browser in as a user, by default this client's, usable once."""

        params = {"user": user}
        return self._session.call("POST", "sign-in-links", models.SignInLink, params=params).url

    def add_user(
        self,
        name: str,
        *,
        role: Literal["viewer", "editor", "admin"] | None = "editor",
        is_admin: bool = False,
        is_service: bool = False,
    ) -> "models.User":
        """Add a user; one that was removed comes back.

        Args:
            name: The name: letters, digits, ``_``, ``.`` and ``-``.
            role: The role in the project `Default`; None for none.
            is_admin: Whether the user sees and changes everything.
            is_service: Whether it is a program.

        Raises:
            ValueError: The name is none.
            ApiError: The master refused; `name_taken` if another user has it.
        """

        fields = {"role": role, "is_admin": is_admin, "is_service": is_service}
        body = models.NewUser.model_validate({"name": name, **fields})
        return self._session.call("POST", "users", models.User, body=body)

    def list_users(self) -> "list[models.User]":
        """Return the users by name, with those that were removed."""

        return self._session.get("users", list[models.User])

    def remove_user(self, name: str) -> None:
        """Remove a user: tokens and sign-ins end, experiments and their trials stay."""
        self._session.send("DELETE", f"users/{quote(name, safe='')}")

    def set_admin(self, name: str, is_admin: bool) -> None:
        """Make a user an administrator, or take that right."""
        body = json.dumps({"is_admin": is_admin}).encode()
        self._session.send("PATCH", f"users/{quote(name, safe='')}", content=body)

    def set_group(self, name: str, group: str | None) -> None:
        """Put a user into a group; None for no group. A group ends with its last member."""
        body = json.dumps({"group": group or ""}).encode()
        self._session.send("PATCH", f"users/{quote(name, safe='')}", content=body)

    def link_user(self, name: str, subject: str | None) -> None:
        """Link a user to a person at the master's provider of OpenID Connect.

        Args:
            name: The user.
            subject: The provider's id of the person (``sub``); ``*`` for the first one of the
                user's name who signs in; None to end the link.

        Raises:
            ApiError: The master refused; `subject_taken` if the person is another user.
        """
        body = json.dumps({"oidc_subject": subject or ""}).encode()
        self._session.send("PATCH", f"users/{quote(name, safe='')}", content=body)

    def set_role(
        self,
        name: str,
        role: Literal["viewer", "editor", "admin"] | None,
        *,
        project: str = "Default",
    ) -> None:
        """Give a user, or a group as `@NAME`, a role in a project; None for none."""
        path = f"projects/{quote(project, safe='')}/members/{quote(name, safe='')}"
        self._session.send("PUT", path, content=json.dumps({"role": role}).encode())

    def storages(self) -> "list[models.Storage]":
        """Return the storages of checkpoints in use: health, and bytes by project and user."""

        return self._session.get("storages", list[models.Storage])

    def quotas(self) -> "list[models.Quota]":
        """Return quotas and what counts against them: one's own, and those of seen projects."""

        return self._session.get("quotas", list[models.Quota])

    def set_quota(
        self,
        *,
        user: str | None = None,
        project: str | None = None,
        group: str | None = None,
        revision: int = 0,
        **limits: float | None,
    ) -> None:
        """Set share and limits of a user, a group or a project.

        Args:
            user: The user, or else
            project: the project, or else
            group: the group.
            revision: The revision that the change began from; 0 if there is no quota yet.
            limits: `weight`, `max_slots`, `slot_hours` a month, `checkpoint_bytes` and
                `media_bytes`; those not given get their defaults: 1, and no limit.

        Raises:
            ApiError: `quota_changed` if it was changed since `revision`.
            ValueError: A limit is out of its range.
        """

        body = models.SetQuota.model_validate({**limits, "revision": revision})
        path = self._quota_path(user, project, group)
        self._session.send("PUT", path, body=body)

    def delete_quota(
        self,
        *,
        user: str | None = None,
        project: str | None = None,
        group: str | None = None,
        revision: int,
    ) -> None:
        """Delete share and limits; arguments and errors are those of `set_quota`."""
        path = self._quota_path(user, project, group)
        self._session.send("DELETE", path, params={"revision": revision})

    def _quota_path(self, user: str | None, project: str | None, group: str | None) -> str:
        given = {"user": user, "project": project, "group": group}
        found = [(kind, name) for kind, name in given.items() if name is not None]
        if len(found) != 1:
            raise ValueError(
                f"One of `user`, `project` and `group` must be given, but got {given}."
            )
        kind, name = found[0]
        return f"quotas/{kind}/{quote(name, safe='')}"

    def audit(self, *, user: str | None = None, limit: int = 100) -> "list[models.AuditEntry]":
        """Return who changed what, the newest first; of one user if given."""

        return self._session.get("audit", list[models.AuditEntry], user=user, limit=limit)

    def usage(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        by: "Sequence[str] | None" = None,
    ) -> "list[models.Usage]":
        """Return the slot hours that trials used, most first, of the projects that the user sees.

        Args:
            since: The first month, such as ``"2026-11"``, in UTC; this one by default.
            until: The last month; this one by default.
            by: Which of "month", "user", "project" and "pool" tell rows apart; all by default.
        """
        return self._session.get("usage", list[models.Usage], since=since, until=until, by=by)

    def log_in(self, user: str, password: str, *, name: str) -> "models.CreatedToken":
        """Make a token for all that a user may do, by the user's password.

        Args:
            user: The user.
            password: The user's password.
            name: The token's name.

        Raises:
            ApiError: The password is wrong, or `name_taken` if a token of that name is valid.
        """

        body = models.LoginForToken(user=user, password=password, name=name)
        return self._session.call("POST", "login-token", models.CreatedToken, body=body)

    def log_in_by_code(self, code: str, verifier: str, *, name: str) -> "models.CreatedToken":
        """Make a token for all that a user may do, by a code that a browser was shown.

        Args:
            code: The code.
            verifier: The text from which the `challenge` in the browser's address was made.
            name: The token's name.

        Raises:
            ValueError: The code or the verifier is too long or too short.
            ApiError: The code is not valid.
        """

        body = models.OidcCode(code=code, verifier=verifier, name=name)
        return self._session.call("POST", "oidc/token", models.CreatedToken, body=body)

    def session(self) -> "models.Session":
        """Return as whom this client acts, and whether the master has several users."""

        return self._session.get("session", models.Session)

    def set_password(self, password: str, *, user: str = "admin") -> None:
        """Give a user a password for the web UI and end the user's sign-ins.

        Raises:
            ValueError: The password has fewer than 8 characters.
        """
        if len(password) < 8:
            raise ValueError("`password` must have at least 8 characters.")

        body = models.NewPassword(password=password)
        self._session.send("PUT", f"users/{user}/password", body=body)

    def create_token(
        self,
        name: str,
        scope: Literal["read", "submit", "admin", "runner", "report"] = "read",
        *,
        expires_in_s: float | None = 90 * 24 * 3600.0,
        node: str | None = None,
        pool: str | None = None,
        user: str | None = None,
    ) -> "models.CreatedToken":
        """Make a token; its `secret` cannot be read again.

        Args:
            name: Its name: letters, digits, ``_``, ``.`` and ``-``.
            scope: Its rights: to read everything, to submit and change experiments as well,
                everything, or to run the attempts of one node and nothing else.
            expires_in_s: Seconds until it expires; None for never.
            node: The only node that it registers, of a token of the scope `runner`; None for any.
            pool: The only pool that its nodes may be in; None for any.
            user: The user as whom it acts; by default this client's.

        Raises:
            ValueError: An argument cannot be, or `node` or `pool` are given with another scope.
            ApiError: The master refused; `name_taken` if a token of that name is valid.
        """

        body = models.make_new_token(
            name=name,
            scope=models.TokenScope(scope),
            expires_in_s=expires_in_s,
            node=node,
            pool=pool,
            user=user,
        )
        return self._session.call("POST", "tokens", models.CreatedToken, body=body)

    def list_tokens(self) -> "list[models.Token]":
        """Return the tokens without their secrets, the newest first."""

        return self._session.get("tokens", list[models.Token])

    def revoke_token(self, token: "int | str") -> "models.Token":
        """Revoke a token for good and return the token.

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
        """Replace the token of the master's home, and return the new token."""

        return self._session.call("PUT", "home-token", models.HomeToken).secret

    def create_experiment(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        model_dir: str | Path | None = None,
        activate: bool = True,
        *,
        overrides: Sequence[str] = (),
        submitted_config: str | None = None,
        key: str | None = None,
        project: str | None = None,
        template: str | None = None,
    ) -> Experiment:
        """Check a configuration, send the code and create an experiment.

        Fields that the configuration leaves open are taken from templates and policies, as
        `resolve_config` tells.

        Args:
            config: The configuration, or the path of a YAML file that holds it.
            model_dir: The directory with the code; None sends none, also when `config` is a file.
            activate: Whether to start at once; otherwise the experiment waits, paused.
            overrides: Changes of the configuration, such as "searcher.max_trials=4".
            submitted_config: The text to show as submitted; by default the file's text.
            key: A key of your own: a call that is repeated with it within a day returns the
                experiment of the first call.
            project: The project; by default `Default`, or else the first one in which the user is
                an editor.
            template: The template of the project, or of all projects, for fields that are open.

        Raises:
            ConfigError: The configuration is wrong, or does not meet a policy.
            ContextError: The directory cannot be sent.
            ApiError: The master refused; `key_reused` if the key belongs to another request.
            MasterUnreachableError: No master answers.
        """

        checked = self.resolve_config(config, overrides, project=project, template=template)
        if checked.environment.uv:
            _check_lock(Path() if model_dir is None else Path(model_dir))
        body = models.CreateExperiment(
            config=checked.to_json(),
            submitted_config=submitted_config or _submitted_text(config),
            activate=activate,
            project=project,
            template=template,
            **upload_code(self._session, model_dir),
        )
        data = self._session.call(
            "POST", "experiments", models.Experiment, body=body, key=checked_key(key)
        )
        return Experiment(self._session, data)

    def preview_search(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        *,
        overrides: Sequence[str] = (),
    ) -> "models.SearchPreview":
        """Return how many trials a configuration's search would train how long."""

        body = models.PreviewSearch(config=load_given_config(config, overrides).to_json())
        return self._session.call("POST", "preview-search", models.SearchPreview, body=body)

    def get_experiment(self, experiment_id: int) -> Experiment:
        """Return an experiment by its number."""

        data = self._session.get(f"experiments/{experiment_id}", models.Experiment)
        return Experiment(self._session, data)

    def list_experiments(
        self,
        *,
        state: str | None = None,
        limit: int | None = None,
        archived: Literal["no", "only", "all"] = "no",
        labels: Sequence[str] = (),
        where: Sequence[Sequence[Any]] = (),
        query: str | None = None,
        owner: str | None = None,
        project: str | None = None,
    ) -> list[Experiment]:
        """Return experiments, the newest first.

        Args:
            state: Only those in this state, such as "ACTIVE".
            limit: At most this many.
            archived: Whether those in the archive are left out, alone or among the others.
            labels: Only those with all of these labels.
            where: Only those that meet all of these conditions, each a column, an operator and a
                value, such as ``("name", "contains", "mnist")`` or ``("created_at", ">=", 1.7e9)``.
            query: Only those with a trial that this query describes; see `list_trials`.
            owner: Only those of this user.
            project: Only those in this project.
        """

        pages = self._session.pages(
            "experiments",
            models.Experiment,
            limit=limit,
            state=state,
            archived=archived,
            label=list(labels) or None,
            query=query,
            owner=owner,
            project=project,
            where=[json.dumps(list(condition)) for condition in where] or None,
        )
        return [Experiment(self._session, data) for data in pages]

    def list_trials(self, query: str | None = None, *, limit: int = 1000) -> list[Trial]:
        """Return trials of all experiments but archived ones, the newest first.

        Args:
            query: Only those that it describes, such as ``"lr < 0.01 and tag:baseline"``.
            limit: At most this many, up to 1,000.

        Raises:
            ApiError: The query has an error, or the limit is out of range.
        """
        from paceline._cluster.messages.experiment_models import TrialSet

        found = self._session.get("trials", TrialSet, query=query, limit=limit)
        return [Trial(self._session, data) for data in found.items]

    def get_trial(self, trial_id: int) -> Trial:
        """Return a trial by its number, with its summary and attempts."""

        return Trial(self._session, self._session.get(f"trials/{trial_id}", models.Trial))

    def find_checkpoints(self, prefix: str, *, limit: int = 20) -> list[Checkpoint]:
        """Return the checkpoints whose UUIDs begin with a text of at least 4 characters."""

        found = self._session.get(
            "checkpoints", list[models.Checkpoint], prefix=prefix, limit=limit
        )
        return [Checkpoint(self._session, data) for data in found]

    def events(
        self, *, after: int | None = None, experiment_id: int | None = None
    ) -> "Iterator[models.Event]":
        """Yield events for ever; resume after the last event when the connection breaks.

        Args:
            after: The cursor (`Event.id`) to start after; None for new events only.
            experiment_id: Only events of this experiment.

        Raises:
            ApiError: The master refused.
            MasterUnreachableError: No master answered for ten minutes.
        """
        stream = EventStream(self._session, after=after, experiment_id=experiment_id)
        return (event for event in stream if event is not None)


def _submitted_text(config: "ExperimentConfig | dict[str, Any] | str | Path") -> str | None:
    """Return the configuration as written by the user, to show with the experiment."""
    if isinstance(config, (str, Path)):
        return Path(config).read_text(encoding="utf-8")
    if isinstance(config, dict):
        import yaml

        return str(yaml.safe_dump(config, sort_keys=False))
    return None


def _check_lock(directory: Path) -> None:
    from paceline._cluster.runner.attempt_preparation import LOCK_NAME, missing_lock
    from paceline.client._http_session import ContextError

    if not (directory / LOCK_NAME).is_file():
        raise ContextError(missing_lock(directory))


def create_experiment(
    config: "ExperimentConfig | dict[str, Any] | str | Path",
    model_dir: str | Path | None = None,
    activate: bool = True,
) -> Experiment:
    """Create an experiment; see `Client.create_experiment`."""
    return _client().create_experiment(config, model_dir, activate)


def get_experiment(experiment_id: int) -> Experiment:
    """Return an experiment by its number."""
    return _client().get_experiment(experiment_id)


def experiment(experiment_id: int) -> Experiment:
    """Return an experiment by its number; short for `get_experiment`."""
    return get_experiment(experiment_id)


def list_experiments(*, state: str | None = None, limit: int | None = None) -> list[Experiment]:
    """Return experiments, the newest first; see `Client.list_experiments`."""
    return _client().list_experiments(state=state, limit=limit)


def get_trial(trial_id: int) -> Trial:
    """Return a trial by its number."""
    return _client().get_trial(trial_id)


def trial(trial_id: int) -> Trial:
    """Return a trial by its number; short for `get_trial`."""
    return get_trial(trial_id)


def get_checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint by its UUID."""
    return _client().get_checkpoint(uuid)


def checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint by its UUID; short for `get_checkpoint`."""
    return get_checkpoint(uuid)


def _client() -> Client:
    master, token = os.environ.get(MASTER_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    return _cached_client(home_directory(), master, token)


@lru_cache(maxsize=4)
def _cached_client(home: Path, master: str | None, token: str | None) -> Client:
    """Return a client, cached per environment: `home` is part of the key only."""
    client = Client(master, token)
    atexit.register(client.close)
    return client
