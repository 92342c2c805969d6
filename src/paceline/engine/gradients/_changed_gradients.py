"""Changes of gradients that are not complete, such as clipping by hand after each batch."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from paceline.engine.tensors._sharded_tensors import is_sharded, local_part

# Each backward pass at first, then one of so many is looked at: code that changes gradients by
# hand does so in every batch, and a look costs 0.1 us for each parameter.
_INTERVAL = 16

_Mark = tuple[int, float]


class ChangedGradients:
    """A look at gradients after backward passes, and another one when an optimizer is to step.

    Attributes:
        is_scaled: Whether losses are scaled, so that gradients are too until the step.
    """

    def __init__(self) -> None:
        self.is_scaled = False
        self._num_passes = 0
        self._is_found = False
        # The marks of the parameters' gradients after the last backward pass.
        self._seen: dict[int, _Mark] = {}

    def note(
        self, parameters: Callable[[], Iterable[torch.nn.Parameter]], *, is_complete: bool
    ) -> None:
        """Note, on the chief, the gradients after a backward pass if the step will get others.

        Args:
            parameters: Returns the parameters.
            is_complete: Whether nothing will be added to the gradients.
        """
        self._num_passes += 1
        is_early = self._num_passes <= _INTERVAL
        is_due = not self._is_found and (is_early or self._num_passes % _INTERVAL == 0)
        is_left_alone = is_complete and not self.is_scaled
        is_seen = is_due and not is_left_alone and _is_chief()
        self._seen = _gradient_marks(parameters()) if is_seen else {}

    def find(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer's gradients have changed since; True once only.

        Gradients that are gone, as by `zero_grad`, are no changed ones.
        """
        if not self._seen:
            return False
        now = _gradient_marks(p for group in optimizer.param_groups for p in group["params"])
        was_found = self._is_found
        self._is_found = was_found or any(self._seen.get(key, now[key]) != now[key] for key in now)
        # The step will change them too.
        self._seen = {key: seen for key, seen in self._seen.items() if key not in now}
        return self._is_found and not was_found


def _is_chief() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gradient_marks(parameters: Iterable[torch.nn.Parameter]) -> dict[int, _Mark]:
    """Return what tells a changed gradient from the same one, for each parameter with one."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    marks: dict[int, _Mark] = {key: (id(g), g._version) for key, g in gradients.items()}
    # What torch does to a sharded tensor in place does not always change its version.
    pieces = {key: local_part(g) for key, g in gradients.items() if is_sharded(g)}
    if pieces:
        norms = torch.stack(torch._foreach_norm([*pieces.values()])).nan_to_num_(-1.0).tolist()
        marks.update(
            (key, (id(gradients[key]), norm)) for key, norm in zip(pieces, norms, strict=True)
        )
    return marks
