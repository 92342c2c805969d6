"""Prove on a GPU what Paceline promises there; print a table as it goes.

Usage: sh benchmarks/gpu.sh [--device cpu] [--results DIRECTORY] [PART ...]

Each part runs in a process of its own for a limited time, so that one that fails, hangs or runs out
of memory costs the others nothing. `benchmarks/results/gpu-DATE.json` and `.md` are written again
after each row, and are whole whenever the command is cut off. Without a GPU the parts run in small
sizes on the CPU, and tell what they leave out; the files are then called `rehearsal-DATE`.
"""

import argparse
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_parts import PARTS, TOTAL_S, Part
from gpu_processes import adopt_orphans, end_descendants, end_with_parent
from gpu_record import ROWS_VARIABLE, Results, Row, Status, rows_in, table_head

_HERE = Path(__file__).parent
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.2
_TAIL_LINES = 15
# A machine for development does other work meanwhile, and what it measures does not count.
_PATIENCE = {"cuda": 1.0, "cpu": 3.0}


class Interrupted(BaseException):
    """Raised by a signal to end."""


def main() -> int:
    """Run the parts that are named, or all."""
    given = _arguments()
    adopt_orphans()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    device = given.device or _found_device()
    kind = "gpu" if device == "cuda" else "rehearsal"
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    results = Results(given.results, name, _facts(device))
    print(f"device: {device}; at most {given.seconds:.0f} s\n\n{table_head()}", flush=True)
    chosen = [p for p in PARTS if p.name in given.parts or not (given.parts or p.is_extra)]
    try:
        _run_all(chosen, device, results, time.monotonic() + given.seconds)
    except Interrupted:
        print("\ninterrupted", flush=True)
        return 1
    finally:
        end_descendants()
        print(f"\nresults: {results.json_path} and {results.table_path.name}", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=_names_of_parts())
    parser.add_argument("--device", choices=["cuda", "cpu"], help="a GPU if there is one")
    parser.add_argument("--results", type=Path, default=_HERE / "results", metavar="DIRECTORY")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all parts together")
    given = parser.parse_args()
    unknown = sorted({*given.parts} - {part.name for part in PARTS})
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}")
    return given


def _names_of_parts() -> str:
    names = [part.name for part in PARTS if not part.is_extra]
    extra = [part.name for part in PARTS if part.is_extra]
    return f"{', '.join(names)}; only if they are named: {', '.join(extra)}"


def _interrupt(number: int, frame: FrameType | None) -> None:
    # What is left to do is done in some seconds.
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted


def _found_device() -> str:
    # Asked in a process of its own, as a process that has looked at a GPU holds some of it.
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return "cpu" if subprocess.run([sys.executable, "-c", code]).returncode else "cuda"


def _facts(device: str) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "device": device,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "free_disk_gb": round(shutil.disk_usage(tempfile.gettempdir()).free / 1e9, 1),
    }


# ---- the parts, one after the other ----------------------------------------------------------


def _run_all(parts: Sequence[Part], device: str, results: Results, deadline: float) -> None:
    for part in parts:
        missing = [name for name in part.needs if not _is_there(name)]
        left_s = deadline - time.monotonic()
        why = f"missing: {', '.join(missing)}" if missing else ""
        if left_s < part.least_s:
            why = f"{max(left_s, 0):.0f} s are left, and it needs {part.least_s:.0f} s"
        if why:
            rows = [Row(what=part.what, status=Status.NOT_RUN, why=why)]
            results.update(part.name, rows)
            _show(part, rows)
        else:
            _run(part, device, results, min(left_s, part.limit_s * _PATIENCE[device]))
    results.write(is_complete=True)


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _run(part: Part, device: str, results: Results, limit_s: float) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as directory:
        rows_path = Path(directory, "rows.jsonl")
        errors_path = Path(directory, "errors")
        environment = _environment(device) | {ROWS_VARIABLE: str(rows_path)}
        seconds = str(round(limit_s))
        command = [sys.executable, *part.command, "--device", device, "--seconds", seconds]
        with errors_path.open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, preexec_fn=end_with_parent,
            )  # fmt: skip
        num_shown = 0
        try:
            while _is_running(process) and time.monotonic() - began < limit_s:
                num_shown = _take_in(part, rows_path, num_shown, results)
            is_late = process.poll() is None
        finally:
            # What the part has started must not disturb the next one.
            end_descendants(process)
            _take_in(part, rows_path, num_shown, results)
        seconds_taken = time.monotonic() - began
        rows, tail, last = rows_in(rows_path), _tail(errors_path), None
        if is_late or process.returncode:
            how = f"it took more than {limit_s:.0f} s" if is_late else _ending(process.returncode)
            last = Row(what=part.what, status=Status.NOT_MET, why=f"{how}: {tail[-1:]}", raw=tail)
            rows.append(last)
        results.update(part.name, rows, seconds=round(seconds_taken, 1))
        if last is not None:
            _show(part, [last])
            print("\n".join(f"    {line}" for line in tail), flush=True)


def _environment(device: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "DET_"))}
    paths = [str(_HERE), *filter(None, [kept.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    kept["PYTHONUNBUFFERED"] = "1"
    if device == "cpu":
        # Several threads that share a busy core wait for each other most of the time.
        kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return kept


def _is_running(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _take_in(part: Part, path: Path, num_shown: int, results: Results) -> int:
    """Store the rows that have come, then show them; return their number."""
    rows = rows_in(path)
    if len(rows) > num_shown:
        results.update(part.name, rows)
        _show(part, rows[num_shown:])
    return len(rows)


def _show(part: Part, rows: Sequence[Row]) -> None:
    for row in rows:
        print(row.line(part.name), flush=True)


def _ending(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def _tail(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]


if __name__ == "__main__":
    sys.exit(main())
