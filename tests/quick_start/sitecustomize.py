"""Let the processes of tests load their modules in less time, above all torch.

Python looks for garbage each 700 objects, and again when it ends; a fifth of the time of a process
that only loads modules goes there. Here it looks each 20,000 objects, and not at the end.

Each process that makes an optimizer loads `torch._dynamo`, which takes as long as torch, only
to tell a compiler that nobody has started what to leave alone: here it is loaded only if something
compiles. A fifth of the time of torch itself goes to `torch._meta_registrations`, which tells what
some operations on the device "meta" return: here it is loaded only by compilers, tensor parallelism
and `torch._decomp`, and without it those operations raise `NotImplementedError`. `torch.export`,
which no training needs, is loaded only if something of it is used. While torch is loaded, and when
the process ends, Python looks for garbage among the 170,000 objects of torch, which takes a quarter
of the time of a short process: here it does not. Last of all, the libraries of torch take back one
by one what they have registered: here the process ends before, as soon as Python has ended.

Each process of Ray loads `jsonschema`, and with it `rfc3987_syntax`, which takes half a second to
make a parser for addresses that nobody checks: here it is made only if somebody does.

The suite starts hundreds of such processes. `make test` has this directory in PYTHONPATH;
`make test-all` does without.
"""

# All processes load this: nothing here may cost time.
import atexit
import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType

_DYNAMO = "torch._dynamo"
_META = "torch._meta_registrations"
_ADDRESSES = "rfc3987_syntax"
_LAZY = (_DYNAMO, _META, "torch.export", _ADDRESSES)
# Who asks for one of them wants what the registrations have put there.
_FILLED_BY_META = ("torch._decomp", "torch._prims", "torch._refs")


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


class _Addresses(_StandIn):
    """What `rfc3987_syntax` is until an address is checked."""

    @staticmethod
    def is_valid_syntax(*arguments: object, **options: object) -> object:
        """Have the real function check an address."""
        return _real(_ADDRESSES).is_valid_syntax(*arguments, **options)


class _Finder:
    """Finds the stand-ins, and what the loading of real modules has loaded before it was found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how to import a module, or None if that is for others to say."""
        if name == "torch":
            return _loaded_in_less_time(name, path)
        if name in _FILLED_BY_META and _is_stand_in(_META):
            _real(_META)
            module = sys.modules[name]
            # Of a module that has come while it looked for it, the import system takes this one.
            module.__spec__ = ModuleSpec(name, _Finder, loader_state=module.__spec__)  # type: ignore[arg-type]
            return module.__spec__
        is_loaded = name.startswith(f"{_DYNAMO}.") and name in sys.modules
        is_wanted = is_loaded or (name in _LAZY and name not in _loading)
        if name == _ADDRESSES and PathFinder.find_spec(name, path) is None:  # type: ignore[arg-type] # as it was given
            return None
        return ModuleSpec(name, _Finder) if is_wanted else None  # type: ignore[arg-type] # as one

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = sys.modules.get(spec.name)
        if module is None:
            module = _STAND_INS.get(spec.name, _StandIn)(spec.name)
            # Else the import system asks for the real one's. It is taken away below.
            module.__path__ = []
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Have the real module loaded by who asks for a part of it."""
        if isinstance(module, _Addresses):
            # Who asks for a function of a package looks for this too.
            module.__path__ = []
        elif isinstance(module, _StandIn):
            del module.__path__
        elif module.__name__ in _FILLED_BY_META:
            module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr] # from above


def _loaded_in_less_time(name: str, path: object) -> ModuleSpec | None:
    spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type] # as it was given
    if spec is None or spec.loader is None:
        return spec
    load, is_looking = spec.loader.exec_module, gc.isenabled()

    def exec_module(module: ModuleType) -> None:
        gc.disable()
        try:
            load(module)
            # Also in a process that does not look for garbage, as the one that workers fork from.
            _adapt()
        finally:
            if is_looking:
                gc.enable()
                # None of it is ever garbage.
                gc.freeze()

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _adapt() -> None:
    import ctypes

    import torch._opaque_base

    if _is_stand_in(_META):
        # All that is wanted of it without tensors that have no data.
        torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        # It is called with the exit status, before what was registered earlier.
        library.on_exit(library._exit, None)


_STAND_INS = {_DYNAMO: _Dynamo, _ADDRESSES: _Addresses}
_disabled: list[FunctionType] = []
# Which of the real modules are loaded, or about to be.
_loading: set[str] = set()


def _is_stand_in(name: str) -> bool:
    return isinstance(sys.modules.get(name), _StandIn)


def _real(name: str) -> ModuleType:
    import importlib

    if name in _loading:
        return importlib.import_module(name)
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


gc.set_threshold(20_000, 50, 100)
# The first to be registered is the last to be called.
atexit.register(gc.freeze)
sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type] # it needs no more
