"""Messages that bring runs made without a master to one: plain structs, as they carry the bulk."""

import msgspec

from paceline.journal import AnyRecord, RunInfo
from paceline.messages.attempts import Rank, Sequence


class RunRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Make a run known; `path` is its run directory as whoever sends this sees it."""

    info: RunInfo
    path: str


class RunBatch(msgspec.Struct, frozen=True):
    """Consecutive records of one journal of a run, each with its sequence number.

    `after` is as in `RecordBatch`.
    """

    attempt: Rank
    generation: Rank
    rank: Rank
    records: list[tuple[Sequence, AnyRecord]]
    after: int | None = None


class RawRunBatch(msgspec.Struct, frozen=True):
    """A `RunBatch` as the client sends it: the journal's JSON, untouched."""

    attempt: int
    generation: int
    rank: int
    records: list[tuple[int, msgspec.Raw]]
    after: int | None = None


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Further records of a run, earlier attempts first.

    `is_alive` tells that more may follow: the run goes on, or it wrote more than this. `moved`
    maps checkpoint storages that the journal names to where they are now. A run that goes on is
    lost if nothing is heard of it for `lease_s` seconds; None waits for ever.
    """

    batches: list[RunBatch]
    is_alive: bool
    moved: dict[str, str] = {}
    lease_s: float | None = None


class RawRunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """A `RunRecords` as the client sends it."""

    batches: list[RawRunBatch]
    is_alive: bool
    moved: dict[str, str] = {}
    lease_s: float | None = None


class RunMark(msgspec.Struct, frozen=True):
    """The highest sequence number that the master has stored of one journal of a run."""

    attempt: int
    generation: int
    rank: int
    sequence: int


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is shown, and what the master has of its journals."""

    experiment_id: int
    trial_id: int
    marks: list[RunMark]
