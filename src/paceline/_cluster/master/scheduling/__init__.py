"""Scheduling of slots to waiting trials: pure functions over plain data."""
