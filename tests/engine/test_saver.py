"""Checkpoints in the background hold the state of the moment at which they were asked for."""

import gc
import itertools
import mmap
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import core
from paceline._base.process_and_network import num_cores
from paceline._training.engine.checkpoints import checkpoint_saver as _background_saver
from paceline._training.engine.checkpoints import sharded_tensor_pieces as _host_copies
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver
from paceline._training.engine.checkpoints.sharded_tensor_pieces import GatheredCopies, HostCopies
from paceline._training.engine.checkpoints.state_format import StateInPieces, load_state
from paceline.journal import RunDirectory


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[core.Context]:
    monkeypatch.chdir(tmp_path)
    with core.init(name="saver") as context:
        yield context


def place(context: core.Context, step: int) -> AbstractContextManager[tuple[Path, str]]:
    return context.checkpoint.store_path({"steps_completed": step})


def stored_values(context: core.Context) -> list[Any]:
    values = []
    for stored in core.read_checkpoints(RunDirectory(context.run_dir)):
        with context.checkpoint.restore_path(stored.uuid) as path:
            values.append(load_state(Path(path), "part"))
    return values


def test_copy_is_of_the_moment_although_training_goes_on() -> None:
    weight, group = torch.nn.Parameter(torch.zeros(3)), {"lr": 0.1, "params": [0]}
    copies = HostCopies()
    copies.copy({"weight": weight, "groups": [group], "pair": (weight[:2], "text")})
    with torch.no_grad():
        weight.add_(1)
    group["lr"] = 0.2
    group["params"].append(1)  # type: ignore[attr-defined]
    result = copies.result()
    assert result["groups"] == [{"lr": 0.1, "params": [0]}]
    assert result["weight"].tolist() == [0, 0, 0]
    assert result["pair"][0].tolist() == [0, 0]
    assert result["pair"][1] == "text"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
        torch.ones(1).expand(4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(9.0)[2:5],
    ],
    ids=[
        "transposed",
        "scalar",
        "empty",
        "bfloat16",
        "bool",
        "complex",
        "expanded",
        "conjugate",
        "negative",
        "channels last",
        "slice",
    ],
)
def test_copy_equals_its_tensor(tensor: torch.Tensor) -> None:
    copies = HostCopies()
    copies.copy([torch.ones(3, dtype=torch.uint8), tensor])
    result = copies.result()[1]
    assert result.dtype == tensor.dtype
    assert torch.equal(result, tensor)


def test_memory_of_the_copies_is_used_again() -> None:
    copies = HostCopies()
    copies.copy([torch.ones(100), torch.ones(7)])
    first = [tensor.data_ptr() for tensor in copies.result()]
    copies.copy([torch.zeros(100), torch.zeros(7)])
    again = copies.result()
    assert [tensor.data_ptr() for tensor in again] == first
    assert not again[0].any()
    copies.copy([torch.ones(7)])
    (smaller,) = copies.result()
    assert smaller.data_ptr() == first[0]
    assert smaller.tolist() == [1.0] * 7


def test_copies_are_right_whatever_changes_in_a_state() -> None:
    copies, weight = HostCopies(), torch.arange(4.0)
    states: list[list[torch.Tensor]] = [
        [weight, torch.ones(1), torch.ones(2)],
        [weight + 1, torch.ones(3), torch.zeros(2)],
        [weight, weight, torch.ones(3)],
        [weight, torch.full((3_000_000,), 2.0), weight],
        [weight, torch.ones(4, dtype=torch.int64)],
        [],
    ]
    for state in states:
        copies.copy(state)
        for copied, tensor in zip(copies.result(), state, strict=True):
            assert copied.dtype == tensor.dtype
            assert torch.equal(copied, tensor)


