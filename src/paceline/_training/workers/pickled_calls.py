"""Calls as they travel to workers: functions by name or pickled, values and errors.

Also: large data in shared memory.
"""

import dataclasses
import dis
import inspect
import io
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import CodeType, ModuleType
from typing import IO, Any, NamedTuple, cast

import paceline
from paceline._base.exceptions import rebuilt_error
from paceline._training.workers.processes.worker_program import describe_exit, exit_code_of
from paceline._training.workers.shared_memory import (
    Buffer,
    SharedBuffers,
    SharedSegment,
    SharedSegmentPlace,
    Span,
    buffer_taker,
    map_shared_segment,
    reduce_memory,
)
from paceline._training.workers.worker_failures import RemoteTraceback, WorkerFailedError

_LONGEST_SEARCH = 8
_READS_OF_CLASSES = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# No name of Python's: it marks what cloudpickle keeps of a function as complete.
_SEEN = "names of classes"


class NotSendableError(TypeError):
    """Raised when an object cannot be pickled for its way between driver and workers."""


def dump(
    value: Any, file: IO[bytes], *, what: str, name: str, buffers: list[Buffer] | None = None
) -> None:
    """Write a value to a file.

    Args:
        value: The value to write; the fields of a named tuple go by their own names.
        file: The file.
        what: How the error's text calls the value.
        name: The beginning of the path to a part, in that text.
        buffers: Gets the memory of tensors and arrays, which is not written then.

    Raises:
        NotSendableError: The value cannot be pickled; the message names the part that cannot.
    """
    error = _try_dump(value, file, buffers)
    if error is None:
        return
    path, culprit = _find_culprit(name, value)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    raise NotSendableError(
        f"{what} must be picklable to travel between the driver and its workers, but `{path}`"
        f" ({kind}) is not: {_first_line(error)}. Hint: make it within the function that runs in"
        " the workers, or leave it out of what that returns."
    ) from error


def load(file: IO[bytes]) -> Any:
    """Return an object written by `dump`; only for files of this driver's own processes."""
    return pickle.load(file)  # noqa: S301 - written by this driver's own processes


class _Sink:
    """File object to test pickling: data are dropped."""

    def write(self, data: bytes) -> int:
        return len(data)


def _try_dump(value: Any, file: Any, buffers: list[Buffer] | None = None) -> Exception | None:
    take = None if buffers is None else buffer_taker(buffers)
    try:
        _pickler_class()(file, pickle.HIGHEST_PROTOCOL, take).dump(value)
    except Exception as error:
        # Objects raise anything from their own methods of pickling.
        return error
    return None


