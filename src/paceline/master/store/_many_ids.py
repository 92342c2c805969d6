"""Queries for the rows of many ids, which are one parameter.

SQLAlchemy would make a query with a parameter for each id, and make it anew for each list.
"""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Select, bindparam, func, select

_NAME = "ids"


def many_ids() -> Select[Any]:
    """Return the ids for the `in_` of a query that is executed with `ids_parameter`."""
    return select(func.json_each(bindparam(_NAME)).table_valued("value").c.value)


def ids_parameter(ids: Iterable[int | str]) -> dict[str, str]:
    """Return the parameter with the ids."""
    return {_NAME: json.dumps([*ids])}
