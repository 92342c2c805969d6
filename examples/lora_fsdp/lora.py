"""LoRA: a low-rank addition to frozen linear layers."""

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained addition of low rank.

    Args:
        base: The layer, which is frozen; its weight is [out, in].
        rank: The rank of the addition.
        alpha: The addition counts `alpha / rank`.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        # In the beginning, the layer gives what its base gives.
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def add_lora(model: nn.Module, names: tuple[str, ...], rank: int, alpha: float) -> None:
    """Freeze a model, and add LoRA to all linear layers with one of these names.

    Args:
        model: The model, which is changed.
        names: The last parts of the layers' names, such as "q_proj".
        rank: The rank of each addition.
        alpha: Each addition counts `alpha / rank`.
    """
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, alpha))


def num_trained(model: nn.Module) -> tuple[int, int]:
    """Return the number of trained and of all parameters."""
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)


def merge_lora(model: nn.Module) -> None:
    """Put plain linear layers that do the same in the place of those with LoRA."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoRALinear):
                with torch.no_grad():
                    child.base.weight += child.scale * child.up.weight @ child.down.weight
                setattr(module, name, child.base)
