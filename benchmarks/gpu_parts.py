"""The parts of `gpu.py`: the most valuable and the quickest first."""

from dataclasses import dataclass
from pathlib import Path

# Nine minutes, less what the installation takes.
TOTAL_S = 515.0
_HERE = Path(__file__).parent
# What training itself imports.
_TRAINING = ("cloudpickle", "msgspec", "numpy", "psutil", "safetensors", "xxhash", "yaml")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the command.

    Attributes:
        name: Its name on the command line.
        what: What it is about.
        script: The program, beside this one, and its arguments.
        limit_s: How long it may take.
        least_s: Below this it is not begun.
        needs: The modules without which it is not begun.
        is_extra: Whether it runs only if it is named, as there is no time for all.
    """

    name: str
    what: str
    script: tuple[str, ...]
    limit_s: float
    least_s: float = 10.0
    needs: tuple[str, ...] = _TRAINING
    is_extra: bool = False

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        return [str(_HERE / self.script[0]), *self.script[1:]]


PARTS = (
    Part(
        name="facts",
        what="what the machine is, and how fast it copies",
        script=("gpu_facts.py",),
        limit_s=15,
        needs=(),
    ),
    Part(
        name="waits",
        what="no host synchronisation in a step of any front door",
        script=("gpu_waits.py",),
        limit_s=45,
    ),
    Part(
        name="tests",
        what="the tests in tests/gpu",
        script=("gpu_tests.py",),
        limit_s=110,
        needs=(*_TRAINING, "pytest"),
    ),
    Part(
        name="saves",
        what="checkpoints of 1 GB",
        script=("gpu_saves.py", "--size", "0"),
        limit_s=70,
    ),
    Part(
        name="steps",
        what="the cost of a step over a bare loop",
        script=("gpu_steps.py",),
        limit_s=55,
    ),
    Part(
        name="recovery",
        what="from SIGKILL to the next step",
        script=("gpu_recovery.py", "--size", "0"),
        limit_s=40,
    ),
    Part(
        name="reduction",
        what="gradients of two ranks on one GPU",
        script=("gpu_reduction.py",),
        limit_s=30,
    ),
    Part(
        name="fsdp",
        what="a model that two ranks on one GPU divide",
        script=("gpu_fsdp.py",),
        limit_s=85,
    ),
    Part(
        name="steps-of-all",
        what="the cost of a step over a bare loop, of all front doors and of peers",
        script=("gpu_steps.py",),
        limit_s=240,
        least_s=60,
        is_extra=True,
    ),
    Part(
        name="saves10",
        what="checkpoints of 10 GB",
        script=("gpu_saves.py", "--size", "1"),
        limit_s=100,
        least_s=45,
        is_extra=True,
    ),
    Part(
        name="recovery10",
        what="from SIGKILL to the next step, with 10 GB",
        script=("gpu_recovery.py", "--size", "1"),
        limit_s=90,
        least_s=40,
        is_extra=True,
    ),
    Part(
        name="large",
        what="checkpoints of 40 GB",
        script=("gpu_saves.py", "--large"),
        # The last one has what the others have left.
        limit_s=200,
        least_s=30,
    ),
)
