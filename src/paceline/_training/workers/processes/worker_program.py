"""Wrapper to run a user's Python program as a worker, with a reported and safe exit.

Run as ``python _worker_program.py KIND TARGET ARGUMENTS...``, by its path and with the standard
library alone: the interpreter is the user's choice, and nothing of the current directory may be
imported before the program itself. The kinds script, module and code are as for Python. To serve is
to carry out the calls of a driver, see `_serve_driver`; to fork is to do that in processes forked
from this one, see `template_process`.

With gloo a process that has done all its work can still abort while the interpreter shuts down: a
thread of gloo asks for the interpreter lock too late. So the program's end is made of the same
parts as Python's own (threads, exit handlers, flushing), then the process group is left, then the
process ends without shutting the interpreter down. The parent gets the result before that.
"""

import atexit
import faulthandler
import gc
import importlib.machinery
import importlib.util
import io
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types

# Names the socket to the process that started this one, as "DESCRIPTOR:INODE". A process that
# inherits the variable but not the socket has another file under that number, or none.
CHANNEL_VARIABLE = "PACELINE_WORKER_CHANNEL"
# The name under which this module can be found in a process that it runs.
RUNNING_MARK = "_paceline_program"
FLUSH_FAILED = 120
INTERRUPTED = 130
PROGRAM_FILE = __file__
# The kind of a frame, the number of the call that it belongs to, and the length of its body.
HEADER = struct.Struct("!BQQ")
OUTCOME_KIND = 18
EVENT_KIND = 19

_LEAVE_TIMEOUT_S = 10.0
_ERROR_CHARACTERS = 1000
_FEWEST_FOLDED = 3
_TEMPLATE_MODULE = "paceline._training.workers.processes.template_process"
# The module path of the interpreter, which forks start from.
_first_module_path = sys.path[:]


# The channel to the process that started this one, if there is one.
parent: "ParentChannel | None" = None


class ProgramOutcome:
    """End of the program; `time` is in seconds since the epoch."""

    def __init__(self, code: int, error: "str | None" = None, is_consequence: bool = False) -> None:
        self.code = code
        self.error = error
        self.is_consequence = is_consequence
        self.time = time.time()


def main(kind: str, target: str, arguments: "list[str]") -> None:
    """Run the program, report its end, and leave the process."""
    global parent
    sys.modules.setdefault(RUNNING_MARK, sys.modules["__main__"])
    if kind == "template":
        kind, target, *arguments = _serve_forks(target)
    if kind == "plain":
        _run_plainly([target, *arguments])
    parent = take_channel()
    if not faulthandler.is_enabled():
        # A segmentation fault shows the stacks of all threads.
        faulthandler.enable()
    _show_lines_at_once()
    outcome = _run_program(kind, target, arguments)
    assert isinstance(outcome, ProgramOutcome)
    # Order of the interpreter: first wait for threads, then run the exit handlers.
    _attempt(threading._shutdown)  # type: ignore[attr-defined] # also stops idle executors
    _attempt(atexit._run_exitfuncs)
    if not flush() and outcome.code == 0:
        outcome = ProgramOutcome(FLUSH_FAILED, "the standard output cannot be written")
    if parent is not None:
        import json

        parent.send(OUTCOME_KIND, json.dumps(vars(outcome)).encode())
    if outcome.code == 0:
        leave_process_group()
    os._exit(outcome.code)


