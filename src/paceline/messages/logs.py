"""Models of the REST API on the output of trials."""

from paceline.messages.base import Message


class LogLine(Message):
    """One line of output; `id` orders the lines of a trial."""

    id: int
    trial_id: int
    attempt: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str


class LogPage(Message):
    """One page of a trial's output; pass `next_cursor` as `after` for the next, None at the end.

    `num_damaged` is how many lines of what was read were found damaged so far; they are left out.
    """

    items: list[LogLine]
    next_cursor: str | None = None
    num_damaged: int = 0
