"""Workers on a Ray cluster: pool, placement, host actors and processes, forwarded storage."""