@cache
def _pickler_class() -> Any:
    # Late import: cloudpickle takes a good part of a launcher's start.
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)  # type: ignore[no-untyped-call] # no types
            self._storages: dict[tuple[int, int], Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            if inspect.isfunction(obj):
                _add_class_names(obj.__code__)
            torch = sys.modules.get("torch")
            if torch is not None:
                reduced = _reduce_for_cpu(torch, obj)
                if reduced is NotImplemented:
                    reduced = reduce_memory(torch, obj, self._storages)
                if reduced is not NotImplemented:
                    return reduced
            return super().reducer_override(obj)  # type: ignore[no-untyped-call] # no types

    return Pickler


def _add_class_names(code: CodeType) -> None:
    """Include globals used in the bodies of classes within a function.

    The body reads them, in annotations for example, by another instruction than functions do, for
    which cloudpickle does not look.
    """
    from cloudpickle import cloudpickle

    names: dict[str, None] = cloudpickle._extract_code_globals(code)  # type: ignore[no-untyped-call]
    if _SEEN not in names:
        names.update(dict.fromkeys(_class_names(code)))
        names[_SEEN] = None


def _class_names(code: CodeType) -> Iterator[str]:
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    for each in dis.get_instructions(code):
        if each.opname in _READS_OF_CLASSES and each.argval not in own:
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _class_names(constant)


def _reduce_for_cpu(torch: Any, value: Any) -> Any:
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return _same, (value.module,)
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    if is_tensor and value.device.type not in ("cpu", "meta"):
        moved = value.detach().cpu().requires_grad_(value.requires_grad)
        return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return NotImplemented


def _same(value: Any) -> Any:
    return value


# ---- which part it is ------------------------------------------------------------------------


def _find_culprit(path: str, value: Any) -> tuple[str, Any]:
    """Return the smallest part of a value impossible to pickle, and the path to this part."""
    for _ in range(_LONGEST_SEARCH):
        found = next(
            (
                (name, part)
                for name, part in _parts_to_pickle(value)
                if _try_dump(part, _Sink()) is not None
            ),
            None,
        )
        if found is None:
            break
        path, value = f"{path}{found[0]}", found[1]
    return path.lstrip("."), value


def _parts_to_pickle(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each after the text of its path."""
    if hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        yield from ((f".{name}", getattr(value, name)) for name in fields)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        for name, item in {**names.nonlocals, **names.globals}.items():
            yield f" -> {name}", item
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif inspect.isclass(value):
        yield from ((f".{n}", item) for n, item in vars(value).items() if not n.startswith("__"))
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# ---- errors ----------------------------------------------------------------------------------


def dump_error(error: BaseException) -> bytes:
    """Return a pickled exception without its traceback; empty if impossible."""
    for make in (_same, _Rebuilt):
        data = _dumped_error(error, make)
        if data:
            return data
    return b""


def load_error(data: bytes) -> BaseException | None:
    """Return the exception written by `dump_error`, or None if impossible to load here."""
    try:
        error = pickle.loads(data)  # noqa: S301 - written by this driver's own worker
    except (Exception, SystemExit):
        # Unpickling runs code of the user's classes; the error's text is reported all the same.
        return None
    return error if isinstance(error, BaseException) else None


def _dumped_error(error: BaseException, make: Callable[[BaseException], Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    try:
        if _try_dump(make(error), buffer) is not None:
            return b""
    except SystemExit:
        # SystemExit would end this worker, which still has to report the error.
        return b""
    data = buffer.getvalue()
    # Many exceptions pickle well and fail when they are unpickled, by their own `__init__`.
    return data if type(load_error(data)) is type(error) else b""


class _Rebuilt:
    """Wrapper pickled as an exception to be made without its own `__init__`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        state = {
            name: value
            for name, value in vars(self._error).items()
            if _try_dump(value, _Sink()) is None
        }
        args = self._error.args
        if _try_dump(args, _Sink()) is not None:
            args = tuple(map(str, args))
        return rebuilt_error, (type(self._error), args, state)


class WorkerCall(NamedTuple):
    """Call of a function in the workers."""

    main: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def value(self) -> Any:
        """Make the call."""
        try:
            return self.main(*self.args, **self.kwargs)
        except SystemExit as request:
            if getattr(request, "is_success", False):
                # The core API ends a process so whose hyperparameters are invalid.
                return None
            raise


def fill_main(program: ModuleType, function: Any) -> None:
    """Put objects pickled by value into `__main__`, where plain pickle (`torch.save`) looks."""
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    if getattr(function, "__module__", None) == "__main__":
        for name, value in getattr(function, "__globals__", {}).items():
            if not name.startswith("__"):
                setattr(program, name, value)


def traceback_text(error: BaseException, caller: str) -> str:
    """Return the text of an exception from the first frame of the user's code.

    An exception of ours alone begins where the file `caller` called it.
    """
    frames = whole = error.__traceback__
    while whole is not None and whole.tb_frame.f_code.co_filename in (caller, __file__):
        whole = whole.tb_next
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or whole))


# Frames of this package.
_PACKAGE = os.path.join(os.path.dirname(paceline.__file__), "")
# Less than this is quicker in the frame.
_LEAST_SHARED_BYTES = 1024 * 1024
# The segment number of buffers in the frame itself.
_IN_FRAME = -1


class PackedCall(NamedTuple):
    """A call on its way.

    Attributes:
        head: The head of the frame.
        segments: The rest, which stays in shared memory as long as this object.
    """

    head: bytes
    segments: Sequence[SharedSegment] = ()


class _Head(NamedTuple):
    """Head of a packed call, for workers to read first.

    Attributes:
        facts: The driver's state, pickled.
        stream: Where the pickled call is.
        spans: Where the buffers beside it are.
        places: The segments.
        data: The buffers outside of segments.
    """

    facts: bytes
    stream: Span
    spans: list[Span]
    places: list[SharedSegmentPlace]
    data: bytearray


class DriverFacts(NamedTuple):
    """Set-up of the driver's process at the time of a call."""

    path: list[str]
    arguments: list[str]
    directory: str
    file: str | None
    log_level: int | None


def driver_facts() -> DriverFacts:
    """Return how this process is set up."""
    root = logging.getLogger()
    return DriverFacts(
        path=[path or os.getcwd() for path in sys.path],
        arguments=list(sys.argv),
        directory=os.getcwd(),
        file=getattr(sys.modules["__main__"], "__file__", None),
        log_level=root.level if root.handlers else None,
    )


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    shared: SharedBuffers,
) -> PackedCall:
    """Return a call, with how this process is set up, packed for its way to workers.

    Args:
        function: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        shared: Where large data go.

    Raises:
        NotSendableError: The function or an argument cannot be pickled.
    """
    call = WorkerCall(function, tuple(args), dict(kwargs or {}))
    file, stream = io.BytesIO(), io.BytesIO()
    buffers: list[Buffer] = []
    dump(driver_facts(), file, what="The driver's state", name="driver")
    dump(call, stream, what="The call", name="", buffers=buffers)
    segments: list[SharedSegment] = []
    data = bytearray()
    # Apart from each other, as the stream is new each time.
    spans = _placed_buffers(buffers, shared, segments, data)
    (place,) = _placed_buffers([Buffer(stream.getbuffer(), stream)], shared, segments, data)
    head = _Head(file.getvalue(), place, spans, [each.place for each in segments], data)
    return PackedCall(pickle.dumps(head, pickle.HIGHEST_PROTOCOL), segments)