def _run_plainly(program: "list[str]") -> None:
    """Run a program as Python itself does, without the parts for workers."""
    own = sys.modules.pop(RUNNING_MARK)
    if "PYTHONFAULTHANDLER" not in os.environ:
        faulthandler.disable()
    outcome = _run_program(program[0], program[1], program[2:])
    while isinstance(outcome, list):
        # The program was a runner or launcher, and this process is now that of its entrypoint, or
        # of one of its workers.
        if outcome[0] != "plain":
            sys.modules[RUNNING_MARK] = own
            main(outcome[0], outcome[1], outcome[2:])
        outcome = _run_program(outcome[1], outcome[2], outcome[3:])
    server = sys.modules.get(_TEMPLATE_MODULE)
    if "torch" in sys.modules and server is not None:
        server.has_seen_torch[0] = 1
    _attempt(threading._shutdown)  # type: ignore[attr-defined] # as in `main`
    _attempt(atexit._run_exitfuncs)
    if _has_output():
        # Objects of the template may keep open files beyond the end of the interpreter.
        gc.unfreeze()
        for item in gc.get_objects():
            if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter)) and not item.closed:
                _attempt(item.flush)
    if outcome.code == INTERRUPTED and (outcome.error or "").startswith("KeyboardInterrupt"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if server is not None:
        server.keep_libraries()
    raise SystemExit(outcome.code)


def _has_output() -> bool:
    """Return whether anything but the standard streams is open for writing."""
    import fcntl

    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE:
                return True
        except OSError:
            # The directory's own descriptor, which is closed by now.
            continue
    return False


class ParentChannel:
    """Socket to the parent of this process; `send` may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._is_told = False
        self._lock = threading.Lock()
        os.set_inheritable(descriptor, False)
        # Forked children are no workers, and must not report.
        os.register_at_fork(after_in_child=self._close)

    def send(self, kind: int, body: bytes = b"") -> None:
        """Write a frame; does nothing once the parent has gone."""
        data = HEADER.pack(kind, 0, len(body)) + body
        with self._lock:
            try:
                while data and self._descriptor is not None:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                # The parent has gone: the program trains on without its reports.
                self._descriptor = None

    def await_stop(self, timeout_s: float) -> bytes:
        """Wait so long, or until the parent ends this program; return why, once, else nothing."""
        if self._is_told or self._descriptor is None:
            time.sleep(timeout_s)
            return b""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return b""
        # Programs are sent this one frame, and an end of file is readable for ever.
        self._is_told = True
        try:
            return os.read(self._descriptor, 4096)[HEADER.size :]
        except OSError:
            return b""

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        self._lock = threading.Lock()
        if descriptor is not None:
            os.close(descriptor)


def take_channel() -> "ParentChannel | None":
    """Return the channel named in the environment, and remove the variable; None if absent."""
    number, _, inode = os.environ.pop(CHANNEL_VARIABLE, "").partition(":")
    try:
        if number and str(os.fstat(int(number)).st_ino) == inode:
            return ParentChannel(int(number))
    except (OSError, ValueError):
        # A process between the parent and this one has closed it.
        pass
    return None


def _show_lines_at_once() -> None:
    # Through a pipe Python would collect kilobytes first, and lose them when the worker is killed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.write_through:
            stream.reconfigure(line_buffering=True)


def _run_program(kind: str, target: str, arguments: "list[str]") -> "ProgramOutcome | list[str]":
    """Run a program to its end; in a fork that it makes as a template return the next program."""
    try:
        program = types.ModuleType("__main__")
        program.__dict__["__builtins__"] = __builtins__
        if sys.version_info < (3, 14):
            program.__dict__["__annotations__"] = {}
        # Replacement for the rest of the process: exit handlers and pickling need the program too.
        sys.modules["__main__"] = program
        if kind == "serve":
            _serve_driver(program, target)
        else:
            sys.path[:] = _first_module_path
            importlib.invalidate_caches()
            code = _LOADERS[kind](program, target, arguments)
            exec(code, program.__dict__)  # noqa: S102 - this is the user's program
    except SystemExit as request:
        return _exit_outcome(request.code)
    except BaseException as error:
        forked: list[str] | None = getattr(error, "forked_program", None)
        return _error_outcome(error) if forked is None else forked
    return ProgramOutcome(0)


def _serve_driver(program: types.ModuleType, target: str) -> None:
    """Carry out calls of a driver, where modules are found as in the driver."""
    import json

    facts = json.loads(target)
    # On another node than the driver's, modules are found as that node finds them.
    sys.path[:] = facts.pop("path", None) or [
        path for path in sys.path if os.path.realpath(path) != _own_directory()
    ]
    serve = importlib.import_module("paceline._training.workers.serve_calls")
    serve.serve(program, **facts)


def _serve_forks(target: str) -> "list[str]":
    """Serve forks until the owner has gone; return in forks only, with the program of each."""
    import json

    facts = json.loads(target)
    # Nothing beside this file may be imported in place of a library.
    sys.path[:] = facts.pop("path") or [
        path for path in sys.path if os.path.realpath(path) != _own_directory()
    ]
    server = importlib.import_module(_TEMPLATE_MODULE)
    program: list[str] = server.serve_forks(server.TemplateFacts(**facts))
    return program


def _own_directory() -> str:
    return os.path.dirname(os.path.realpath(__file__))


def _load_script(program: types.ModuleType, target: str, arguments: "list[str]") -> types.CodeType:
    sys.argv = [target, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(target)))
    path = os.path.abspath(target)
    program.__file__ = path
    program.__cached__ = None  # type: ignore[attr-defined] # as for `python SCRIPT`
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
    program.__cached__ = spec.cached  # type: ignore[attr-defined] # the same
    sys.argv[0] = spec.origin or target
    assert isinstance(code, types.CodeType)
    return code


def _load_code(program: types.ModuleType, target: str, arguments: "list[str]") -> types.CodeType:
    sys.argv = ["-c", *arguments]
    _set_first_path("")
    return compile(target, "<string>", "exec", dont_inherit=True)


_LOADERS = {"script": _load_script, "module": _load_module, "code": _load_code}


def _set_first_path(path: str) -> None:
    """Replace this file's directory at the start of the module path by the program's."""
    # The interpreter's flags -I and -P keep it out, then the program's stays out too.
    if sys.path and os.path.realpath(sys.path[0]) == _own_directory():
        sys.path[0] = path


def exit_code_of(request: object) -> int:
    """Return Python's exit code for an argument of `sys.exit`."""
    if request is None:
        return 0
    return request & 0xFF if isinstance(request, int) else 1


def describe_exit(request: object) -> str:
    """Return the text of a call, for example "sys.exit(3)", for an argument of `sys.exit`."""
    try:
        text = "" if request is None else repr(request)[:_ERROR_CHARACTERS]
    except Exception:
        # Object may be the user's, with a failing `repr`.
        text = f"<{type(request).__name__}>"
    return f"sys.exit({text})"


def _exit_outcome(code: object) -> ProgramOutcome:
    if code is None or isinstance(code, int):
        return ProgramOutcome(exit_code_of(code))
    try:
        text = str(code)
    except Exception:
        # Python prints nothing in this case either.
        return ProgramOutcome(1)
    _attempt(lambda: print(text, file=sys.stderr))
    return ProgramOutcome(1, text.partition("\n")[0][:_ERROR_CHARACTERS])


def _error_outcome(error: BaseException) -> ProgramOutcome:
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    outcome = ProgramOutcome(
        INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1,
        # Last line of a syntax error says the reason; lines before show the place.
        lines[-1 if isinstance(error, SyntaxError) else 0][:_ERROR_CHARACTERS],
        is_consequence=is_consequence(error),
    )
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    if _is_python_s(sys.excepthook):
        # Of no use to the user: the launcher names the rank that failed first, and why.
        line = _survivor_line(outcome.error, frames) if outcome.is_consequence else None
        _attempt(lambda: print(line or _folded(error), end="\n" if line else "", file=sys.stderr))
        return outcome
    try:
        # Experiment trackers and debuggers put their own hook here.
        sys.excepthook(type(error), error, frames)
    except BaseException:
        _attempt(lambda: sys.__excepthook__(type(error), error, frames))
    return outcome


def _folded(error: BaseException) -> str:
    """Return the traceback of an error, without the frames of Paceline that call the user's code.

    Those after the user's last frame stay.
    """
    ours: list[str] = []
    lines: list[str] = []
    for line in traceback.TracebackException.from_exception(error).format():
        if line.startswith(f'  File "{_package()}{os.sep}'):
            ours.append(line)
            continue
        is_long = len(ours) >= _FEWEST_FOLDED and line.startswith("  File ")
        lines += [f"  ... {len(ours)} frames of Paceline ...\n"] if is_long else ours
        lines.append(line)
        ours.clear()
    return "".join([*lines, *ours])


def _package() -> str:
    return os.path.realpath(os.path.join(_own_directory(), "..", "..", ".."))


def _is_python_s(hook: object) -> bool:
    """Return whether a hook prints a traceback and no more, also by torch with the rank."""
    # `init_process_group` puts a function before the hook that was there.
    of_torch = "torch.distributed.distributed_c10d"
    while isinstance(hook, types.FunctionType) and hook.__module__ == of_torch:
        cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        hook = {name: cell.cell_contents for name, cell in cells}.get("old_hook")
    return hook is sys.__excepthook__


def _survivor_line(error: "str | None", frames: "types.TracebackType | None") -> str:
    """Return what became of a rank that lost another: its error, and where in the user's code."""
    packages = [f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist")]
    pythons = os.path.dirname(traceback.__file__) + os.sep
    libraries = (_package() + os.sep, *packages, pythons, "<frozen ")
    all_frames = traceback.extract_tb(frames)
    own = [
        frame for frame in all_frames if not any(part in frame.filename for part in libraries)
    ] or all_frames
    where = f" at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
    return f"This rank lost another one{where}; the launcher says which failed first. ({error})"


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports the loss of another rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    # The text itself is made by the class, which may be the user's.
    texts = [text for text in error.args if isinstance(text, str)]
    if isinstance(error, RuntimeError) and any("gloo/transport" in text for text in texts):
        return True
    return getattr(error, "is_consequence", False) is True


def _attempt(action: "object") -> None:
    """Run a step of the exit; a failure is shown, and stops nothing."""
    try:
        action()  # type: ignore[operator] # a callable without arguments
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()


def flush() -> bool:
    """Flush the standard streams; return whether all of them could be flushed."""
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            is_flushed = False
    return is_flushed


def leave_process_group() -> None:
    """Leave the process group of torch.distributed in bounded time, if initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    # Leaving can wait for ranks that are gone; all that counts has been said by now.
    timer = threading.Timer(_LEAVE_TIMEOUT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    with open(os.devnull, "w") as nowhere:
        # No thread of Python runs if what waits holds the interpreter's lock.
        faulthandler.dump_traceback_later(2 * _LEAVE_TIMEOUT_S, exit=True, file=nowhere)
        _attempt(distributed.destroy_process_group)
        faulthandler.cancel_dump_traceback_later()
    timer.cancel()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
