"""Attempts on a machine: their processes and reports, and the runner of a node."""
