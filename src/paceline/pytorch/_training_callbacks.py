"""Callbacks of a training: their calls and their states."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any


class TrainingCallbacks:
    """Dispatcher of training events to the callbacks, in order.

    Args:
        callbacks: The callbacks by name; empty without any.
        base: The class whose methods are the hooks.

    Raises:
        TypeError: A hook cannot be called with the arguments that it gets; the message names it.
    """

    def __init__(self, callbacks: Mapping[str, Any], base: type) -> None:
        self._callbacks = callbacks
        self._base: Any = base
        for name, callback in callbacks.items():
            _check_hooks(name, callback, base)
        self._started: list[Any] = []

    @property
    def has_started(self) -> bool:
        """Whether `start` was called since the last `stop`; False without callbacks."""
        return bool(self._started)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each callback."""
        for callback in self._callbacks.values():
            getattr(callback, hook)(*arguments)

    def overrides(self, hook: str) -> bool:
        """Tell whether some callback overrides a hook."""
        default = getattr(self._base, hook)
        return any(getattr(type(each), hook) is not default for each in self._callbacks.values())

    def start(self, num_batches: int, checkpoint: str | None) -> None:
        """Call the startup hooks; a callback with a failing hook is also shut down.

        Args:
            num_batches: How many batches are trained already.
            checkpoint: The checkpoint to resume from.
        """
        for callback in self._callbacks.values():
            # Recorded before its hook: a callback that fails in startup is shut down as well.
            self._started.append(callback)
            callback.on_trial_startup(num_batches, checkpoint)

    def stop(self) -> ExitStack:
        """Return an exit stack to run the shutdown hooks of all started callbacks."""
        stack = ExitStack()
        for callback in self._started:
            stack.callback(callback.on_trial_shutdown)
        self._started = []
        return stack

    def state(self) -> dict[str, Any]:
        """Return the states of all callbacks."""
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state(self, states: Mapping[str, dict[str, Any]], warn: Callable[[str], None]) -> None:
        """Restore the callbacks' states; report unknown or missing states to `warn`."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif type(callback).load_state_dict is not self._base.load_state_dict:
                warn(f"The checkpoint has no state of the callback {name!r}: it begins anew.")
        for name in states.keys() - self._callbacks.keys():
            if states[name]:
                warn(f"The checkpoint has a state of {name!r}, which is no callback now.")


def _check_hooks(name: str, callback: Any, base: type) -> None:
    for hook, default in vars(base).items():
        own = getattr(type(callback), hook, None)
        if hook.startswith("_") or not inspect.isfunction(default) or not inspect.isfunction(own):
            continue
        wanted = [each for each in inspect.signature(default).parameters if each != "self"]
        # Bound, not compared: other names, defaults and `*args` fit as well.
        try:
            inspect.signature(getattr(callback, hook)).bind(*wanted)
        except TypeError as error:
            raise TypeError(
                f"`{hook}` of the callback {name!r} must take ({', '.join(wanted)}), but {error}."
                f" Hint: def {hook}({', '.join(['self', *wanted])})."
            ) from error
