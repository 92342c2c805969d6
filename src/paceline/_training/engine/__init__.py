"""The training engine that the front doors share."""
