"""Tables of users, projects and their shares, and the metadata of all tables."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
    true,
)

from paceline._cluster.master.store.reach import FIRST_USER, current_user

metadata = MetaData()
# SQLite numbers rows by itself only for a plain INTEGER key.
Id = BigInteger().with_variant(Integer, "sqlite")


# An empty hash stands for no password. A removed user stays, as the owner of experiments.
users = Table(
    "users",
    metadata,
    Column("name", String, primary_key=True),
    Column("password_hash", String, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("is_admin", Boolean, nullable=False, default=False, server_default=false()),
    Column("is_active", Boolean, nullable=False, default=True, server_default=true()),
    Column("is_service", Boolean, nullable=False, default=False, server_default=false()),
    # The group, if any. In other tables, `@NAME` in place of a user is a group.
    Column("member_of", String),
    # The person at a provider of OpenID Connect; as the subject `*`, the first one of the name.
    Column("oidc_issuer", String),
    Column("oidc_subject", String),
)

projects = Table(
    "projects",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("name", String, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)

members = Table(
    "members",
    metadata,
    Column("project_id", BigInteger, primary_key=True, autoincrement=False),
    Column("user", String, primary_key=True),
    Column("role", String, nullable=False),
)

# Who changed what. Triggers refuse to change or to delete a row.
audit = Table(
    "audit",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("user", String, nullable=False),
    # The name of the token, null for a browser.
    Column("token", String),
    Column("action", String, nullable=False),
    Column("objects", JSON, nullable=False),
    Column("status", Integer, nullable=False),
)

# Sign-ins of browsers. Only a digest is kept, so no reader of the database can sign in with it.
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
    Column("user", String, nullable=False, default=current_user, server_default=FIRST_USER),
)
# Saved views of comparisons: `search` is what their address has after the `?`.
views = Table(
    "views",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("owner", String, nullable=False),
    Column("name", String, nullable=False),
    Column("search", Text, nullable=False),
    Column("is_default", Boolean, nullable=False),
    Column("version", Integer, nullable=False),
    Column("changed_at", Float, nullable=False),
    # Ids stand in links.
    sqlite_autoincrement=True,
)

# What deleted experiments have used; see `quotas.py`. Months are of UTC.
usage = Table(
    "usage",
    metadata,
    Column("month", String, primary_key=True),
    Column("user", String, primary_key=True),
    Column("project_id", BigInteger, primary_key=True, autoincrement=False),
    Column("pool", String, primary_key=True),
    Column("slot_s", Float, nullable=False),
    Column("wait_s", Float, nullable=False),
    Column("num_trials", BigInteger, nullable=False),
    # Of slots that are GPUs; of steps that were kept and that were lost; and of attempts for which
    # these two are known.
    Column("gpu_s", Float, nullable=False, default=0.0, server_default="0"),
    Column("training_s", Float, nullable=False, default=0.0, server_default="0"),
    Column("lost_s", Float, nullable=False, default=0.0, server_default="0"),
    Column("known_s", Float, nullable=False, default=0.0, server_default="0"),
    sqlite_with_rowid=False,
)

# Shares and limits of a user, or of a project if `user` is empty; `project_id` is 0 for a user.
quotas = Table(
    "quotas",
    metadata,
    Column("user", String, primary_key=True),
    Column("project_id", BigInteger, primary_key=True, autoincrement=False),
    Column("weight", Float, nullable=False),
    Column("max_slots", Integer),
    # In each month of UTC.
    Column("slot_hours", Float),
    Column("checkpoint_bytes", BigInteger),
    Column("revision", Integer, nullable=False),
    # Of media and other files of trials.
    Column("media_bytes", BigInteger),
)

# Slot seconds of attempts that have ended in a month: all of them, and what is left of them at the
# time `at` if past use fades; see `quotas.py`.
slot_use = Table(
    "slot_use",
    metadata,
    Column("month", String, primary_key=True),
    Column("user", String, primary_key=True),
    Column("project_id", BigInteger, primary_key=True, autoincrement=False),
    Column("pool", String, primary_key=True),
    Column("slot_s", Float, nullable=False),
    Column("recent_s", Float, nullable=False),
    Column("at", Float, nullable=False),
    sqlite_with_rowid=False,
)

# Nodes, by name, that run trials of one user only for a time in seconds since the epoch.
reservations = Table(
    "reservations",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("node", String, nullable=False),
    Column("user", String, nullable=False),
    Column("begins_at", Float, nullable=False),
    Column("ends_at", Float, nullable=False),
    sqlite_autoincrement=True,
)
