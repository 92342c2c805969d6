"""UUIDs of checkpoints: that of a trial of a master can be of no other trial."""

import hashlib
from uuid import UUID, uuid4, uuid5

_DIGEST_BYTES = 6


def new_uuid(cluster_id: str = "", trial_id: int | None = None) -> str:
    """Return a new UUID; that of a trial of a master has version 8, and ends with its digest."""
    if not cluster_id or trial_id is None:
        return str(uuid4())
    return _with_end(uuid4(), _digest(cluster_id, trial_id))


def uuid_of_series(first: str, number: int) -> str:
    """Return one of many UUIDs that follow from a new one, for the same trial."""
    series = UUID(first)
    uuid = uuid5(series, str(number))
    return str(uuid) if series.version != 8 else _with_end(uuid, series.bytes[-_DIGEST_BYTES:])


def is_of_other_trial(uuid: str, cluster_id: str, trial_id: int) -> bool:
    """Tell whether a name can only be that of another trial's checkpoint."""
    try:
        found = UUID(uuid)
    except ValueError:
        return False
    return found.version == 8 and found.bytes[-_DIGEST_BYTES:] != _digest(cluster_id, trial_id)


def _digest(cluster_id: str, trial_id: int) -> bytes:
    return hashlib.sha256(f"{cluster_id}.{trial_id}".encode()).digest()[:_DIGEST_BYTES]


def _with_end(uuid: UUID, end: bytes) -> str:
    data = bytearray(uuid.bytes[:-_DIGEST_BYTES] + end)
    data[6] = data[6] & 0x0F | 0x80
    return str(UUID(bytes=bytes(data)))
