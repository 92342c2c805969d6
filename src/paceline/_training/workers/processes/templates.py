"""Templates of this process for workers, scripts and runners: chosen, loaded ahead, stopped."""

import atexit
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from paceline._base.files import read_regular
from paceline._training.workers.processes.rank_environment import THREADS_VARIABLE
from paceline._training.workers.processes.template_client import (
    START_S,
    Template,
    TemplateError,
    import_time_facts,
    is_warm,
    template_environment,
    unbuffered_environment,
)
from paceline._training.workers.processes.worker_process import (
    ProcessHandle,
    Start,
    WorkerSpec,
    start_process,
)
from paceline._training.workers.processes.worker_program import PROGRAM_FILE

logger = logging.getLogger(__name__)

_LOADED = ("torch", "numpy", "cloudpickle", "paceline._training.workers.serve_calls")
# Modules of a process's first optimizer: their import takes longer than all else in a restarted
# worker.
_LATER_MODULES = ("torch._dynamo",)
# An idle template keeps memory for nobody.
_IDLE_S = 600.0
# Packages that start no threads, open no device and read no rank when they are imported.
_SAFE = {"torch", "numpy", "paceline", "msgspec", "safetensors", "xxhash", "yaml", "cloudpickle"}
_UNSAFE = re.compile(r"torch\.(_inductor|testing|utils\.tensorboard)\b|paceline\.cli\b|.*__main__")
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", re.ASCII)
_TORCH = rb"\b(torch|paceline)\b"
_UNSAFE_STANDARD = {"antigravity", "idlelib", "readline", "rlcompleter", "site", "test", "this"}
_MAX_MODULES = 5000
# Times to look at a program in seconds: first, and until it counts as one without Paceline.
_LEARN_S = 1.0
_PATIENCE_S = 10.0
_CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
RUNNER_MODULES = (
    "paceline._cluster.runner.attempt_run",
    "argparse",
    "encodings.ascii",
    "encodings.idna",
    "gzip",
    # Of each trial's `core.init`.
    "importlib.metadata",
    "paceline.core",
)
TRIAL_MODULES = ("torch", "numpy", "paceline.pytorch", "torch._dynamo")


def forking_start(environment: Mapping[str, str], modules: Sequence[str]) -> Start:
    """Return a function to start workers: by a template if possible, else as new processes.

    The template is started if there is none for workers with such an environment.

    Args:
        environment: The workers' environment, as far as it is the same for all.
        modules: The modules to load in the template besides torch.
    """
    if not _CAN_FORK or not is_warm():
        return start_process
    try:
        return partial(_current(environment).start, modules)
    except TemplateError as error:
        logger.warning("Workers start slowly, as new interpreters: %s.", error)
        return start_process


def template_of_runners(environment: Mapping[str, str]) -> "Template":
    """Return a new template for runners of attempts and, once one has loaded torch, for trials.

    Args:
        environment: The environment of runners.

    Raises:
        TemplateError: There can be none.
    """
    template = Template(
        {},
        [sys.executable],
        {**unbuffered_environment(environment), THREADS_VARIABLE: "1", "OPENBLAS_NUM_THREADS": "1"},
        None,
        modules=RUNNER_MODULES,
        later=(),
        idle_s=_IDLE_S,
        parent="nobody",
        learned=TRIAL_MODULES,
    )
    template.await_loaded()
    return template


def template_of_scripts(environment: Mapping[str, str]) -> "Template":
    """Return the template for scripts of this process, which load torch; started if necessary.

    Args:
        environment: The environment of the scripts.

    Raises:
        TemplateError: There can be none.
    """
    if not _CAN_FORK or not is_warm(environment):
        raise TemplateError("warm starts are turned off")
    return _current(environment, is_for_scripts=True)


def template_of_ranks(command: Sequence[str], environment: Mapping[str, str]) -> "Template | None":
    """Return a new template for ranks of a launcher, which loads torch meanwhile.

    Args:
        command: The command of the ranks.
        environment: The environment of the launcher.

    Returns:
        None if the command is not that of a script for this interpreter that names torch.
    """
    if not _can_fork(command) or not _names_torch(command):
        return None
    return Template(
        import_time_facts(environment),
        command[: command.index(PROGRAM_FILE)],
        template_environment(environment),
        None,
        modules=TRIAL_MODULES,
        later=(),
        idle_s=None,
        parent="owner",
    )


