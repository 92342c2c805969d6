"""Result of a resume check."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.testing._compare_runs import Difference
from paceline.testing._fault_steps import MIN_REPLAYED_STEPS, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """End of the run in which one fault was injected.

    Attributes:
        fault: The fault.
        hit_step: The steps that were completed when it came.
        resumed_from: The step of the checkpoint that the resumed run went on from.
        differences: What is not the same as in the straight run; empty if every bit is.
        diverged_at: The first step at which the run differed before the fault came; None if it
            did not. Then the script differs from run to run by itself.
        threads: The number of torch's threads by rank.
        directory: Where the run was made: its run directory and its output.
    """

    fault: Fault
    hit_step: int
    resumed_from: int
    differences: tuple[Difference, ...]
    diverged_at: int | None
    threads: Mapping[int, int]
    directory: Path

    @property
    def is_exact(self) -> bool:
        """Whether the run ended in the same bits as the straight one."""
        return not self.differences

    @property
    def replayed_steps(self) -> int:
        """The steps that were lost and trained again."""
        return max(0, self.hit_step - self.resumed_from)

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits or explains the result, in sentences."""
        notes = []
        if self.fault.kind == "kill" and self.replayed_steps < MIN_REPLAYED_STEPS:
            steps = "1 step" if self.replayed_steps == 1 else f"{self.replayed_steps} steps"
            notes.append(
                f"The kill came {steps} after a checkpoint, so that little had to be trained"
                f" again. Kill at least {MIN_REPLAYED_STEPS} steps after one."
            )
        if self.diverged_at is not None:
            notes.append(
                f"The run differed at step {self.diverged_at}, before the fault came: the script"
                " differs from run to run even without one. Give it a seed, and let it use no"
                " time, no set order and no operation that is not deterministic."
            )
        return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of `verify_resume`: same bits with and without interruptions, or not.

    Attributes:
        steps_completed: The steps of the straight run.
        checkpoint_steps: The steps at which it stored checkpoints.
        outcomes: One per fault, in the order given.
        operations: Torch operations that said that they have no deterministic implementation.
        threads: The number of torch's threads by rank in the straight run.
        directory: Where the straight run was made.
    """

    steps_completed: int
    checkpoint_steps: tuple[int, ...]
    outcomes: tuple[FaultOutcome, ...]
    operations: tuple[str, ...]
    threads: Mapping[int, int]
    directory: Path

    @property
    def is_exact(self) -> bool:
        """Whether all interrupted runs ended in the same bits as the straight one."""
        return all(outcome.is_exact for outcome in self.outcomes)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of all interrupted runs."""
        return tuple(one for outcome in self.outcomes for one in outcome.differences)

    @property
    def notes(self) -> tuple[str, ...]:
        """What limits or explains the results, in sentences."""
        notes = [f"{outcome.fault}: {note}" for outcome in self.outcomes for note in outcome.notes]
        if self.operations:
            notes.append(
                f"No deterministic implementation: {', '.join(self.operations)}. What they compute"
                " may differ from run to run."
            )
        for outcome in self.outcomes:
            if outcome.threads != self.threads:
                notes.append(
                    f"{outcome.fault}: the threads by rank were {dict(outcome.threads)}, but"
                    f" {dict(self.threads)} in the straight run; sums may differ by that."
                )
        return tuple(notes)
