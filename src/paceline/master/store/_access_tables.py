"""Tables of those who may use the master: users, sign-ins and tokens."""

from sqlalchemy import Column, Float, String, Table

from paceline.master.store._column_types import Id, metadata

users = Table(
    "users",
    metadata,
    Column("name", String, primary_key=True),
    Column("password_hash", String, nullable=False),
    Column("changed_at", Float, nullable=False),
)

# Sign-ins of browsers. Only a digest is kept, so nobody who reads the database can sign in by it.
sign_ins = Table(
    "sign_ins",
    metadata,
    Column("digest", String, primary_key=True),
    Column("user", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)

# Tokens of programs; as with sign-ins, only digests are kept. One of the scope `runner` may be for
# one node, or for one pool.
tokens = Table(
    "tokens",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("name", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("digest", String, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("node", String),
    Column("pool", String),
)
