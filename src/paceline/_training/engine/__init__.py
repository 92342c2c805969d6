"""Training engine shared by the trial and train-function APIs."""
