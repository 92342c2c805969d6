"""Losses that torch does not have."""

import torch
from torch import Tensor, nn


class NegativeCosineSimilarity(nn.Module):
    """The mean of minus the cosine between two batches of vectors [batch, features].

    Args:
        stop_gradient: Whether the second one counts as a constant.
    """

    def __init__(self, stop_gradient: bool = True) -> None:
        super().__init__()
        self.stop_gradient = stop_gradient

    def forward(self, p: Tensor, z: Tensor) -> Tensor:
        """Return a number from -1 to 1."""
        target = z.detach() if self.stop_gradient else z
        return -nn.functional.cosine_similarity(p, target, dim=1).mean()


class SymmetricNegativeCosineSimilarity(nn.Module):
    """The loss of SimSiam: of two views' predictions p and projections z, crosswise."""

    def __init__(self) -> None:
        super().__init__()
        self._one_way = NegativeCosineSimilarity()

    def forward(self, p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
        """Return a number from -1 to 1."""
        loss: Tensor = (self._one_way(p1, z2) + self._one_way(p2, z1)) / 2
        return loss


class MarginLoss(nn.Module):
    """The margin loss of capsule networks, summed over classes.

    Args:
        m_plus: Lengths of the right class count below this.
        m_minus: Lengths of other classes count above this.
        negative_weight: What other classes are multiplied by.
    """

    def __init__(
        self, m_plus: float = 0.9, m_minus: float = 0.1, negative_weight: float = 0.5
    ) -> None:
        super().__init__()
        self.m_plus = m_plus
        self.m_minus = m_minus
        self.negative_weight = negative_weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over samples, given lengths and one-hot labels [batch, classes]."""
        right = labels * (self.m_plus - x).clamp_min(0) ** 2
        others = (1 - labels) * (x - self.m_minus).clamp_min(0) ** 2
        return (right + self.negative_weight * others).sum(1).mean()


class TotalVariationLoss(nn.Module):
    """A regularizer: the mean step between neighbouring pixels of images [batch, channel, y, x].

    Args:
        weight: What the sum over all images is multiplied by.
    """

    def __init__(self, weight: float = 0.1) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, *images: Tensor, **named_images: Tensor) -> Tensor:
        """Return the sum over all predictions."""
        total = torch.zeros(())
        for image in (*images, *named_images.values()):
            steps = image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
            total = total.to(steps.device) + steps
        return self.weight * total
