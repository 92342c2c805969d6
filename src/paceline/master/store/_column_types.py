"""Types of columns that several tables have, and the schema to which all tables belong."""

import json
from typing import Any

from sqlalchemy import BigInteger, Integer, MetaData, Text, TypeDecorator

metadata = MetaData()


class ScalarColumn(TypeDecorator[Any]):
    """Any JSON value, numbers included, as text.

    A bare number in a column of type JSON becomes one of SQLite's own, whose last digit may differ.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        """Encode a value."""
        return None if value is None else json.dumps(value, allow_nan=False)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Decode a value."""
        return None if value is None else json.loads(value)


# SQLite numbers rows by itself only for a plain INTEGER key.
Id = BigInteger().with_variant(Integer, "sqlite")
