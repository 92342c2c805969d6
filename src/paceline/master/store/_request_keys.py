"""Keys of requests: one that is sent again, as its answer was lost, is not carried out again."""

import time
from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, select

from paceline.master.store import _tables as tables

_PREFIX = "request "
_KEPT_S = 86_400
_SWEEP_EVERY = 1000


def once(connection: Connection, key: str, create: Callable[[], int]) -> int:
    """Return what `create` returned to the first request with a key, within a day.

    The key is stored in the transaction of what is created.
    """
    meta = tables.meta
    name = _PREFIX + key
    found = connection.scalar(select(meta.c.value).where(meta.c.key == name))
    if found is not None:
        return int(found.split()[1])
    created = create()
    now = time.time()
    connection.execute(insert(meta).values(key=name, value=f"{now:020.6f} {created}"))
    if created % _SWEEP_EVERY == 0:
        is_old = meta.c.value < f"{now - _KEPT_S:020.6f}"
        connection.execute(delete(meta).where(meta.c.key.startswith(_PREFIX), is_old))
    return created
