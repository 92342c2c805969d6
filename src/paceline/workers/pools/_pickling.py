"""Functions, values and errors on their way between a driver and its own workers.

Functions and classes of the driver's script or notebook travel by value. Tensors arrive on the
CPU, as the driver need not have the workers' devices. The memory of tensors and arrays can travel
beside the rest, as buffers.
"""

import dataclasses
import dis
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import IO, Any

from paceline._errors import rebuilt_error
from paceline.workers.pools._pickled_buffers import Buffer, buffer_taker, reduce_memory

_LONGEST_SEARCH = 8
_READS_OF_CLASSES = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# No name of Python's: it marks what cloudpickle keeps of a function as complete.
_SEEN = "names of classes"


class NotSendableError(TypeError):
    """Raised when what a driver and its workers are to exchange cannot be pickled."""


def dump(
    value: Any, file: IO[bytes], *, what: str, name: str, buffers: list[Buffer] | None = None
) -> None:
    """Write a value to a file.

    Args:
        value: What to write; the fields of a named tuple go by their own names.
        file: The file.
        what: How the error's text calls the value.
        name: What the path to a part of it begins with in that text.
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
    """Return what `dump` wrote; only for files of one's own driver or workers."""
    return pickle.load(file)  # noqa: S301 - written by this driver's own processes


def load_with_buffers(data: memoryview, buffers: Iterable[memoryview]) -> Any:
    """Return what `dump` wrote with buffers beside it, whose memory the value uses."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - written by this worker's driver


class _Sink:
    """A file that keeps nothing."""

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
    # It costs a good part of a launcher's start.
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)  # type: ignore[no-untyped-call] # no types
            self._storages: dict[tuple[int, int], Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            if inspect.isfunction(obj):
                _add_names_of_classes(obj.__code__)
            torch = sys.modules.get("torch")
            if torch is not None:
                reduced = _reduce_for_cpu(torch, obj)
                if reduced is NotImplemented:
                    reduced = reduce_memory(torch, obj, self._storages)
                if reduced is not NotImplemented:
                    return reduced
            return super().reducer_override(obj)  # type: ignore[no-untyped-call] # no types

    return Pickler


def _add_names_of_classes(code: CodeType) -> None:
    """Have the globals travel too that a class within a function uses in its body.

    The body reads them, in annotations for example, by another instruction than functions do, for
    which cloudpickle does not look.
    """
    from cloudpickle import cloudpickle

    names: dict[str, None] = cloudpickle._extract_code_globals(code)  # type: ignore[no-untyped-call]
    if _SEEN not in names:
        names.update(dict.fromkeys(_names_of_classes(code)))
        names[_SEEN] = None


def _names_of_classes(code: CodeType) -> Iterator[str]:
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    for each in dis.get_instructions(code):
        if each.opname in _READS_OF_CLASSES and each.argval not in own:
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of_classes(constant)


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
    """Return the smallest part of a value that cannot be pickled, and how it is reached."""
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
    """Yield what a value is made of, with the text that leads there."""
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
    """Return an exception pickled, without its traceback; nothing if that is impossible."""
    for make in (_same, _Rebuilt):
        data = _dumped_error(error, make)
        if data:
            return data
    return b""


def load_error(data: bytes) -> BaseException | None:
    """Return the exception that `dump_error` wrote, or None if that is impossible here."""
    try:
        error = pickle.loads(data)  # noqa: S301 - written by this driver's own worker
    except (Exception, SystemExit):
        # What its classes do while they are unpickled is the user's; the text is still told.
        return None
    return error if isinstance(error, BaseException) else None


def _dumped_error(error: BaseException, make: Callable[[BaseException], Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    try:
        if _try_dump(make(error), buffer) is not None:
            return b""
    except SystemExit:
        # It would end this worker in place of telling the error.
        return b""
    data = buffer.getvalue()
    # Many exceptions pickle well and fail when they are unpickled, by their own `__init__`.
    return data if type(load_error(data)) is type(error) else b""


class _Rebuilt:
    """Pickles as an exception that is made without its own `__init__`."""

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
