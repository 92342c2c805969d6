"""Let the processes of tests load torch in less time.

Each process that makes an optimizer loads `torch._dynamo`, which takes as long as torch, only
to tell a compiler that nobody has started what to leave alone: here it is loaded only if something
compiles. While torch is loaded, and when the process ends, Python looks for garbage among the
170,000 objects of torch, which takes a quarter of the time of a short process: here it does not.

The suite starts hundreds of such processes. `make test` has this directory in PYTHONPATH;
`make test-all` does without.
"""

# All processes load this: nothing here may cost time.
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType

_NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """What `torch._dynamo` is until more of it is wanted than the next three things."""

    class trace_rules:
        """What every new process group clears."""

        @staticmethod
        def clear_lru_cache() -> None:
            """Do nothing, as nothing is kept."""

    @staticmethod
    def graph_break(*_args: object, **_options: object) -> None:
        """Do nothing, as nothing is compiled."""

    @staticmethod
    def disable(fn: object = None, *args: object, **options: object) -> object:
        """Return a function as it is if torch asks, which keeps the answer with the function."""
        if isinstance(fn, FunctionType) and (args, options) == ((True,), {"wrapping": False}):
            _disabled.append(fn)
            return fn
        return _real().disable(fn, *args, **options)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":
            # `inspect` asks all modules for `__file__`, also while others load.
            raise AttributeError(name)
        return getattr(_real(), name)


class _Finder:
    """Finds the stand-in, and those parts of the real package that its own loading has loaded."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how to import a module, or None if that is for others to say."""
        if name == "torch":
            return _loaded_without_garbage(name, path)
        is_loaded = name.startswith(f"{_NAME}.") and name in sys.modules
        is_wanted = is_loaded or (name == _NAME and not _is_loading)
        return ModuleSpec(name, _Finder) if is_wanted else None  # type: ignore[arg-type] # as one

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = sys.modules.get(spec.name)
        if module is None:
            module = _StandIn(_NAME)
            # Else the import system asks for the real one's. It is taken away below.
            module.__path__ = []
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Have the real package loaded by who asks for a part of it."""
        if isinstance(module, _StandIn):
            del module.__path__


def _loaded_without_garbage(name: str, path: object) -> ModuleSpec | None:
    spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type] # as it was given
    if spec is None or spec.loader is None or not gc.isenabled():
        return spec
    load = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        gc.disable()
        try:
            load(module)
        finally:
            gc.enable()
            # None of it is ever garbage.
            gc.freeze()

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


_disabled: list[FunctionType] = []
_is_loading = False


def _real() -> ModuleType:
    global _is_loading
    present = sys.modules.get(_NAME)
    if present is not None and not isinstance(present, _StandIn):
        return present
    import importlib

    _is_loading = True
    sys.modules.pop(_NAME, None)
    module = importlib.import_module(_NAME)
    for fn in _disabled:
        # Its next call asks the real one.
        del fn.__dynamo_disable  # type: ignore[attr-defined] # torch has set it
    _disabled.clear()
    return module


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type] # it needs no more
