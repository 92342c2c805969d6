"""State of a training: capturing and restoring models, optimizers, buffers and gradients."""
