"""What a person at a terminal or in a notebook sees while something is under way."""

from paceline.display._progress import TrainingProgress

__all__ = ["TrainingProgress"]
