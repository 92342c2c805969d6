"""Pydantic models: master, nodes and slots, pools and queue, tokens, sign-ins, events."""

import re
from enum import Enum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError, field_validator, model_validator

from paceline._cluster.messages.experiment_models import Message, Request
from paceline._cluster.messages.runner_messages import LOCAL_NAME, MAX_TIME_S
from paceline._cluster.messages.runner_messages import NAME_PATTERN as NODE_PATTERN


class MasterInfo(Message):
    """Identity and load of the master.

    `num_slots` counts all slots: `num_slots_drained` of them get no attempts, and attempts still
    hold `num_slots_draining` of these. `events_after` is the id of an event that is some seconds
    old: who follows the events from there on misses nothing since a read of that time.
    """

    version: str
    cluster_id: str
    started_at: float
    home: str
    num_slots: int
    num_slots_used: int
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    num_active_experiments: int
    has_web_ui: bool = True
    events_after: int | None = None


class InteractiveLink(Message):
    """What opens an interactive task; `path` is null until the task listens.

    The path has the secret of the task, for its owner alone.
    """

    kind: str
    path: str | None


# A runner that still holds on so long after the order to kill is killed itself; a master that
# stops waits so long for them.
RUNNER_GRACE_S = 30.0


class Shutdown(Request):
    """Ask the master to stop.

    `keep_trials` leaves running trials to their runners; otherwise they are asked to checkpoint and
    leave, are killed after `timeout_s` seconds, and resume when the master starts again.
    """

    keep_trials: bool = False
    timeout_s: float = Field(default=30.0, ge=0)


class MasterStatus(MasterInfo):
    """Identity, load and problems of the master.

    `experiments`, `trials` and `attempts` count by stored state. `num_waiting` trials wait for
    slots. `ingest_lag_s` is how old the newest records were when they were stored last, None if
    none were. `num_writes_waiting` changes wait for the database. `num_slow_requests` took at least
    `slow_request_s`, since the start. `sizes` has bytes by part of the home; directories are
    missing until they were measured. Each of `problems` is a sentence. `oidc_issuer` is the
    provider by whom people sign in, if any. Of `num_users` users, `user` is asking, perhaps an
    administrator.
    """

    experiments: dict[str, int]
    trials: dict[str, int]
    attempts: dict[str, int]
    num_waiting: int
    num_metric_points: int
    num_checkpoints: int
    checkpoint_bytes: int
    ingest_lag_s: float | None
    num_writes_waiting: int
    num_connections: int | None
    num_requests: int
    num_slow_requests: int
    slow_request_s: float
    memory_bytes: int
    sizes: dict[str, int]
    free_bytes: int
    problems: list[str]
    oidc_issuer: str | None = None
    num_users: int = 0
    user: str | None = None
    is_admin: bool = False


NodeState: TypeAlias = Literal["ready", "away", "left", "lost", "draining", "drained"]


class Node(Message):
    """A machine with slots. Times are in seconds since the epoch.

    `state` is `ready`, `away` (not heard since the master started, or its connection was closed),
    `left` (its runner was stopped), `lost`, `draining` (attempts are leaving) or `drained`.
    `address` is where other nodes reach it, for trials on several nodes. `device_memory_bytes` has
    the memory of each device in bytes, 0 for one that is unknown; it is empty if none is known.
    A node on which one trial after another failed gets no attempts before `rests_until`, and one
    with a `problem`, found by a check of the machine, gets none until a later check passes.
    `num_slots_drained` devices get no attempts; attempts still hold `num_slots_draining` of these.
    """

    id: int
    name: str
    state: NodeState
    pool: str
    labels: dict[str, str]
    devices: list[str]
    device_kind: str
    num_slots_used: int
    num_cores: int
    memory_bytes: int
    version: str
    python_version: str
    registered_at: float
    seen_at: float | None = None
    attempts: list[int] = Field(default_factory=list)
    address: str = ""
    device_memory_bytes: list[int] = Field(default_factory=list)
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    rests_until: float | None = None
    problem: str = ""
    unix_user: str = ""
    reservations: "list[Reservation]" = Field(default_factory=list)


