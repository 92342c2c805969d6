"""The server: experiments, search, scheduling, metrics, checkpoints and logs."""
