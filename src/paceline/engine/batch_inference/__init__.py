"""Batch inference: each batch of a data set once, on all ranks together."""
