"""Memory of tensors and arrays that travels beside what is pickled."""

import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# Less than this is quicker within the rest.
_LEAST_BYTES = 4096
# A storage of less than this is copied, so that it has memory of its own.
_LEAST_USED_BYTES = 64 * 1024


class Buffer(NamedTuple):
    """Memory of this process.

    Attributes:
        view: Its bytes.
        owner: The object that holds it, if that can be watched.
    """

    view: memoryview
    owner: Any = None


def buffer_taker(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a function for `pickle` that takes large buffers; small ones are pickled."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LEAST_BYTES:
            return True
        buffers.append(Buffer(view, _owner_of(view.obj)))
        return False

    return take


def reduce_memory(torch: Any, value: Any, storages: dict[tuple[int, int], Any]) -> Any:
    """Return how a storage or parameter is pickled with its memory as a buffer.

    Args:
        torch: The module.
        value: What may be one.
        storages: The storages that were pickled before, by their memory; tensors that share one
            share it after the journey too.
    """
    if isinstance(value, torch.storage.TypedStorage):
        return _typed_storage, (value._untyped_storage, value.dtype)
    if type(value) is torch.nn.Parameter:
        rebuild, args = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2]
        return _parameter, (rebuild, *args)
    if type(value) is not torch.UntypedStorage or value.device.type != "cpu":
        return NotImplemented
    if value.nbytes() == 0:
        return torch.UntypedStorage, (0,)
    first = storages.setdefault((value.data_ptr(), value.nbytes()), value)
    if first is not value:
        return _same, (first,)
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(value)
    return _untyped_storage, (pickle.PickleBuffer(bytes_.numpy()),)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped_storage(data: Any) -> Any:
    import torch

    bytes_ = torch.frombuffer(data, dtype=torch.uint8)
    # What was pickled has no buffer to use, and becomes a storage like any other.
    is_buffer = isinstance(data, memoryview)
    if not is_buffer or bytes_.nbytes < _LEAST_USED_BYTES:
        bytes_ = bytes_.clone()
    return bytes_.untyped_storage()


def _parameter(rebuild: Callable[..., Any], data: Any, *args: Any) -> Any:
    if not data.untyped_storage().resizable():
        # Sharding gives the memory of whole parameters back.
        data = data.clone()
    return rebuild(data, *args)


def _same(value: Any) -> Any:
    return value


def _owner_of(value: Any) -> Any:
    """Return what holds the memory of an array as long as its data exist, if that is known."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    while isinstance(value, numpy.ndarray) and value.base is not None:
        value = value.base
    if torch is not None and isinstance(value, torch.Tensor):
        return value.untyped_storage()
    return value
