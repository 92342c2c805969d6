"""Main loop of a pool's worker: serves the calls of its driver in turn."""

import io
import json
import logging
import os
import pickle
import signal
import sys
import threading
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from paceline._base.exceptions import text_of
from paceline._training.workers.channels import (
    ChannelFrame,
    FrameKind,
    WorkerChannel,
    dump_stacks_on_signal,
    open_driver_link,
    serve_events,
)
from paceline._training.workers.pickled_calls import (
    DriverFacts,
    ReceivedCall,
    driver_facts,
    dump,
    dump_error,
    fill_main,
    load_error,
    traceback_text,
)
from paceline._training.workers.processes.worker_program import (
    describe_exit,
    exit_code_of,
    flush,
    is_consequence,
)
from paceline._training.workers.stuck_ranks import ProgressMeter


class NodePaths(NamedTuple):
    """Paths on another node in place of the driver's paths.

    Attributes:
        path: Where modules of this node are found.
        directory: Where to work if the driver's directory is not on this node.
        moved: The driver's directories of which this node has a copy, and where.
    """

    path: list[str]
    directory: str
    moved: dict[str, str]

    def adapted(self, facts: DriverFacts) -> DriverFacts:
        """Return the driver's facts with paths of this node."""
        path = [self.place(entry) for entry in facts.path]
        known = [entry for entry in path if entry is not None]
        return facts._replace(
            path=known + [entry for entry in self.path if entry not in known],
            directory=self.place(facts.directory) or self.directory,
            file=facts.file and self.place(facts.file),
        )

    def place(self, path: str) -> str | None:
        """Return the path on this node for a path of the driver, or None if missing here."""
        for theirs, ours in self.moved.items():
            if path == theirs or path.startswith(theirs + os.sep):
                return ours + path[len(theirs) :]
        return path if os.path.exists(path) else None


class WorkerError(NamedTuple):
    """Error of a call: the exception, if picklable, and a description.

    `exit_code` is set if the worker leaves by `sys.exit()`; `description` says by what then.
    """

    error: BaseException | None
    traceback: str
    description: str
    is_consequence: bool
    exit_code: int | None


def serve_target(descriptor: int, beat_s: float) -> str:
    """Return the command-line target of a worker with its facts; see `serve`."""
    facts = {"path": driver_facts().path, "descriptor": descriptor, "beat_s": beat_s}
    return json.dumps(facts)


def read_error(body: bytes | bytearray) -> WorkerError:
    """Return the error written by a worker."""
    data, *rest = pickle.loads(body)  # noqa: S301 - written by this driver's own worker
    return WorkerError(load_error(data), *rest)


def serve(
    program: ModuleType, descriptor: int, beat_s: float, node: dict[str, Any] | None = None
) -> None:
    """Carry out calls until the driver has no more.

    Args:
        program: The worker's `__main__`.
        descriptor: The worker's end of the socket to the driver.
        beat_s: The seconds between two signs of life.
        node: If the driver may be on another node, what `NodePaths` has besides the path, and the
            worker's end of the socket to its host as "link".

    Raises:
        SystemExit: A call left by `sys.exit()`.
    """
    paths = None
    if node is not None:
        open_driver_link(WorkerChannel(node.pop("link")))
        paths = NodePaths(path=list(sys.path), **node)
    _ServingWorker(program, WorkerChannel(descriptor), paths).run(beat_s)


