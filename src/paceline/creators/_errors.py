"""What a trainer of creators raises."""


class TrainingFailedError(RuntimeError):
    """Raised when workers were lost more often than allowed, or cannot be formed again."""