class Reservation(Message):
    """A time, in seconds since the epoch, in which a node runs trials of one user only.

    Several of one node at the same time let each of their users in. Trials of others do not start
    there from an hour before on, and leave with a checkpoint when it begins.
    """

    id: int
    node: str
    user: str
    begins_at: float
    ends_at: float


class NewReservation(Request):
    """A node to be reserved for a user, between two times in seconds since the epoch."""

    user: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    begins_at: Annotated[float, Field(ge=0, le=MAX_TIME_S)]
    ends_at: Annotated[float, Field(ge=0, le=MAX_TIME_S)]


class DrainNode(Request):
    """How a node is drained: by default its attempts store a checkpoint and resume elsewhere."""

    finish: bool = False


class Slot(Message):
    """Schedulable device and its current user; `id` counts the slots of its node.

    A drained one gets no attempts; one that it has may still be leaving. `memory_bytes` is the
    memory of a GPU, None if it is unknown. One that `is_used` without a trial has one of a project
    that the sender does not see.
    """

    id: int
    node: str = "local"
    pool: str = "default"
    is_drained: bool = False
    device: str
    memory_bytes: int | None = None
    trial_id: int | None
    experiment_id: int | None
    attempt_id: int | None
    is_used: bool = False


Policy: TypeAlias = Literal["fifo", "priority", "fair_share"]


Label = Annotated[str, Field(max_length=200)]


class Pool(Message):
    """Set of nodes sharing a queue; `max_slots` limits the slots in use at the same time.

    With `backfill`, trials run in the gap in front of one that needs more slots than are free.
    Under `fair_share`, past use counts by half for each `half_life_hours`; None is not at all.
    Nodes that have all of `labels`, and name no pool themselves, belong to it. `failure` says why
    the master could not start a runner for it, or that one was started and has not registered. It
    goes once one has registered. `detail` says what missing nodes wait for.
    `num_slots` counts all slots: `num_slots_drained` of them get no attempts, and attempts still
    hold `num_slots_draining` of these.
    """

    name: str
    policy: Policy
    max_slots: int | None
    labels: dict[str, str]
    num_nodes: int
    num_slots: int
    num_slots_used: int
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    failure: str | None = None
    detail: str | None = None
    backfill: bool = False
    half_life_hours: float | None = None
    silent_after_s: float | None = None
    unused_after_s: float | None = None
    pause_after_s: float | None = None
    best_priority: int | None = None
    open_to: list[str] = Field(default_factory=list)
    own_runners: bool = False
    interactive_first: str | None = None


class NotifyChannel(Message):
    """Channel for messages to people, without its address.

    `kind` is `webhook` or the scheme of the address. Of `num_waiting` events the message is not
    sent yet, that of `num_dropped` events was given up. `failure` says why the last try failed.
    """

    name: str
    kind: str
    num_waiting: int
    num_dropped: int
    failure: str | None = None


class NotifyTest(Message):
    """Outcome of a test message; `failure` is None for success."""

    failure: str | None = None


_Seconds = Annotated[float, Field(gt=0, le=10**8)]
_OPEN_TO = "^(@?[A-Za-z0-9_.-]{1,64}|project:.{1,64})$"


class SetPool(Request):
    """Complete settings of a pool; omitted fields get their defaults.

    A trial that reports nothing for `silent_after_s`, or does not use its slots for
    `unused_after_s`, gives an alert. After `pause_after_s` more, its experiment is paused.
    Only administrators of a project choose a priority before `best_priority`. Only trials of users,
    groups (`@NAME`) and projects (`project:NAME`) in `open_to` get slots, if any is named. With
    `own_runners`, trials start only on runners whose token is for their user, and whose Unix user
    has that name. In the hours of `interactive_first`, such as `09:00-18:00 mon-fri Europe/Berlin`,
    trials whose config says `resources: {interactive: true}` come before all others.
    """

    policy: Policy = "fifo"
    max_slots: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    labels: dict[str, Label] = Field(default_factory=dict, max_length=20)
    backfill: bool = False
    half_life_hours: Annotated[float, Field(ge=1, le=10_000)] | None = None
    silent_after_s: _Seconds | None = None
    unused_after_s: _Seconds | None = None
    pause_after_s: _Seconds | None = None
    best_priority: Annotated[int, Field(ge=1, le=99)] | None = None
    open_to: list[Annotated[str, Field(pattern=_OPEN_TO)]] = Field(
        default_factory=list, max_length=200
    )
    own_runners: bool = False
    interactive_first: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class MoveExperiment(Request):
    """Request to move an experiment in its pool's queue: next to another, or to either end."""

    experiment_id: int
    ahead_of: int | None = None
    behind: int | None = None
    to: Literal["front", "end"] | None = None


