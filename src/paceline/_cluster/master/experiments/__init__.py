"""The life cycle of experiments and trials: what may follow what, and what makes it happen."""
