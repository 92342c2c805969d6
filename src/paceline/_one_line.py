"""Logging in three lines: `paceline.init()`, `paceline.log()`, `paceline.finish()`.

For scripts that have no place for a `with` block; all else is that of `paceline.core`.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from paceline._base.run_directory import RunDirectory
from paceline.core._core_context import Context
from paceline.core._core_context import init as init_core
from paceline.core._read_runs import read_checkpoints
from paceline.core._train_context import TrainContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Media:
    """Value that `paceline.log` reports as media; `Image` and its like make one."""

    kind: str
    content: Any
    options: dict[str, Any] = field(default_factory=dict)

    def report(self, train: TrainContext, step: int, name: str) -> None:
        """Report the value under a name."""
        getattr(train, f"report_{self.kind}")(step, name, self.content, **self.options)


def Image(image: Any, caption: str | None = None) -> Media:
    """Return an image to log: of Pillow, an array, a tensor or a path; see `report_image`."""
    return Media("image", image, {"captions": caption})


def Audio(audio: Any, sample_rate: int | None = None, caption: str | None = None) -> Media:
    """Return sound to log: a path, or samples; see `report_audio`."""
    return Media("audio", audio, {"sample_rate": sample_rate, "captions": caption})


def Video(video: Any, frames_per_second: float = 8.0, caption: str | None = None) -> Media:
    """Return a video to log: a path, or frames; see `report_video`."""
    return Media("video", video, {"frames_per_second": frames_per_second, "captions": caption})


def Table(data: Any, columns: Sequence[str] | None = None) -> Media:
    """Return a table to log: see `report_table`, or rows with the names of their `columns`."""
    if columns is not None:
        data = [dict(zip(columns, row, strict=True)) for row in data]
    return Media("table", data)


def Histogram(values: Any, num_bins: int = 64, counts: Any = None) -> Media:
    """Return the distribution of values to log; with `counts`, `values` are edges of bins."""
    return Media("histogram", values, {"num_bins": num_bins, "counts": counts})


def Html(html: str | Path) -> Media:
    """Return a page to log: HTML as a string, or the path of a file as a `Path`."""
    return Media("html", html)


def File(path: str | os.PathLike[str], caption: str | None = None) -> Media:
    """Return a file to log as it is."""
    return Media("file", path, {"captions": caption})


class Run:
    """Run begun by `paceline.init()`; it ends by `finish()`, or with the script.

    Attributes:
        context: The context of `core.init()`, for checkpoints, preemption and all else.
        config: The configuration that was given, with the hyperparameters of the trial if a search
            or a master has started the script.
    """

    def __init__(self, context: Context, config: dict[str, Any]) -> None:
        self.context = context
        trial = None if context.info is None else context.info.trial
        self.config = config | (trial.hparams if trial is not None else {})
        self._step = _step_of_checkpoint(context)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._excepthook, self._exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self._on_exception, self._on_exit_call
        atexit.register(self._at_exit)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.context.run_dir

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log values; see `paceline.log`."""
        with self._lock:
            self._step = step = self._step + 1 if step is None else step
            # Whoever goes on after `sys.exit` has caught it.
            self._error = None
        media = {name: found for name, value in values.items() if (found := _media_of(value))}
        numbers = {name: value for name, value in values.items() if name not in media}
        if numbers or not media:
            self.context.train.report_training_metrics(step, numbers)
        for name, found in media.items():
            found.report(self.context.train, step, name)

    def finish(self, error: BaseException | None = None) -> None:
        """End the run; one that has ended stays as it is.

        Args:
            error: The exception by which it has failed.
        """
        global _current
        if _current is self:
            _current = None
            atexit.unregister(self._at_exit)
            # Hooks that others have set since then are theirs.
            if sys.excepthook == self._on_exception:
                sys.excepthook = self._excepthook
            if sys.exit == self._on_exit_call:
                sys.exit = self._exit
            self.context.close(error)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.finish(error)

    def _on_exception(self, kind: Any, error: BaseException, traceback: Any) -> None:
        self._error = error
        self._excepthook(kind, error, traceback)

    def _on_exit_call(self, code: Any = None) -> NoReturn:
        # In another thread it ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            self._error = SystemExit(code)
        self._exit(code)

    def _at_exit(self) -> None:
        # A forked child is not the run.
        if os.getpid() == self._pid:
            self.finish(self._error)