def load_ahead(environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Make the template load all modules workers need, before the first worker starts.

    Args:
        environment: As `forking_start`.
        modules: As `forking_start`.
    """
    if _CAN_FORK and is_warm():
        # The start of a worker reports if there can be no server.
        with suppress(TemplateError):
            _current(environment).load(modules)


def stop_templates() -> None:
    """End the template, parent of forked workers; the next pool starts another.

    It ends by itself with this process, and when it has had no workers for ten minutes. Workers
    that it has forked are killed.
    """
    with _lock:
        for server in _servers:
            server.close()
        _servers.clear()


class ProgramStart:
    """Start of a launcher's programs: a restart forks a template that loaded what they had loaded.

    Args:
        command: The command of the programs.
        loaded: Returns the modules that they report to have loaded, if they use Paceline.
        template: The first template, if there is one.
    """

    def __init__(
        self,
        command: Sequence[str],
        loaded: Callable[[], object],
        template: "Template | None" = None,
    ) -> None:
        self._can_fork = _can_fork(command)
        self._interpreter = command[: command.index(PROGRAM_FILE)] if self._can_fork else ()
        self._loaded = loaded
        self._template = template if self._can_fork else None
        # A start waits for the template only if it has been there from the beginning.
        self._patience_s = 0.0 if template is None else START_S
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, spec: WorkerSpec, environment: Mapping[str, str], is_read: bool
    ) -> ProcessHandle:
        """Start a program; see `start_process`."""
        template, key = self._template, import_time_facts(environment)
        if template is not None and template.key == key and template.is_loaded(self._patience_s):
            return template.start((), spec, environment, is_read)
        return start_process(spec, environment, is_read)

    def learn(self, pid: int, environment: Mapping[str, str]) -> None:
        """Start a template for restarts, once a program that was started has loaded torch.

        A template that is there loads the modules that it lacks, once the program reports its own.

        Args:
            pid: The program's process.
            environment: The environment of all programs.
        """
        if not self._can_fork:
            return
        self._end_learning()
        if self._template is not None and not self._template.is_alive:
            self.close()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._learn,
            args=(pid, environment, self._is_over),
            name="paceline-template",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End the template; its forks continue."""
        self._end_learning()
        if self._template is not None:
            self._template.close()
        self._template = None

    def _end_learning(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _learn(self, pid: int, environment: Mapping[str, str], is_over: threading.Event) -> None:
        wait_s = _LEARN_S
        while not is_over.wait(wait_s):
            wait_s *= 1.5
            loaded = self._loaded()
            if self._template is not None:
                if loaded is not None and self._template.is_loaded():
                    # A template that breaks is reported by the next start.
                    with suppress(TemplateError):
                        self._template.load(_safe_modules(loaded))
                    return
                continue
            if not _has_torch(pid) or (loaded is None and wait_s < _PATIENCE_S):
                continue
            # Environment of the programs, so that libraries read in it what they read there.
            self._template = Template(
                import_time_facts(environment),
                self._interpreter,
                {**environment, "OPENBLAS_NUM_THREADS": "1"},
                None,
                modules=["torch", *_safe_modules(loaded), *_LATER_MODULES],
                later=(),
                idle_s=None,
                parent="owner",
            )
            if loaded is not None:
                return


def _can_fork(command: Sequence[str]) -> bool:
    """Return whether a command can be a fork: a program of this interpreter, by `PROGRAM_FILE`."""
    return _CAN_FORK and command[0] == sys.executable and PROGRAM_FILE in command and is_warm()


def _names_torch(command: Sequence[str]) -> bool:
    """Return whether the script of a command names torch, or a package of Paceline."""
    kind, target, *_ = command[command.index(PROGRAM_FILE) + 1 :]
    try:
        return kind == "script" and bool(re.search(_TORCH, read_regular(target)))
    except OSError:
        # The interpreter reports it.
        return False


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"/libtorch" in file.read()
    except OSError:
        return False


def _safe_modules(names: object) -> list[str]:
    """Return the names of modules that a template may load, of those that a program reports."""
    if not isinstance(names, list):
        return []
    texts = [name for name in names[:_MAX_MODULES] if isinstance(name, str)]
    safe = _SAFE | sys.stdlib_module_names - _UNSAFE_STANDARD
    return [
        name
        for name in texts
        if _MODULE_NAME.match(name) and name.partition(".")[0] in safe and not _UNSAFE.match(name)
    ]


_lock = threading.Lock()
# The last one is for new workers; the others are kept while they have workers.
_servers: list[Template] = []


def _current(environment: Mapping[str, str], is_for_scripts: bool = False) -> Template:
    """Return the template for workers or scripts with an environment, started if necessary."""
    key = import_time_facts(environment)
    with _lock:
        wanted = (key, is_for_scripts, True)
        if [(one.key, one.is_for_scripts, one.is_alive) for one in _servers[-1:]] != [wanted]:
            for server in [server for server in _servers if server.num_workers == 0]:
                server.close()
                _servers.remove(server)
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
            server = Template(
                key,
                [sys.executable, *flags],
                template_environment(environment),
                None if is_for_scripts else [path or os.getcwd() for path in sys.path],
                modules=TRIAL_MODULES if is_for_scripts else _LOADED,
                later=() if is_for_scripts else _LATER_MODULES,
                idle_s=_IDLE_S,
                parent="template",
            )
            server.is_for_scripts = is_for_scripts
            server.await_loaded()
            _servers.append(server)
        return _servers[-1]


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    for server in _servers:
        server.forget()
    _servers.clear()


# A fork of this process must neither use its servers nor end them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(stop_templates)