class QueueEntry(Message):
    """Trial waiting for slots, listed in scheduling order, with the reason for the wait.

    `num_ahead` trials of its pool come before it. The one that holds it up is `behind_trial_id`.
    `priority` and `weight` are there if the policy of its pool asks for them. `estimated_start` (in
    seconds since the epoch) holds if running trials go on as their progress says; None is unknown.
    """

    trial_id: int
    experiment_id: int
    experiment_name: str
    num_slots: int
    waiting_since: float
    reason: Literal[
        "slots_in_use",
        "behind_others",
        "max_slots",
        "too_large",
        "pool_limit",
        "preempting",
        "pausing",
        "quota",
        "reserved",
        "starting",
    ]
    detail: str
    pool: str = "default"
    num_ahead: int = 0
    behind_trial_id: int | None = None
    behind_experiment_id: int | None = None
    priority: int | None = None
    weight: float | None = None
    estimated_start: float | None = None


NAME_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"


class TokenScope(str, Enum):
    """Scope of a token: each scope includes the earlier scopes, except for the last two.

    `runner` allows to register a node and to ask for its attempts, and nothing else. `report`
    allows to send runs without a master, and nothing else.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"
    RUNNER = "runner"
    REPORT = "report"


class NewToken(Request):
    """Request for a token; `expires_in_s` (seconds) None makes a token without expiry.

    One of the scope `runner` registers only the node `node`, and only nodes in the pool `pool`, if
    these are given. It acts as `user`, by default the sender.
    """

    name: str = Field(pattern=NAME_PATTERN)
    scope: TokenScope = TokenScope.READ
    expires_in_s: float | None = Field(default=90 * 24 * 3600.0, gt=0, le=100 * 365 * 24 * 3600.0)
    node: str | None = None
    pool: str | None = None
    user: str | None = Field(default=None, pattern=NAME_PATTERN)

    @model_validator(mode="after")
    def _check_binding(self) -> "NewToken":
        given = {"node": self.node, "pool": self.pool}
        for field, value in given.items():
            if value is not None and not re.fullmatch(NODE_PATTERN, value):
                raise ValueError(
                    f"`{field}` must be up to 63 letters, digits, dots, hyphens and underscores,"
                    f" but got {value!r}."
                )
        if self.scope is not TokenScope.RUNNER and any(given.values()):
            raise ValueError(
                "`node` and `pool` must be those of a token of the scope `runner`, but `scope` is"
                f" {self.scope.value!r}. Hint: leave them out, or choose that scope."
            )
        if self.node == LOCAL_NAME:
            raise ValueError(
                f"`node` must be another machine than the master's own, but got {LOCAL_NAME!r}."
            )
        return self


def make_new_token(**fields: object) -> NewToken:
    """Return a token to be made.

    Raises:
        ValueError: A field cannot be, in a sentence.
    """
    try:
        return NewToken.model_validate(fields)
    except ValidationError as error:
        found = [
            f"`{one['loc'][0]}` must be up to 64 letters, digits, dots, hyphens and underscores,"
            f" but got {one['input']!r}."
            if one["type"] == "string_pattern_mismatch"
            else ": ".join((*(f"`{field}`" for field in one["loc"]), one["msg"]))
            for one in error.errors()
        ]
        raise ValueError(" ".join(found).replace("Value error, ", "")) from error


class Token(Message):
    """A token without its secret; times are in seconds since the epoch.

    `node` and `pool` are the only ones that it registers, None for any. It acts as `user`.
    """

    id: int
    name: str
    scope: TokenScope
    created_at: float
    expires_at: float | None
    revoked_at: float | None = None
    node: str | None = None
    pool: str | None = None
    user: str = "admin"


class CreatedToken(Token):
    """New token with its secret; the secret cannot be read again later."""

    secret: str


class HomeToken(Message):
    """New token of the master's home, also stored there in the file `token`."""

    secret: str


