"""Which waiting trial gets which slots: pure functions over plain data."""
