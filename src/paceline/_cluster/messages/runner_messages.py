"""Plain structs between runner and master: attempts, nodes, runs without a master.

The runner loads this module, so it uses msgspec alone: pydantic takes long to load.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import replace

from paceline._base.journal_records import AnyRecord, CheckpointStored
from paceline._base.run_directory import RunInfo
from paceline._base.terminal_text import MAX_COLORS
from paceline._cluster.messages.states import ErrorKind, ExitReason

_ATTEMPT_IDS = 2**40

MAX_PIECE_BYTES = 4 * 1024 * 1024
"""How much of a file of a checkpoint one request carries at most."""


MAX_TIME_S = 253_402_300_799.0
"""The end of the year 9999 in UTC: later times cannot be shown."""

# Limits on the claims of a sender.
Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Color = tuple[Rank, Annotated[str, msgspec.Meta(pattern="^[0-9;]{0,40}$")]]
LineColors = Annotated[tuple[_Color, ...], msgspec.Meta(max_length=MAX_COLORS)]


class RecordBatch(msgspec.Struct, frozen=True):
    """Consecutive records of a rank's journal, each with its sequence number.

    `after` is the number up to which the sender takes the journal as stored, None if it does not
    say. A master that has less stores nothing of the batch, and its marks show the missing records.
    """

    generation: Rank
    rank: Rank
    records: list[tuple[Sequence, AnyRecord]]
    after: int | None = None


class RawRecordBatch(msgspec.Struct, frozen=True):
    """`RecordBatch` in the runner's form: the journal's JSON is passed on without decoding."""

    generation: int
    rank: int
    records: list[tuple[int, msgspec.Raw]]
    after: int | None = None


class Mark(msgspec.Struct, frozen=True):
    """Highest sequence number stored by the master for a rank's journal."""

    generation: int
    rank: int
    sequence: int


class AttemptControl(msgspec.Struct, frozen=True, kw_only=True):
    """Master's current wishes for a running attempt; `version` grows with each change.

    `kill_grace_s` is the time that a kill leaves for reacting to SIGTERM; with 0 there is none.
    `meeting_port` is where the nodes of an attempt on several nodes meet, on the first of them;
    None until all are there. With `sends_checkpoints`, one of them does not share the checkpoint
    directory with the master, so all of them send their files.
    """

    version: int
    should_preempt: bool = False
    preempt_timeout_s: float = 600.0
    should_kill: bool = False
    kill_grace_s: float = 0.0
    operation_length: int | None = None
    operations_closed: bool = False
    best_validation: float | dict[str, str] | None = None
    meeting_port: int | None = None
    sends_checkpoints: bool = False


class MasterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a master, and a token for runners without a token of their attempt.

    `certificate` is the master's own (PEM), for those who trust it and no other; None means that
    the authorities of this machine decide.
    """

    url: str
    token: str = ""
    certificate: str | None = None


class StorageMark(msgspec.Struct, frozen=True):
    """File written by the master into a storage directory, with its expected content.

    Who finds it there sees the directory of the master, and no other one at the same path.
    """

    path: str
    text: str


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `attempt.json`: everything a runner needs to run an attempt.

    `python` is the interpreter that comes first on PATH; `working_dir` None means the private
    copy of the context.

    A runner on the master's machine finds address, token and contexts in the master's `home`. For
    any other, `master` names a file with a `MasterAddress`; contexts come from the master then.
    Both are for the executor to fill in. The file may change while the runner is at work.

    `control` has the master's orders when it started the runner; None asks for them.
    `lease_s` is how long the master waits for a sign of life of the runner, 0 if that is unknown.
    `mark` names the attempt, or its part on this node, among the attempts of all masters.

    `secret_names` are variables whose values lie in the home's file of secrets under
    `experiment_id`. For a runner elsewhere the executor hands them on in the attempt's directory.

    With `uses_uv` the runner installs the packages of `uv.lock` in the code, and runs with them.

    `has_prefix` says that `entrypoint` begins with a program of the user that runs the rest.

    `interactive` is the kind of an interactive task, empty for all else: the runner passes the
    bytes of its user on, and ends it after `idle_timeout_s` seconds without use.

    `token` opens the routes of this attempt and no other.

    An attempt on several nodes has a runner on each of its `num_members` nodes. `member` is the
    number of this one; number 0 has rank 0. `num_shards` is the number of shards of a global batch
    for a trial whose slots may change.

    `storage_mark` tells a node whether it shares the checkpoint directory with the master. With
    `sends_checkpoints` it does not: checkpoints are stored in the run directory, and the runner
    sends them to the master. Of several nodes, all do so if one must.

    `memory` is the key of the states in memory that the trial's attempt before has left.
    """

    attempt_id: int
    trial_id: int
    number: int
    entrypoint: str | list[str]
    python: str
    variables: dict[str, str]
    working_dir: str | None
    context_digest: str | None
    slot_ids: list[int]
    num_threads: int
    gpu_ids: list[str]
    keep_directory: bool
    home: str | None = None
    master: str | None = None
    control: AttemptControl | None = None
    lease_s: float = 0.0
    mark: str | None = None
    token: str | None = None
    experiment_id: int | None = None
    secret_names: list[str] = []
    member: int = 0
    num_members: int = 1
    num_shards: int | None = None
    storage_mark: StorageMark | None = None
    sends_checkpoints: bool = False
    memory: str = ""
    has_prefix: bool = False
    uses_uv: bool = False
    interactive: str = ""
    idle_timeout_s: float = 0.0


def runner_id(attempt_id: int, member: int) -> int:
    """Return the number of a member's runner; on the first node this equals the attempt's id."""
    return attempt_id + member * _ATTEMPT_IDS


def split_runner_id(number: int) -> tuple[int, int]:
    """Return the attempt and the member of a runner."""
    member, attempt_id = divmod(number, _ATTEMPT_IDS)
    return attempt_id, member


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """Output line in shipped form; `sequence` counts the lines of the attempt from 0.

    `text` is plain; `colors` are its changes of colour.
    """

    sequence: Sequence
    time: Time
    rank: Rank | None
    stream: str
    level: str | None
    text: str
    colors: LineColors = ()


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of an attempt's entrypoint as seen by its runner; also the content of `exit.json`.

    `code` is the verdict: 0 when all workers finished their work, even if one of them aborted
    afterwards. `detail` says more where code and signal do not; `is_launch_error` if a launcher has
    named there the rank that failed first, and its error. `kind` is the kind of the error, None
    without an error, or if reason and code show it. `time` is by the clock of the runner's machine,
    and so is `sent_at`, which shows the master how wrong that clock is; None if it is not sent.
    `store` is the storage that the code failed by, because it did not answer.
    `is_leaving` says that the system asked the runner to end, as Slurm asks all processes of a job.
    `memory` is a key for the next attempt to the states in memory that stay on the node.
    """

    reason: ExitReason
    code: int | None
    signal: int | None
    time: Time
    detail: str | None = None
    is_launch_error: bool = False
    kind: ErrorKind | None = None
    sent_at: Time | None = None
    is_leaving: bool = False
    store: str | None = None
    memory: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def by_clock_of(self, now: float) -> "AttemptEnd":
        """Return the end with its time converted to the receiver's clock, now at `now`."""
        if self.sent_at is None:
            return self
        at = min(now, self.time + now - self.sent_at)
        return msgspec.structs.replace(self, time=at, sent_at=None)

    @property
    def has_failed(self) -> bool:
        """Whether the entrypoint failed without having been killed on request."""
        return self.reason is not ExitReason.KILLED and self.code != 0


class RecordRequest(msgspec.Struct, frozen=True):
    """Records to store; an empty list asks for the marks."""

    batches: list[RecordBatch]


class RawRecordRequest(msgspec.Struct, frozen=True):
    """`RecordRequest` in the runner's form."""

    batches: list[RawRecordBatch]