def _placed_buffers(
    buffers: Sequence[Buffer], shared: SharedBuffers, segments: list[SharedSegment], data: bytearray
) -> list[Span]:
    """Add buffers to the segments of a call, or to the data of its frame."""
    found = None
    if sum(buffer.view.nbytes for buffer in buffers) >= _LEAST_SHARED_BYTES:
        found = shared.share(buffers)
    if found is not None:
        first = len(segments)
        segments += found[0]
        return [span._replace(segment=first + span.segment) for span in found[1]]
    spans = []
    for view, _ in buffers:
        spans.append(Span(_IN_FRAME, len(data), view.nbytes, view.readonly))
        data += view
    return spans


class ReceivedCall:
    """Call received by a worker; `facts` must be loaded and applied before `call`.

    Args:
        head: The head of the frame.
        fetch: Gets the content of so many segments from the driver, if they are not on this
            machine.
    """

    def __init__(
        self, head: bytes | bytearray, fetch: Callable[[int], Sequence[memoryview]]
    ) -> None:
        self._head: _Head = pickle.loads(head)  # noqa: S301 - written by this worker's own driver
        if isinstance(head, bytearray):
            head.clear()
        places = self._head.places
        mapped = [view for view in map(map_shared_segment, places) if view is not None]
        # All or none: the driver answers a request with every segment of the call.
        contents = mapped if len(mapped) == len(places) else fetch(len(places))
        self._contents = [*contents, memoryview(self._head.data)]

    def facts(self) -> Any:
        """Return the driver's state."""
        return load(io.BytesIO(self._head.facts))

    def call(self) -> WorkerCall:
        """Return the call, once: its content is then in the hands of the call alone."""
        views = [self._at(span) for span in (self._head.stream, *self._head.spans)]
        self._contents.clear()
        del self._head
        try:
            return cast("WorkerCall", pickle.loads(views[0], buffers=views[1:]))  # noqa: S301
        finally:
            views.clear()

    def _at(self, span: Span) -> memoryview:
        view = self._contents[span.segment][span.offset : span.offset + span.num_bytes]
        return view.toreadonly() if span.is_readonly else view


def left_error(
    rank: int, world_size: int, left_by: str | None, exit_code: int, traceback: str = ""
) -> WorkerFailedError:
    """Return the error for a worker's exit before its function had returned or raised.

    Args:
        rank: The worker.
        world_size: The number of workers.
        left_by: The call that ended it, such as "sys.exit(3)"; None if only its process is known to
            end.
        exit_code: With which code.
        traceback: Where it left, if that is known; becomes the error's cause.
    """
    what = f"rank {rank} left by `{left_by}` with exit code {exit_code}"
    if left_by is None:
        what = f"the process of rank {rank} ended with exit code {exit_code}"
    count = f", the first of {world_size} to fail" if world_size > 1 else ""
    error = WorkerFailedError(
        f"The function of a worker must return or raise an exception, but {what}{count}."
        " Hint: `return`.",
        rank,
        exit_code,
    )
    if traceback:
        error.__cause__ = RemoteTraceback(f"Rank {rank} left here:\n\n{traceback}")
    return error


@contextmanager
def exit_as_error(rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Turn `sys.exit()` within the block into the error of any other worker's exit.

    Args:
        rank: The rank of this process.
        world_size: The number of workers.

    Raises:
        WorkerFailedError: The block has left by `sys.exit()`.
    """
    try:
        yield
    except SystemExit as request:
        text = traceback_text(request, __file__)
        left_by, code = describe_exit(request.code), exit_code_of(request.code)
        error = left_error(rank, world_size, left_by, code, text)
        raise error from error.__cause__


class InWorker:
    """Reference to a worker's function by module and name.

    The driver does not import its module, as that may load torch.

    Args:
        module: The module.
        name: The function.
        func: A function of the user's that it is to call, whose script's names the worker needs.
    """

    def __init__(self, module: str, name: str, func: Any = None) -> None:
        self._module = module
        self._name = name
        # The pool looks for it under the name that `functools.partial` has for it.
        self.func = func

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return getattr(import_module(self._module), self._name)(*args)
