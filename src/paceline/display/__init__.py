"""Progress and tables on a terminal or in a notebook."""

from paceline.display._ending import ending_of, locations_of
from paceline.display._html import html_table
from paceline.display._line import format_duration
from paceline.display._plots import plot_history
from paceline.display._progress import TrainingProgress

__all__ = [
    "TrainingProgress",
    "ending_of",
    "format_duration",
    "html_table",
    "locations_of",
    "plot_history",
]