class RecordReply(msgspec.Struct, frozen=True):
    """Sequence numbers stored by the master for each journal.

    With `control`, the search has judged all of the validation reports up to the marks, and
    `control` has the orders since then.
    """

    marks: list[Mark]
    control: AttemptControl | None = None


class LogRequest(msgspec.Struct, frozen=True):
    """Lines of output to store; an empty list asks for the position."""

    entries: list[LogEntry]


class LogReply(msgspec.Struct, frozen=True):
    """Highest sequence number of the output lines stored by the master."""

    last_sequence: int


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of the commit protocol of a checkpoint, as they are stored.

    `manifest` is the text of `manifest.json`, and `shards` has the texts of `rank-N.done` by rank.
    """

    manifest: str
    shards: dict[int, str] = {}


class CheckpointOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of a checkpoint by a runner, before sending the files and again afterwards.

    `record` is the journal's record. Without it, files of the checkpoint were deleted, and the
    manifest is the new one. With `has_failed` the processes of this node have, so those of other
    nodes end, too.
    """

    files: CheckpointFiles
    record: CheckpointStored | None = None
    has_failed: bool = False


class ShardOffer(msgspec.Struct, frozen=True):
    """Done files of ranks on a node other than rank 0's: text of `rank-N.done` by rank."""

    shards: dict[int, str]


class CheckpointNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Files still missing from a checkpoint: bytes already stored, by incomplete file.

    With `is_alone`, the other nodes of the attempt have ended and send nothing more: for rank 0's
    node all of them, for another one only rank 0's.
    """

    is_stored: bool
    missing: dict[str, int] = {}
    is_alone: bool = False


class PieceReply(msgspec.Struct, frozen=True):
    """Bytes of a file stored by the master, after accepting or refusing a piece."""

    num_bytes: int


INTERACTIVE_PACKAGES = {"notebook": "jupyterlab", "tensorboard": "tensorboard"}
"""The packages that kinds of interactive tasks need, in the interpreter of the runner."""

MAX_STREAM_BYTES = 128 * 1024
"""How much of a stream one request carries, and the master keeps in each direction, at most."""


class StreamPoll(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's question for the streams to an interactive task that it is to open.

    `link` is the path that opens the task in a browser, with its secret; empty until the task
    listens. The answer waits up to `wait_s` seconds for another version than `after`.
    """

    link: Annotated[str, msgspec.Meta(max_length=500)] = ""
    is_ready: bool = False
    after: int = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class StreamNames(msgspec.Struct, frozen=True, kw_only=True):
    """All open streams to an interactive task; `version` changes with them."""

    version: int
    names: list[str]


class StreamMark(msgspec.Struct, frozen=True):
    """Bytes of a stream that the master has taken from a sender so far."""

    num_bytes: int


PROTOCOL = 1
"""The version of the messages in this module."""

LOCAL_NODE = 0
"""The id of the master's own machine among the nodes."""

LOCAL_NAME = "local"
"""The name of the master's own machine among the nodes."""

DEFAULT_POOL = "default"
# Label of nodes whose runners a master starts: the name of the starter.
STARTER_LABEL = "starter"

NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"

MAX_PROBLEM = 500
"""Longest problem of a node, in characters."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Registration data of a node runner.

    `key` is a random text in the runner's directory. `python` is the interpreter of the runner.
    `devices` has one entry per slot: "cpu" or the id of a GPU; `device_kind` names the hardware.
    `device_memory_bytes` has the memory of each slot's GPU, 0 if it is unknown; it is empty if none
    is known. `address` is where other nodes reach this one; empty for the address of
    the connection. `host` is the name of the machine, `unix_user` that of the runner's Unix user.
    `packages` are those for interactive work that `python` has, None if that is unknown.
    """

    name: str
    key: str
    version: str
    protocol: int
    python: str
    python_version: str
    devices: list[str]
    device_kind: str
    num_cores: int
    memory_bytes: int
    pool: str = DEFAULT_POOL
    labels: dict[str, str] = {}
    address: str = ""
    host: str = ""
    device_memory_bytes: list[int] = []
    unix_user: Annotated[str, msgspec.Meta(max_length=64)] = ""
    packages: Annotated[list[str], msgspec.Meta(max_length=10)] | None = None


