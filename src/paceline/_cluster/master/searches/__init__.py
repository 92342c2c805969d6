"""Searches of experiments: their inputs, operations, limits, samplers and proposals."""
