"""State of a training as checkpoints: captured, stored, kept, read, compared at a resume."""