_current: Run | None = None


def init(
    *,
    project: str | None = None,
    name: str | None = None,
    config: Any = None,
    tags: Sequence[str] = (),
    resume: str | os.PathLike[str] | None = None,
    master: str | None = None,
    **options: Any,
) -> Run:
    """Begin a run that `paceline.log` reports to; it ends by `finish()`, or with the script.

    An exception that ends the script, or `sys.exit` with another code than 0, marks the run as
    failed. Every rank of a launcher must call this. A run that is open is ended first.

    Args:
        project: Becomes the label `project:NAME`.
        name: The run's name; the stem of the script by default.
        config: The hyperparameters: a dictionary, or an object with attributes, such as the result
            of `argparse`.
        tags: Labels.
        resume: "auto", or what else `core.init` takes.
        master: The URL of a master that shows the run live; see `core.init`.
        options: Further arguments of `core.init`.

    Raises:
        TypeError: `config` has no names and values.
        ValueError: See `core.init`.
    """
    global _current
    if _current is not None:
        logger.warning(
            "`paceline.init()` ends the run %s, which is still open. Hint: call"
            " `paceline.finish()` first.",
            _current.run_dir.name,
        )
        _current.finish()
    if isinstance(tags, str):
        raise TypeError(f"`tags` must be a list of texts, but got {tags!r}.")
    if config is not None and not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise TypeError(f"`config` must be a dictionary or an object, but got {config!r}.")
    given = dict(config if isinstance(config, Mapping) else vars(config)) if config else {}
    labels = [*([f"project:{project}"] if project else []), *tags]
    context = init_core(
        name=name,
        resume=resume,
        hparams=given if config is not None else None,
        labels=labels,
        master=master,
        **options,
    )
    _current = Run(context, given)
    return _current


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Log numbers as training metrics, and media as media.

    Args:
        values: Names to numbers, strings, lists and dictionaries of them, `paceline.Image` and its
            like, Pillow images, figures of Matplotlib or Plotly, or lists of images.
        step: The completed steps; one more than the last time by default, from 1 or from the
            checkpoint that the run resumes from.

    Raises:
        RuntimeError: `paceline.init()` was not called.
        TypeError: A value has another type.
        ValueError: The step was logged with another value.
    """
    if _current is None:
        raise RuntimeError("`paceline.log()` needs a run. Hint: call `paceline.init()` first.")
    _current.log(values, step)


def finish() -> None:
    """End the run as completed; does nothing if there is none."""
    if _current is not None:
        _current.finish()


def _step_of_checkpoint(context: Context) -> int:
    """Return the step from which a run resumes; 0 if it begins."""
    if context.latest_checkpoint is None:
        return 0
    stored = read_checkpoints(RunDirectory(context.run_dir))
    steps = [one.steps_completed for one in stored if one.uuid == context.latest_checkpoint]
    return max(steps, default=0)


def _media_of(value: Any) -> Media | None:
    """Return a value as media; None for numbers, texts and the like."""
    if isinstance(value, Media):
        return value
    if hasattr(value, "getbands") and hasattr(value, "save"):
        return Image(value)
    if hasattr(value, "savefig") or hasattr(value, "to_plotly_json"):
        return Media("figure", value)
    if not isinstance(value, list) or not value:
        return None
    found = [_media_of(one) for one in value]
    images = [one for one in found if one is not None and one.kind == "image"]
    if len(images) < len(value):
        return None
    captions = [one.options["captions"] or "" for one in images]
    return Media("image", [one.content for one in images], {"captions": captions})
