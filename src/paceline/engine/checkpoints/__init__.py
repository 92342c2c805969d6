"""Checkpoints: when they are saved, in the background, and which of them are kept."""
