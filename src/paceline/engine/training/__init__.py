"""A resumable training of registered models: loop, state and checkpoints together."""
