"""Warm workers that carry out calls: inline, local, joined to a launcher, programs, or on Ray."""
