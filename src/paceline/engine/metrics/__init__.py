"""Metrics over batches and ranks: weighted means and reducers."""
