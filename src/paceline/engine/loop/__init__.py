"""The training loop from batch to batch, and validation."""