class Session(Message):
    """Who is signed in, None for nobody; `has_password` says whether a password could sign in.

    `scope` is "read", "submit", "user" for all that a user may do who is no administrator, "admin",
    or "attempt" for the token of one attempt. `user` is the name of a token if one was sent, and
    `owner` the user for whom the sender acts. `is_shared` says that there are several users.
    `oidc` is the name of the provider of OpenID Connect by whom one can sign in, if any.
    """

    user: str | None
    owner: str | None = None
    has_password: bool
    scope: str | None = None
    is_shared: bool = False
    oidc: str | None = None


class Login(Request):
    """A user's name and password."""

    user: str = Field(default="admin", max_length=64)
    password: str = Field(max_length=1024)


class LoginForToken(Login):
    """A user's name and password, and the name of the token to be made."""

    name: str = Field(pattern=NAME_PATTERN)
    expires_in_s: float = Field(default=90 * 24 * 3600.0, gt=0, le=100 * 365 * 24 * 3600.0)


class OidcCode(Request):
    """A code shown after a sign-in by OpenID Connect, and what its link was made from."""

    code: str = Field(max_length=200)
    verifier: str = Field(min_length=43, max_length=128)
    name: str = Field(pattern=NAME_PATTERN)
    expires_in_s: float = Field(default=90 * 24 * 3600.0, gt=0, le=100 * 365 * 24 * 3600.0)


class Role(str, Enum):
    """Role of a user in a project; each includes the earlier ones.

    A `viewer` sees what is in the project, an `editor` changes it, an `admin` chooses the members.
    """

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"


class User(Message):
    """A user; one that was removed is not active, and stays the owner of experiments.

    An administrator sees and changes everything. `is_service` is a program's. `oidc` says whether
    a person at the provider of OpenID Connect is linked, or the first one of the name awaited.
    """

    name: str
    is_admin: bool
    is_active: bool
    is_service: bool
    has_password: bool
    group: str | None = None
    oidc: Literal["linked", "awaited"] | None = None


class NewUser(Request):
    """A user to be added, with a role in the project `Default`; None for no role there."""

    # No address can have a part that is a dot or two.
    name: str = Field(pattern="^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$")
    role: Role | None = Role.EDITOR
    is_admin: bool = False
    is_service: bool = False


class UserChange(Request):
    """Change of a user: whether an administrator, the group, and the person at a provider.

    "" stands for no group and for no person. A person is the provider's id (`sub`), or `*` for the
    first one of the name who signs in.
    """

    is_admin: bool | None = None
    group: str | None = Field(default=None, pattern="^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,62})?$")
    oidc_subject: str | None = Field(default=None, pattern="^[!-~]{0,255}$")


class Project(Message):
    """A project, and the role of the sender in it."""

    id: int
    name: str
    role: Role


class NewProject(Request):
    """A project to be created."""

    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}$")


class Member(Message):
    """A user's role in a project, or that of a group, whose name begins with `@`."""

    user: str
    role: Role


class NewRole(Request):
    """The role that a user is to have in a project; None for none."""

    role: Role | None


class ConfigRule(Message):
    """Template or policy for configs: of a project, or of all projects if it has none.

    `content` has the fields of a config that a template fills in, or the conditions of a policy. It
    `applies` to what the sender creates, a template only by its name or as `default`.
    """

    kind: Literal["template", "policy"]
    name: str
    project: str | None
    content: dict[str, Any]
    revision: int
    changed_by: str
    changed_at: float
    applies: bool


class SetConfigRule(Request):
    """Content of a template or policy; `revision` is 0 if there is none yet."""

    content: dict[str, Any]
    revision: Annotated[int, Field(ge=0, le=2**31 - 2)] = 0


class StorageUse(Message):
    """Bytes of the checkpoints of a project, user or experiment in a storage."""

    name: str
    num_bytes: int
    experiment_id: int | None = None


