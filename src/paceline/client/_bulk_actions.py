"""Part of a client: actions on many experiments, and clean-up of checkpoints, by a query."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.client import _late_models as models
from paceline.client._http_session import HttpSession

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import BulkWord

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
