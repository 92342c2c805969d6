"""Where the time goes: timers of steps, totals of a run, traces."""
