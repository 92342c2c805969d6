"""Run a user's Python program as a worker, and end it as a worker should.

Run as ``python _program.py KIND TARGET ARGUMENTS...``, by its path and with the standard library
alone: the interpreter is the user's choice, and nothing of the current directory may be imported
before the program itself. The kinds script, module and code are as for Python. A call is a function
of the driver; its directory is described in `_call`. To serve is to carry out many calls, see
`_serve`; to fork is to do that in processes forked from this one, see `_fork_server`.

With gloo a process that has done all its work can still abort while the interpreter shuts down: a
thread of gloo asks for the interpreter lock too late. So the program's end is made of the same
parts as Python's own (threads, exit handlers, flushing), then the process group is left, then the
process ends without shutting the interpreter down. The result stands in a status file before that.
"""

import atexit
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import time
import traceback
import types

STATUS_VARIABLE = "PACELINE_WORKER_STATUS"
# The name under which this module can be found in a process that it runs.
RUNNING_MARK = "_paceline_program"
FLUSH_FAILED = 120
INTERRUPTED = 130
CALL_FACTS = "driver.json"
PROGRAM_FILE = __file__
# The file beside the status file that shows that the process lives.
BEAT_ENDING = ".beat"

_LEAVE_TIMEOUT_S = 10.0
_BEAT_S = 0.5
_ERROR_CHARACTERS = 1000


class Outcome:
    """How the program ended; `time` is in seconds since the epoch.

    `left_by` is what it left by before its end, such as "sys.exit(3)".
    """

    def __init__(
        self,
        code: int,
        error: "str | None" = None,
        is_consequence: bool = False,
        left_by: "str | None" = None,
    ) -> None:
        self.code = code
        self.error = error
        self.is_consequence = is_consequence
        self.left_by = left_by
        self.time = time.time()


def main(kind: str, target: str, arguments: "list[str]") -> None:
    """Run the program, say how it ended, and leave the process."""
    status_path = os.environ.pop(STATUS_VARIABLE, None)
    _Heartbeat.path = status_path and status_path + BEAT_ENDING
    sys.modules[RUNNING_MARK] = sys.modules["__main__"]
    _show_lines_at_once()
    outcome = _run(kind, target, arguments)
    # As the interpreter does: wait for threads, then run the exit handlers.
    _attempt(threading._shutdown)  # type: ignore[attr-defined] # also stops idle executors
    _attempt(atexit._run_exitfuncs)
    if not flush() and outcome.code == 0:
        outcome = Outcome(FLUSH_FAILED, "the standard output cannot be written")
    if status_path:
        _write_status(status_path, outcome)
    if outcome.code == 0:
        leave_process_group()
    os._exit(outcome.code)


class _Heartbeat:
    """The file by which this process shows that it lives; None once it does, or for nobody."""

    path: "str | None" = None


def begin_heartbeat() -> None:
    """Have a thread show that this process lives, for a launcher that looks; once only.

    Programs that do not use Paceline have none: they may hold Python's lock for as long as they
    like, and fork without a thread in their way.
    """
    path, _Heartbeat.path = _Heartbeat.path, None
    if path:
        _touch(path)
        threading.Thread(target=_beat, args=(path,), name="paceline-beat", daemon=True).start()


def _beat(path: str) -> None:
    while True:
        time.sleep(_BEAT_S)
        _touch(path)


def _touch(path: str) -> None:
    try:
        with open(path, "ab"):
            os.utime(path)
    except OSError:
        # Without the file, or after the launcher has gone, nobody looks.
        pass


def _show_lines_at_once() -> None:
    # Through a pipe Python would collect kilobytes first, and lose them when the worker is killed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.write_through:
            stream.reconfigure(line_buffering=True)


def _run(kind: str, target: str, arguments: "list[str]") -> Outcome:
    try:
        program = types.ModuleType("__main__")
        program.__dict__["__builtins__"] = __builtins__
        if sys.version_info < (3, 14):
            program.__dict__["__annotations__"] = {}
        # For the rest of the process, so that exit handlers and pickling find it too.
        sys.modules["__main__"] = program
        if kind == "call":
            _call(program, target)
        elif kind == "serve":
            _serve(program, target)
        elif kind == "fork":
            _fork(program, target)
        else:
            code = _LOADERS[kind](program, target, arguments)
            exec(code, program.__dict__)  # noqa: S102 - this is the user's program
    except SystemExit as request:
        return _outcome_of_exit(request.code)
    except BaseException as error:
        return _outcome_of_error(error)
    return Outcome(0)


