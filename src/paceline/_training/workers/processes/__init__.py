"""Processes of this machine: started, forked, placed, watched, read and ended."""
