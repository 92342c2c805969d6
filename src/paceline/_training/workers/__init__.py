"""Worker processes: local, on Ray, started by an outer launcher, inline, or as user programs.

Also: inline or as programs.
"""
