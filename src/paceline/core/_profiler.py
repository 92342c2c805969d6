"""The place of the profiler."""

from typing import NoReturn

from paceline.core._errors import refuse


class ProfilerContext:
    """Refuse to sample system metrics: the profiler is not offered yet."""

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> NoReturn:
        """Refuse.

        Raises:
            NotOfferedError: Always.
        """
        refuse("`profiler.on()`")

    def off(self) -> NoReturn:
        """Refuse.

        Raises:
            NotOfferedError: Always.
        """
        refuse("`profiler.off()`")
