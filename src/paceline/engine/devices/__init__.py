"""Devices of ranks: the process group, moving data, the number format, random generators."""
