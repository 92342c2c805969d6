"""Life cycle of experiments and trials: state transitions and their triggers."""
