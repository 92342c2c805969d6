"""Gradients: weighting, accumulating, clipping, and averaging them over the ranks."""
