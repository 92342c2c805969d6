"""Train functions with a loop of their own: what each rank prepares, reports and saves."""
