"""The resumable training of the trial class and of config objects: loop, state, checkpoints."""
