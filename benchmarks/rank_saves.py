"""Measure checkpoints of several ranks: stall, total time, memory and load time; print a table.

Usage: python benchmarks/rank_saves.py [--megabytes N ...] [--ranks N ...] [--rounds N] [--s3]

Ranks train together and store the same state in turn by Paceline, `dcp.save`, `dcp.async_save` and
`torch.save`, whole on each rank ("flat") or divided among them ("fsdp"). A stall is what a batch
waits for on the slowest rank. It is compared with copies of the bytes that a rank stores: one block
again and again ("copies"), and all tensors where a save would copy them, by all ranks at once
("bare copies"), which is what the machine can do. The total time is compared with a plain write of
these bytes by all ranks at once. All happens in the same processes. With `--s3`, Paceline stores to
a local S3 server, beside plain uploads by obstore. Of 1,000 MB, all cases need 18 GB of memory and
10 GB of disk.
A case makes two rounds, and begins no further one after 2.5 minutes of saves or 1.5 minutes of
loads. `python benchmarks/run.py rank-saves rank-saves-1gb rank-saves-s3` measures all cases.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path

from figures import Figure, print_table, store
from store_cases import s3_server

_SELF = Path(__file__)
WAYS = ("paceline", "dcp.save", "dcp.async_save", "torch.save")
S3_WAYS = ("paceline", "obstore")
KINDS = ("flat", "fsdp")
# After so many seconds, no further round begins.
LIMITS_S = {"save": 150.0, "load": 90.0}

Times = dict[str, list[float]]


def measure(
    num_megabytes: int,
    num_ranks: int,
    kind: str,
    num_rounds: int,
    *,
    is_s3: bool = False,
) -> Times:
    """Return seconds and bytes by name, one value a round, of the slowest rank.

    Args:
        num_megabytes: The size of the whole state.
        num_ranks: How many ranks train.
        kind: "flat" or "fsdp".
        num_rounds: How often each way stores, if there is the time.
        is_s3: Store at the S3 server of the environment, not on the local disk.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment = kept | {"OMP_NUM_THREADS": "1"}
    times: Times = {}
    with tempfile.TemporaryDirectory() as directory:
        for part in ("save", "load"):
            command = [sys.executable, "-m", "paceline.launch.torch_distributed"]
            command += ["--nproc-per-node", str(num_ranks), "--", str(_SELF), "--child", part]
            command += ["--megabytes", str(num_megabytes), "--rounds", str(num_rounds)]
            command += ["--kind", kind] + ["--s3"] * is_s3
            result = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=directory, check=False
            )
            assert not result.returncode, result.stderr
            times |= json.loads(Path(directory, f"{part}.json").read_text())
    return times


def figures_of(
    num_megabytes: int, num_ranks: int, kind: str, times: Times, *, is_s3: bool
) -> list[Figure]:
    """Return the figures of one case; first saves have to get their memory, and are left out."""
    what = f"{num_megabytes} MB, {num_ranks} rank(s), {kind}{', S3' if is_s3 else ''}"
    copy_s = statistics.median(times["copy"])
    bare_s = statistics.median(times["bare copy"])
    write = "obstore" if is_s3 else "write"
    plain_s = statistics.median(times[f"{write}, in all"][1:])
    own_bytes = times["own bytes"][0]
    others = [way for way in (S3_WAYS if is_s3 else WAYS) if way != "paceline"]

    def beside(suffix: str, unit: float) -> str:
        return ", ".join(
            f"{way}: {statistics.median(times[way + suffix][1:]) / unit:.2f}" for way in others
        )

    return [
        Figure(what=f"stall, {what}", unit="copies",
               values=[s / copy_s for s in times["paceline"][1:]], bar=1.2,
               beside=beside("", copy_s) + f"; one copy: {copy_s * 1000:.1f} ms", raw=times),
        Figure(what=f"stall beside all ranks' copies, {what}", unit="bare copies",
               values=[s / bare_s for s in times["paceline"][1:]], bar=1.2,
               beside=beside("", bare_s) + f"; one: {bare_s * 1000:.1f} ms"),
        Figure(what=f"stored in all, {what}", unit="uploads" if is_s3 else "plain writes",
               values=[s / plain_s for s in times["paceline, in all"][1:]],
               bar=1 / 0.9 if is_s3 else 1.5,
               beside=beside(", in all", plain_s) + f"; one: {plain_s * 1000:.0f} ms"),
        Figure(what=f"memory at most, {what}", unit="x the rank's bytes",
               values=[n / own_bytes for n in times["paceline, host bytes"][:1]], bar=1.1,
               beside=beside(", host bytes", own_bytes)),
        Figure(what=f"load, {what}", unit="s", values=times["paceline, load"], bar=None,
               beside=", ".join(f"{way}: {statistics.median(times[way + ', load']):.2f} s"
                                for way in others if way + ", load" in times)),
    ]  # fmt: skip


def measure_all(
    sizes: Sequence[int], ranks: Sequence[int], num_rounds: int, *, is_s3: bool = False
) -> list[Figure]:
    """Return the figures of all cases."""
    figures: list[Figure] = []
    for num_megabytes, num_ranks, kind in product(sizes, ranks, KINDS):
        if num_ranks == 1 and kind == "fsdp":
            # One process divides nothing.
            continue
        began = time.monotonic()
        with s3_server() if is_s3 else nullcontext():
            times = measure(num_megabytes, num_ranks, kind, num_rounds, is_s3=is_s3)
        figures += figures_of(num_megabytes, num_ranks, kind, times, is_s3=is_s3)
        minutes = (time.monotonic() - began) / 60
        print(
            f"{num_megabytes} MB, {num_ranks} ranks, {kind}: {minutes:.1f} minutes",
            file=sys.stderr,
            flush=True,
        )
    return figures


def measure_rank_saves(num_megabytes: int = 100) -> list[Figure]:
    """Checkpoints of 1, 2 and 4 ranks, whole and divided, beside torch's own ways."""
    return measure_all((num_megabytes,), (1, 2, 4), 3)


def measure_rank_saves_s3(num_megabytes: int = 100) -> list[Figure]:
    """The same at a local S3 server."""
    return measure_all((num_megabytes,), (1, 2, 4), 3, is_s3=True)


def main() -> None:
    """Measure all cases, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--child", choices=["save", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _be_rank(given)
        return
    figures = measure_all(given.megabytes, given.ranks, given.rounds, is_s3=given.s3)
    print_table(figures)
    store(figures)


# ---- one rank --------------------------------------------------------------------------------


def _be_rank(given: argparse.Namespace) -> None:
    from rank_state import load_by_all_ways, save_by_all_ways

    act: Callable[..., Times] = save_by_all_ways if given.child == "save" else load_by_all_ways
    ways = S3_WAYS if given.s3 else WAYS
    times = act(
        given.megabytes[0] * 1_000_000,
        given.rounds,
        given.kind,
        ways,
        is_s3=given.s3,
        limit_s=LIMITS_S[given.child],
    )
    if int(os.environ["RANK"]) == 0:
        Path(f"{given.child}.json").write_text(json.dumps(times))
    if given.child == "load":
        shutil.rmtree("dcp", ignore_errors=True)


if __name__ == "__main__":
    main()
