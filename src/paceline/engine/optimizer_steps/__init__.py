"""Optimizer steps: from a loss to changed parameters."""