class Storage(Message):
    """Storage of checkpoints in use: its health, and what the projects that the sender sees have.

    The master writes, reads and deletes a small file every five minutes, which took `latency_s`.
    `is_reachable` is None if it has not yet, or the directory is not made yet. `num_failed_writes`
    are those that trials and the master met since the master started. `by_experiment` has the ten
    with most bytes.
    """

    storage: str
    is_reachable: bool | None
    checked_at: float | None
    latency_s: float | None
    failing_since: float | None
    reason: str | None
    num_failed_writes: int
    free_bytes: int | None
    total_bytes: int | None
    num_bytes: int
    by_project: list[StorageUse]
    by_user: list[StorageUse]
    by_experiment: list[StorageUse]


class UsageKey(str, Enum):
    """What tells the rows of used slots apart."""

    MONTH = "month"
    USER = "user"
    PROJECT = "project"
    POOL = "pool"


class Usage(Message):
    """Slots that trials used, and how long these waited for their first start.

    Fields that were not asked for are null. Months are of UTC, such as `2026-11`. `gpu_hours` are
    those of slots that are GPUs. Of `known_hours`, those of ended attempts whose trainers told of
    their time, `training_hours` are steps that were kept, and `lost_hours` work after the last
    checkpoint before a stop.
    """

    month: str | None
    user: str | None
    project: str | None
    pool: str | None
    slot_hours: float
    wait_hours: float
    num_trials: int
    gpu_hours: float
    training_hours: float
    lost_hours: float
    known_hours: float


class Quota(Message):
    """Share and limits of a user, a group or a project, and what counts; None is no limit.

    `weight` is for fair shares of users and groups. `slot_hours` are those of a month in UTC,
    `media_bytes` those of media and other files. A change names the `revision` that it began from.
    """

    user: str | None
    project: str | None
    group: str | None = None
    weight: float
    max_slots: int | None
    slot_hours: float | None
    checkpoint_bytes: int | None
    revision: int
    num_slots_used: int
    slot_hours_used: float
    checkpoint_bytes_used: int
    media_bytes: int | None = None
    media_bytes_used: int = 0


class SetQuota(Request):
    """Complete quota of a user, a group or a project; `revision` is 0 if there is none yet."""

    weight: Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)] = 1.0
    max_slots: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    slot_hours: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None = None
    checkpoint_bytes: Annotated[int, Field(ge=0, le=2**62)] | None = None
    media_bytes: Annotated[int, Field(ge=0, le=2**62)] | None = None
    revision: Annotated[int, Field(ge=0, le=2**31 - 2)] = 0


class AuditEntry(Message):
    """A request that changes something: who sent it, by which token, and its objects.

    `token` is None for a browser. `action` is method and route, `status` is that of the answer.
    """

    id: int
    time: float
    user: str
    token: str | None
    action: str
    objects: list[str]
    status: int


class NewPassword(Request):
    """A password to be set."""

    password: str = Field(min_length=8, max_length=1024)


class SignInLink(Message):
    """Single-use link to sign in a browser before `expires_at`."""

    url: str
    expires_at: float


class NewView(Request):
    """Request for a view of comparisons; `search` is what its address has after the `?`.

    At most one view is the default, which a comparison without a search opens.
    """

    name: str = Field(min_length=1, max_length=200)
    search: str = Field(max_length=60_000)
    is_default: bool = False

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name.strip() or not name.isprintable():
            raise ValueError(f"The name of a view must be a printable text, but got {name!r}.")
        return name.strip()


class EditView(NewView):
    """Request to replace a view; `version` is the one that the change began from."""

    version: int = Field(ge=1, le=2**62)


class View(Message):
    """A saved view of comparisons; each change raises `version`."""

    id: int
    name: str
    search: str
    is_default: bool
    version: int
    changed_at: float


class Event(Message):
    """A change; follow them with the cursor `id`.

    Kinds: `experiment_state`, `experiment_changed`, `experiment_deleted`, `trial_created`,
    `trial_state`, `attempt_started`, `workers_restarted`, `attempt_ended`, `metrics`, `validation`,
    `media`, `checkpoint`, `progress`, `alert`, `logs`.
    """

    id: int
    time: float
    experiment_id: int
    trial_id: int | None
    kind: str
    data: dict[str, Any]
