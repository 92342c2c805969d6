"""Blocks of a training's steps, beside those of the bare loop in the same process."""

import os
from pathlib import Path
from time import perf_counter_ns

import torch
from step_loops import BLOCK, ON_CPU, Model, Place, Run, bare_steps, empty_directory
from step_models import NULL, Load


def paired_blocks(
    run: Run,
    num_blocks: int,
    num_products: int = 0,
    *,
    load: Load = NULL,
    place: Place = ON_CPU,
    is_compiled: bool = False,
) -> list[tuple[float, float]]:
    """Train once, in an empty directory, with the bare loop in between.

    Returns:
        Microseconds per step of each block of the loop and of the block of bare steps that was
        run right after it.
    """
    torch.manual_seed(0)
    block = load.block
    bare_model = Model(num_products, body=body_of(load, place, is_compiled=is_compiled))
    bare = bare_steps(bare_model, load.loader(num_blocks * block), place, block)
    pairs = []

    def interlude(begin: int, end: int) -> None:
        bare_begin = perf_counter_ns()
        next(bare)
        bare_end = perf_counter_ns()
        pairs.append(((end - begin) / block / 1000, (bare_end - bare_begin) / block / 1000))

    body = body_of(load, place, is_compiled=is_compiled)
    model = Model(num_products, interlude, body=body, place=place, block=block)
    num_steps = num_blocks * block + 1
    with empty_directory():
        run(model, load.loader(num_steps), num_steps, place)
    return pairs


def body_of(load: Load, place: Place, *, is_compiled: bool) -> torch.nn.Module | None:
    """Return what a model is to train; None for its linear layer."""
    if load.make_body is None and is_compiled:
        body: torch.nn.Module | None = torch.nn.Linear(4, 1)
    else:
        body = load.make_body and load.make_body()
    if body is not None and is_compiled:
        # Without a GPU only what torch's compiler changes of a model counts, not its code.
        body.compile(backend="inductor" if place.is_cuda else "eager")
    return body


def resident_megabytes(run: Run, num_steps: int, every: int) -> list[float]:
    """Train for several epochs in an empty directory; return resident memory after each."""
    sizes = []
    num_blocks = 0

    def interlude(begin: int, end: int) -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks * BLOCK % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    with empty_directory():
        run(Model(0, interlude), NULL.loader(every), num_steps + 1, ON_CPU)
    return sizes