def _call(program: types.ModuleType, directory: str) -> None:
    """Call a function of the driver, where modules are found as in the driver."""
    import json

    with open(os.path.join(directory, CALL_FACTS), encoding="utf-8") as file:
        facts = json.load(file)
    sys.path[:] = facts["path"]
    sys.argv[:] = facts["arguments"]
    if facts["file"]:
        program.__file__ = facts["file"]
    call = importlib.import_module("paceline.workers._call")
    call.perform(directory, program, facts)


def _serve(program: types.ModuleType, target: str) -> None:
    """Carry out calls of a driver, where modules are found as in the driver."""
    import json

    facts = json.loads(target)
    # On another node than the driver's, modules are found as that node finds them.
    own_directory = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = facts.pop("path", None) or [
        path for path in sys.path if os.path.realpath(path) != own_directory
    ]
    serve = importlib.import_module("paceline.workers._serve")
    serve.serve(program, **facts)


def _fork(program: types.ModuleType, target: str) -> None:
    """Fork processes that serve, until the driver has gone; go on in these alone."""
    import json

    facts = json.loads(target)
    sys.path[:] = facts.pop("path")
    server = importlib.import_module("paceline.workers._fork_server")
    _serve(program, server.serve_forks(server.ServerFacts(**facts)))


def _load_script(program: types.ModuleType, target: str, arguments: "list[str]") -> types.CodeType:
    sys.argv = [target, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(target)))
    path = os.path.abspath(target)
    program.__file__ = path
    program.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _load_module(program: types.ModuleType, target: str, arguments: "list[str]") -> types.CodeType:
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())
    spec = importlib.util.find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader else None  # type: ignore[attr-defined] # as for `python -m`
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {target} that can be run")
    program.__spec__ = spec
    program.__package__ = spec.parent
    program.__loader__ = spec.loader
    program.__file__ = spec.origin
    sys.argv[0] = spec.origin or target
    assert isinstance(code, types.CodeType)
    return code


def _load_code(program: types.ModuleType, target: str, arguments: "list[str]") -> types.CodeType:
    sys.argv = ["-c", *arguments]
    _set_first_path("")
    return compile(target, "<string>", "exec", dont_inherit=True)


_LOADERS = {"script": _load_script, "module": _load_module, "code": _load_code}


def _set_first_path(path: str) -> None:
    """Put the program's directory where Python put that of this file."""
    own_directory = os.path.dirname(os.path.realpath(__file__))
    # The interpreter's flags -I and -P keep it out, then the program's stays out too.
    if sys.path and os.path.realpath(sys.path[0]) == own_directory:
        sys.path[0] = path


def exit_code_of(request: object) -> int:
    """Return the exit code that Python makes of what `sys.exit` was given."""
    if request is None:
        return 0
    return request & 0xFF if isinstance(request, int) else 1


def describe_exit(request: object) -> str:
    """Return what was called, such as "sys.exit(3)", if `sys.exit` was given `request`."""
    return f"sys.exit({'' if request is None else repr(request)[:_ERROR_CHARACTERS]})"


def _outcome_of_exit(code: object) -> Outcome:
    left_by = describe_exit(code)
    if code is None or isinstance(code, int):
        return Outcome(exit_code_of(code), left_by=left_by)
    _attempt(lambda: print(code, file=sys.stderr))
    return Outcome(1, str(code)[:_ERROR_CHARACTERS], left_by=left_by)


def _outcome_of_error(error: BaseException) -> Outcome:
    description = "".join(traceback.format_exception_only(type(error), error)).strip()
    outcome = Outcome(
        INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
        description.splitlines()[-1][:_ERROR_CHARACTERS],
        is_consequence=getattr(error, "is_consequence", False) is True,
    )
    if getattr(error, "is_told_to_driver", False):
        return outcome
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    try:
        # Experiment trackers and debuggers put their own hook here.
        sys.excepthook(type(error), error, frames)
    except BaseException:
        _attempt(lambda: sys.__excepthook__(type(error), error, frames))
    return outcome


def _attempt(action: "object") -> None:
    """Do a step of the ending; what fails is shown and stops nothing."""
    try:
        action()  # type: ignore[operator] # a callable without arguments
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()


def flush() -> bool:
    """Flush the standard streams; tell whether that worked."""
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            is_flushed = False
    return is_flushed


def _write_status(path: str, outcome: Outcome) -> None:
    import json

    content = vars(outcome)
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        # The exit code still says it.
        pass


def leave_process_group() -> None:
    """Leave the process group of torch.distributed in bounded time, if there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    # Leaving can wait for ranks that are gone; all that counts has been said by now.
    timer = threading.Timer(_LEAVE_TIMEOUT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    _attempt(distributed.destroy_process_group)
    timer.cancel()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