def test_of_what_others_store_whole_tensors_are_not_copied() -> None:
    copies = HostCopies()
    shared = StateInPieces({"weight": torch.ones(4), "step": 3}, "shared", is_whole=False)
    copies.copy({"shared": shared, "own": torch.ones(2)})
    result = copies.result()
    assert result["shared"].state == {"weight": None, "step": 3}
    assert result["own"].tolist() == [1, 1]
    assert len(copies._copies) == 1


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("millions", [(9,), (1, 9), (9, 1), (3, 1, 3, 1, 2), (0, 9, 0)])
def test_large_states_are_copied_whole(num_threads: int, millions: tuple[int, ...]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        state = [torch.randn(number * 1_000_000) for number in millions]
        copies = HostCopies()
        for _ in range(2):
            copies.copy(state)
            assert all(map(torch.equal, copies.result(), state))
            state = [tensor + 1 for tensor in state]
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such memory")
def test_copying_beside_forked_loader_workers_touches_no_new_pages() -> None:
    num_bytes = 64 * 2**20
    weight, copies = torch.ones(num_bytes // 4), HostCopies()
    copies.copy([weight])
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        copies.copy([weight])
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert num_faults < num_bytes / mmap.PAGESIZE / 10
    assert torch.equal(copies.result()[0], weight)


def test_tensors_of_one_memory_share_a_copy() -> None:
    weight = torch.arange(4.0).view(2, 2)
    copies = HostCopies()
    copies.copy([weight, weight, weight.t(), weight[0]])
    one, tied, transposed, row = copies.result()
    assert one.data_ptr() == tied.data_ptr()
    assert torch.equal(transposed, weight.t())
    assert torch.equal(row, weight[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copy_from_a_device_is_of_the_moment() -> None:
    weight = torch.zeros(1_000_000, device="cuda")
    copies = HostCopies()
    copies.copy([weight, torch.ones(2)])
    weight.add_(1)
    copied, plain = copies.result()
    assert copied.is_pinned()
    assert not copied.any()
    assert plain.tolist() == [1, 1]


def many_small_tensors(device: str) -> list[torch.Tensor]:
    """Return tensors of several types and shapes: small, empty, large, not contiguous, tied."""
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for index in range(80):
        value = torch.randn(index % 7, 5 + index, generator=generator)
        dtype = (torch.float32, torch.bfloat16, torch.int64, torch.bool)[index % 4]
        tensors.append(value.to(dtype).to(device))
    tensors += [torch.randn(300, 300, generator=generator).to(device), tensors[5].t(), tensors[0]]
    tensors += [torch.randn(9, dtype=torch.complex64, generator=generator).to(device).conj()] * 20
    return tensors


def test_small_tensors_are_gathered_and_come_to_their_places() -> None:
    tensors = many_small_tensors("cpu")
    kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
    is_own = [index % 5 != 1 for index in range(len(tensors))]
    gathered = GatheredCopies(lambda size: torch.empty(size, dtype=torch.uint8), "cpu")
    is_gathered = gathered.plan(kinds, is_own)
    places = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    gathered.copy(tensors)
    for tensor in tensors:
        tensor.zero_()
    gathered.scatter([place.data_ptr() for place in places])
    expected = many_small_tensors("cpu")
    for own, chosen, tensor, place in zip(is_own, is_gathered, expected, places, strict=True):
        assert chosen == (own and 0 < tensor.nbytes <= 2**16)
        if chosen:
            assert torch.equal(place, tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_many_small_tensors_of_a_device_are_of_the_moment() -> None:
    copies = HostCopies()
    for _ in range(2):
        tensors = many_small_tensors("cuda")
        copies.copy([tensors, torch.ones(3)])
        for tensor in tensors:
            tensor.zero_()
        copied, plain = copies.result()
        assert plain.tolist() == [1, 1, 1]
        for copy, tensor in zip(copied, many_small_tensors("cpu"), strict=True):
            assert torch.equal(copy, tensor)


def changing_states(device: str) -> Iterator[dict[str, Any]]:
    """Yield states of which a copy can begin with the first part, and others of which it cannot."""
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    model = {f"weight_{index}": randn(200, 100 + index) for index in range(12)}
    moments = {index: {"step": index, "exp_avg": randn(200, 100)} for index in range(12)}

    def state() -> dict[str, Any]:
        return {"model": dict(model), "optimizer": {"state": moments}, "losses": [randn(3)]}

    yield state()
    yield state()
    # Other values at the same places, and others at other places.
    model["weight_1"].add_(1)
    model["weight_2"] = randn(200, 102)
    yield state()
    # Another shape, shared memory and none any more, within the first part.
    model["weight_3"] = randn(200, 102)
    yield state()
    model["weight_3"] = model["weight_2"]
    yield state()
    model["weight_3"] = randn(200, 102)
    yield state()
    # Small ones are gathered from now on, or no more.
    model.update((f"weight_{index}", randn(20, 20)) for index in range(10))
    yield state()
    model.update((f"weight_{index}", randn(200, 200)) for index in range(5))
    yield state()
    # So much more behind the first part that the copies need other memory.
    yield {**state(), "more": {"large": randn(3_000_000)}}
    yield {**state(), "more": {"large": randn(3_000_000)}}
    yield state()


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [
        tensor for item in values if isinstance(item, (dict, list, torch.Tensor))
        for tensor in flat(item)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ],
)
def test_a_copy_that_begins_with_the_first_part_is_of_the_moment(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def copy_tensors(targets: Any, sources: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(len(sources))
        real(targets, sources, *args, **kwargs)

    real = _host_copies.copy_tensors
    monkeypatch.setattr(_host_copies, "copy_tensors", copy_tensors)
    copies = HostCopies(device_type=device)
    num_copied = []
    for state in changing_states(device):
        before = [tensor.cpu().clone() for tensor in flat(state)]
        calls.clear()
        copies.copy(state)
        num_copied.append([*calls])
        # Not over the values of the next states, some of which are in the same memory.
        kept = [tensor.clone() for tensor in flat(state)]
        for tensor in flat(state):
            tensor.zero_()
        copied = flat(copies.result())
        assert len(copied) == len(before)
        for copy, value in zip(copied, before, strict=True):
            assert torch.equal(copy, value)
        for tensor, value in zip(flat(state), kept, strict=True):
            tensor.copy_(value)
    begun = [len(each) == 2 for each in num_copied]
    assert begun == [False, True, True, False, False, False, False, False, True, True, True]
    # Nothing is copied twice, but where the copies got other memory.
    assert [sum(each) for each in num_copied[1:3]] == [25, 25]
    assert sum(num_copied[8]) > sum(num_copied[9])


def test_the_memory_of_the_copies_is_given_back_at_once() -> None:
    """Not when Python looks for cycles: it may be as large as the model."""
    gc.collect()
    gc.disable()
    try:
        copies = HostCopies()
        copies.copy({"weight": torch.ones(10)})
        gone = weakref.ref(copies)
        del copies
        assert gone() is None
    finally:
        gc.enable()


def test_each_checkpoint_holds_the_state_of_its_save(context: core.Context) -> None:
    saver = CheckpointSaver()
    weight = torch.zeros(1000)
    for step in range(3):
        saver.save({"part": {"weight": weight}}, place(context, step))
        weight.add_(1)
    saver.finish()
    stored = stored_values(context)
    assert [value["weight"].unique().tolist() for value in stored] == [[0.0], [1.0], [2.0]]


def test_state_without_tensors_is_stored(context: core.Context) -> None:
    saver = CheckpointSaver()
    saver.save({"part": {"step": 3}}, place(context, 3))
    saver.finish()
    assert stored_values(context) == [{"step": 3}]


def test_tied_weights_are_stored_once(context: core.Context) -> None:
    weight, saver = torch.randn(8), CheckpointSaver()
    parts = {"part": {"in": weight, "out": weight}}
    saver.save(parts, place(context, 1))
    saver.finish()
    (stored,) = stored_values(context)
    assert stored["in"].data_ptr() == stored["out"].data_ptr()
    assert torch.equal(stored["out"], weight)


def test_next_save_waits_for_the_one_in_flight(context: core.Context) -> None:
    released, order = threading.Event(), []  # type: ignore[var-annotated]

    def write_slowly(path: Path) -> None:
        assert released.wait(60)
        order.append("first")

    saver = CheckpointSaver()
    saver.save({"part": torch.zeros(1)}, place(context, 1), write_slowly)
    threading.Timer(0.2, released.set).start()
    saver.save({"part": torch.ones(1)}, place(context, 2), lambda path: order.append("second"))
    saver.finish()
    assert order == ["first", "second"]


def test_ranks_that_share_cores_store_when_all_have_copied(
    context: core.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing would take the cores on which others copy; what training waits for begins at once."""
    clock = itertools.count(step=3600)  # Each copy takes an hour.
    monkeypatch.setattr(
        _background_saver, "time",
        SimpleNamespace(perf_counter=lambda: next(clock), thread_time=time.thread_time),
    )  # fmt: skip
    begun = threading.Event()
    alone, crowded = CheckpointSaver(), CheckpointSaver(local_size=2 * num_cores())
    crowded.save({"part": torch.zeros(1)}, place(context, 1), lambda path: begun.set())
    assert not begun.wait(0.2)
    crowded.finish()
    assert begun.is_set()
    begun.clear()
    alone.save({"part": torch.zeros(1)}, place(context, 2), lambda path: begun.set())
    assert begun.wait(60)
    alone.finish()


def test_error_of_the_background_is_raised_once_and_the_next_checkpoint_is_stored(
    context: core.Context,
) -> None:
    def fail(path: Path) -> None:
        raise OSError("no more space")

    saver = CheckpointSaver()
    saver.save({"part": torch.zeros(1)}, place(context, 1), fail)
    with pytest.raises(OSError, match="no more space"):
        saver.finish()
    saver.save({"part": torch.ones(1)}, place(context, 2))
    saver.finish()
    assert [value.tolist() for value in stored_values(context)] == [[1.0]]


def test_one_thread_stores_all_checkpoints_and_ends_with_the_saver(context: core.Context) -> None:
    names: list[str] = []
    threads: set[int] = set()

    def note(path: Path) -> None:
        names.append(threading.current_thread().name)
        threads.add(threading.get_ident())

    saver = CheckpointSaver()
    for step in range(3):
        saver.save({"part": torch.ones(1)}, place(context, step), note)
    saver.settle()
    assert not saver.is_storing
    assert (names, len(threads)) == (["checkpoint"] * 3, 1)
    saver.finish()
    assert "checkpoint" not in {thread.name for thread in threading.enumerate()}
    # One that is given up unfinished, as by Ctrl-C, takes its thread along.
    saver.save({"part": torch.ones(1)}, place(context, 4))
    saver.settle()
    (thread,) = (each for each in threading.enumerate() if each.name == "checkpoint")
    del saver
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