class NodeSession(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a registration; `session` is the node's fencing token."""

    node_id: int
    session: int
    cluster_id: str
    lease_s: float


class NodePoll(msgspec.Struct, frozen=True, kw_only=True):
    """A node runner's question for work.

    `number` grows with each poll of a session. `attempts` are those that have a directory on the
    node, `alive` the attempts with a runner at work. The answer waits up to `wait_s` seconds for
    another version of the work than `after`. A node that is leaving gets no more attempts, and
    neither does one with a `problem`, as found by a check of the machine.
    """

    key: str
    session: int
    number: int
    attempts: list[int]
    alive: list[int]
    after: int = 0
    wait_s: float = 0.0
    is_leaving: bool = False
    problem: Annotated[str, msgspec.Meta(max_length=MAX_PROBLEM)] = ""


class NodeLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node needs to start an attempt."""

    spec: AttemptSpec
    info: RunInfo
    secrets: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"NodeLaunch(attempt {self.spec.attempt_id})"


class NodeWork(msgspec.Struct, frozen=True, kw_only=True):
    """Master's orders for a node: all wanted attempts, new launches, and runners to kill.

    `launches` start wanted attempts that the node does not have. `kill` are attempts whose
    runner must be killed. `strays` says that attempts which were given away are alive there.
    """

    version: int
    wanted: list[int]
    launches: list[NodeLaunch]
    kill: list[int]
    strays: bool = False


class RunRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Request to make a run known; `path` is its run directory in the sender's file system."""

    info: RunInfo
    path: str


class RunBatch(msgspec.Struct, frozen=True):
    """Consecutive records of a journal of a run, each with its sequence number.

    `after` is as in `RecordBatch`.
    """

    attempt: Rank
    generation: Rank
    rank: Rank
    records: list[tuple[Sequence, AnyRecord]]
    after: int | None = None


class RawRunBatch(msgspec.Struct, frozen=True):
    """`RunBatch` in the client's form: the journal's JSON is passed on without decoding."""

    attempt: int
    generation: int
    rank: int
    records: list[tuple[int, msgspec.Raw]]
    after: int | None = None


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Further records of a run, earlier attempts first.

    `is_alive` says that more may follow: the run continues, or it wrote more than this. `moved`
    maps checkpoint storages that the journal names to where they are now. An unfinished run is
    lost if nothing is heard of it for `lease_s` seconds; None waits for ever.
    """

    batches: list[RunBatch]
    is_alive: bool
    moved: dict[str, str] = {}
    lease_s: float | None = None


AnyBatch = TypeVar("AnyBatch", RecordBatch, RunBatch)


def in_parts(batches: Iterable[AnyBatch], most: int) -> Iterator[list[AnyBatch]]:
    """Yield the batches in order, in parts of at most `most` records; at least a single part."""
    part: list[AnyBatch] = []
    room = most
    for batch in batches:
        after, start = batch.after, 0
        while start < len(batch.records):
            if room == 0:
                yield part
                part, room = [], most
            records = batch.records[start : start + room]
            part.append(replace(batch, records=records, after=after))
            after, start, room = records[-1][0], start + len(records), room - len(records)
    yield part


class RawRunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """`RunRecords` in the client's form."""

    batches: list[RawRunBatch]
    is_alive: bool
    moved: dict[str, str] = {}
    lease_s: float | None = None


class RunMark(msgspec.Struct, frozen=True):
    """Highest sequence number stored by the master for a journal of a run."""

    attempt: int
    generation: int
    rank: int
    sequence: int


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """Experiment and trial of a run, and the marks of its stored journals."""

    experiment_id: int
    trial_id: int
    marks: list[RunMark]