class _ServingWorker:
    def __init__(self, program: ModuleType, channel: WorkerChannel, node: NodePaths | None) -> None:
        self._program = program
        self._channel = channel
        self._node = node
        self._rank = int(os.environ["RANK"])
        self._facts: DriverFacts | None = None
        self._is_over = threading.Event()
        self._meter = ProgressMeter()
        # Order lock: a heartbeat about a call must not arrive after the call's value.
        self._order = threading.Lock()

    def run(self, beat_s: float) -> None:
        interrupt = signal.signal(signal.SIGINT, _ignore)
        threading.Thread(
            target=self._beat, args=(beat_s,), name="paceline-heartbeat", daemon=True
        ).start()
        dump_stacks_on_signal()
        serve_events(lambda kind, body: self._channel.send(ChannelFrame(kind, body=body)))
        self._channel.send(ChannelFrame(FrameKind.READY))
        try:
            while not self._is_over.is_set():
                frame = self._channel.receive()
                if frame is None or frame.kind is not FrameKind.CALL:
                    break
                # A Ctrl-C is for the call; between two calls there is nothing to interrupt.
                signal.signal(signal.SIGINT, interrupt)
                self._carry_out(frame)
                interrupt = signal.signal(signal.SIGINT, _ignore)
        finally:
            self._is_over.set()

    def _beat(self, beat_s: float) -> None:
        while not self._is_over.wait(beat_s):
            try:
                with self._order:
                    self._channel.send(
                        ChannelFrame(FrameKind.BEAT, body=self._meter.measure().to_bytes())
                    )
            except OSError:
                # The driver has gone, and so must this worker and its children.
                os.killpg(0, signal.SIGKILL)

    def _carry_out(self, frame: ChannelFrame) -> None:
        try:
            try:
                body = self._value(frame)
            finally:
                # The driver waits for this output before it continues.
                flush()
        except SystemExit as request:
            self._tell(frame.call, request)
            raise
        except BaseException as error:
            self._tell(frame.call, error)
            return
        with self._order:
            self._channel.send(ChannelFrame(FrameKind.VALUE, frame.call, body))

    def _value(self, frame: ChannelFrame) -> bytes:
        # A library can keep an error of its first import, and with it these frames for good. So
        # they give up what they hold: during the call and later, only its own objects hold memory.
        received = ReceivedCall(frame.body, partial(self._fetch, frame.call))
        held: list[Any] = []
        try:
            self._adopt(received.facts())
            held.append(received.call())
            del received
            fill_main(self._program, held[0].main)
            held[0] = held[0].value()
            buffer = io.BytesIO()
            dump(held[0], buffer, what=f"What rank {self._rank} returned", name="value")
            return buffer.getvalue()
        finally:
            held.clear()

    def _fetch(self, number: int, num_segments: int) -> list[memoryview]:
        """Fetch a call's segments from the driver, as they are out of this process's reach."""
        self._channel.send(ChannelFrame(FrameKind.WANT, number))
        contents = []
        for _ in range(num_segments):
            frame = self._channel.receive()
            if frame is None or frame.kind is not FrameKind.DATA:
                self._is_over.set()
                raise ConnectionError("The driver has withdrawn the call.")
            contents.append(memoryview(frame.body))
        return contents

    def _adopt(self, facts: DriverFacts) -> None:
        """Set paths, arguments and directory as in the driver; unchanged facts change nothing."""
        if self._node is not None:
            facts = self._node.adapted(facts)
        if facts == self._facts:
            return
        if self._facts is None or facts.directory != self._facts.directory:
            os.chdir(facts.directory)
        sys.path[:] = facts.path
        sys.argv[:] = facts.arguments
        if facts.file:
            self._program.__file__ = facts.file
        if facts.log_level is not None and not logging.getLogger().handlers:
            from paceline import LOG_FORMAT

            logging.basicConfig(format=LOG_FORMAT, level=facts.log_level)
        self._facts = facts

    def _tell(self, number: int, error: BaseException) -> None:
        told: tuple[Any, ...]
        where = traceback_text(error, __file__)
        if isinstance(error, SystemExit):
            told = b"", where, describe_exit(error.code), False, exit_code_of(error.code)
        else:
            text = text_of(error)
            what = f"{type(error).__name__}: {text}" if text else type(error).__name__
            told = dump_error(error), where, what, is_consequence(error), None
        self._channel.send(ChannelFrame(FrameKind.ERROR, number, pickle.dumps(told)))


def _ignore(signum: int, frame: FrameType | None) -> None:
    return
