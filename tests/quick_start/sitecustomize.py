"""Let the processes of tests load parts of torch only if something uses them.

Each process that makes an optimizer loads `torch._dynamo`, which takes as long as torch, only to
tell a compiler that nobody has started what to leave alone. A quarter of what torch itself takes is
`torch._meta_registrations`: the shapes that operations on the device "meta" return. Without a
compiler, some of these operations raise `NotImplementedError` here. The suite starts hundreds of
such processes. `make test` has this directory in PYTHONPATH; `make test-all` does without.
"""

# All processes load this: nothing here may cost time.
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

_DYNAMO = "torch._dynamo"
_META = "torch._meta_registrations"


class _StandIn(ModuleType):
    """What a module is until something of it is wanted."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":
            # `inspect` asks all modules for `__file__`, also while others load.
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Dynamo(_StandIn):
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
        return _real(_DYNAMO).disable(fn, *args, **options)


class _Finder:
    """Finds the stand-ins, and those parts of the real package that its own loading has loaded."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how to import a module, or None if that is for others to say."""
        is_stand_in = name in (_DYNAMO, _META) and name not in _loading
        is_loaded = name.startswith(f"{_DYNAMO}.") and name in sys.modules
        is_wanted = is_stand_in or is_loaded
        return ModuleSpec(name, _Finder) if is_wanted else None  # type: ignore[arg-type] # as one

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = sys.modules.get(spec.name)
        if module is None:
            module = (_Dynamo if spec.name == _DYNAMO else _StandIn)(spec.name)
            # Else the import system asks for the real one's. It is taken away below.
            module.__path__ = []
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Have the real package loaded by who asks for a part of it."""
        if isinstance(module, _StandIn):
            del module.__path__


_disabled: list[FunctionType] = []
# Which of the real modules are loaded, or about to be.
_loading: set[str] = set()


def _real(name: str) -> ModuleType:
    present = sys.modules.get(name)
    if present is not None and not isinstance(present, _StandIn):
        return present
    import importlib

    if name == _DYNAMO:
        # What is traced or made without data needs it, and asks for this one first.
        _real(_META)
    _loading.add(name)
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    if name == _DYNAMO:
        for fn in _disabled:
            # Its next call asks the real one.
            del fn.__dynamo_disable  # type: ignore[attr-defined] # torch has set it
        _disabled.clear()
    return module


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type] # it needs no more
