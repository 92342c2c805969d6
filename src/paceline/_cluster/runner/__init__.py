"""Attempts on a machine: their processes, what they report, and the runner of a node."""
