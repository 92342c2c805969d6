"""The trial of a master that the checkpoints of a run belong to, in their names and manifests."""

from paceline.journal import RunDirectory
from paceline.storage import new_uuid, origin_of


def origin_of_run(run: RunDirectory) -> str:
    """Return the attempt of a master that a run is; empty without a master."""
    info = run.read_info()
    if info.trial is None or not info.cluster_id:
        return ""
    return origin_of(info.cluster_id, info.trial.trial_id, info.attempt)


def new_uuid_of_run(run: RunDirectory) -> str:
    """Return a UUID for a new checkpoint, which a master takes from this trial alone."""
    info = run.read_info()
    return new_uuid(info.cluster_id, None if info.trial is None else info.trial.trial_id)
