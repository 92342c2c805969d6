"""Tables of users, projects and their shares, and the metadata of all tables."""

import sqlalchemy as sa

from paceline._cluster.master.store.reach import FIRST_USER, current_user

metadata = sa.MetaData()
# SQLite numbers rows by itself only for a plain INTEGER key.
Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")


# An empty hash stands for no password. A removed user stays, as the owner of experiments.
users = sa.Table(
    "users",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("password_hash", sa.String, nullable=False),
    sa.Column("changed_at", sa.Float, nullable=False),
    sa.Column("is_admin", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Column("is_active", sa.Boolean, nullable=False, default=True, server_default=sa.true()),
    sa.Column("is_service", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    # The group, if any. In other tables, `@NAME` in place of a user is a group.
    sa.Column("member_of", sa.String),
    # The person at a provider of OpenID Connect; as the subject `*`, the first one of the name.
    sa.Column("oidc_issuer", sa.String),
    sa.Column("oidc_subject", sa.String),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
)

members = sa.Table(
    "members",
    metadata,
    sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("role", sa.String, nullable=False),
)

# Who changed what. Triggers refuse to change or to delete a row.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("user", sa.String, nullable=False),
    # The name of the token, null for a browser.
    sa.Column("token", sa.String),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("objects", sa.JSON, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
)

# Sign-ins of browsers. Only a digest is kept, so no reader of the database can sign in with it.
sign_ins = sa.Table(
    "sign_ins",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("user", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)

# Tokens of programs; as with sign-ins, only digests are kept. One of the scope `runner` may be for
# one node, or for one pool.
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("scope", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False, unique=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    sa.Column("node", sa.String),
    sa.Column("pool", sa.String),
    sa.Column("user", sa.String, nullable=False, default=current_user, server_default=FIRST_USER),
)
# Saved views of comparisons: `search` is what their address has after the `?`.
views = sa.Table(
    "views",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("search", sa.Text, nullable=False),
    sa.Column("is_default", sa.Boolean, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("changed_at", sa.Float, nullable=False),
    # Ids stand in links.
    sqlite_autoincrement=True,
)

# What deleted experiments have used; see `quotas.py`. Months are of UTC.
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("month", sa.String, primary_key=True),
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("pool", sa.String, primary_key=True),
    sa.Column("slot_s", sa.Float, nullable=False),
    sa.Column("wait_s", sa.Float, nullable=False),
    sa.Column("num_trials", sa.BigInteger, nullable=False),
    # Of slots that are GPUs; of steps that were kept and that were lost; and of attempts for which
    # these two are known.
    sa.Column("gpu_s", sa.Float, nullable=False, default=0.0, server_default="0"),
    sa.Column("training_s", sa.Float, nullable=False, default=0.0, server_default="0"),
    sa.Column("lost_s", sa.Float, nullable=False, default=0.0, server_default="0"),
    sa.Column("known_s", sa.Float, nullable=False, default=0.0, server_default="0"),
    sqlite_with_rowid=False,
)

# Shares and limits of a user, or of a project if `user` is empty; `project_id` is 0 for a user.
quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("max_slots", sa.Integer),
    # In each month of UTC.
    sa.Column("slot_hours", sa.Float),
    sa.Column("checkpoint_bytes", sa.BigInteger),
    sa.Column("revision", sa.Integer, nullable=False),
    # Of media and other files of trials.
    sa.Column("media_bytes", sa.BigInteger),
)

# Slot seconds of attempts that have ended in a month: all of them, and what is left of them at the
# time `at` if past use fades; see `quotas.py`.
slot_use = sa.Table(
    "slot_use",
    metadata,
    sa.Column("month", sa.String, primary_key=True),
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("project_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("pool", sa.String, primary_key=True),
    sa.Column("slot_s", sa.Float, nullable=False),
    sa.Column("recent_s", sa.Float, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sqlite_with_rowid=False,
)

# Nodes, by name, that run trials of one user only for a time in seconds since the epoch.
reservations = sa.Table(
    "reservations",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("node", sa.String, nullable=False),
    sa.Column("user", sa.String, nullable=False),
    sa.Column("begins_at", sa.Float, nullable=False),
    sa.Column("ends_at", sa.Float, nullable=False),
    sqlite_autoincrement=True,
)
