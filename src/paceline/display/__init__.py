"""Progress and tables on a terminal or in a notebook."""

from paceline.display._end_summary import ending_of, locations_of
from paceline.display._html import html_table
from paceline.display._plots import plot_history
from paceline.display._progress import TrainingProgress
from paceline.display._progress_line import format_duration

__all__ = [
    "TrainingProgress",
    "ending_of",
    "format_duration",
    "html_table",
    "locations_of",
    "plot_history",
]
