"""Registry of searcher sections: those of this package, and those of packages with entry points."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

from paceline.config._searcher_section import (
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    GridSearcher,
    HyperbandSearcher,
    MedianStoppingSearcher,
    MissingSearcher,
    PbtSearcher,
    RandomSearcher,
    Searcher,
    SingleSearcher,
)

logger = logging.getLogger(__name__)

ENTRY_POINTS = "paceline.search_methods"
"""The group of entry points: each names a method and refers to a `Searcher`."""
_OWN = (
    SingleSearcher,
    RandomSearcher,
    GridSearcher,
    AsyncHalvingSearcher,
    AdaptiveAshaSearcher,
    HyperbandSearcher,
    MedianStoppingSearcher,
    PbtSearcher,
)


class _Registry:
    """The sections of all methods, by name; methods of other packages from the first query on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, type[Searcher]] = {
            str(one.model_fields["name"].default): one for one in _OWN
        }
        self._has_all = False
        self.on_new: list[Callable[[], object]] = []

    @property
    def sections(self) -> Mapping[str, type[Searcher]]:
        return self._sections

    def load(self) -> bool:
        # Several threads may meet an unknown method at once.
        with self._lock:
            if self._has_all:
                return False
            self._has_all = True
            found = {}
            for point in entry_points(group=ENTRY_POINTS):
                if point.name in self._sections or point.name in found:
                    logger.warning(
                        "The search method %r of %s is ignored, as there is one of that name.",
                        point.name,
                        point.value,
                    )
                elif (section := _loaded_method(point)) is not None:
                    found[point.name] = section
            if found:
                self._sections = self._sections | found
                for tell in self.on_new:
                    tell()
            return bool(found)


_registry = _Registry()


def searcher_sections() -> Mapping[str, type[Searcher]]:
    """Return the known search methods' sections by method name."""
    return _registry.sections


def load_search_methods() -> bool:
    """Look once for the search methods of installed packages; tell whether there are new ones."""
    return _registry.load()


def on_new_methods(tell: Callable[[], object]) -> None:
    """Have a function called once methods of other packages are known."""
    _registry.on_new.append(tell)


def searcher_section(name: str) -> type[Searcher]:
    """Return the section of a search method.

    It is `MissingSearcher` for a method that is not installed here any more.
    """
    if name not in _registry.sections:
        load_search_methods()
    return _registry.sections.get(name, MissingSearcher)


def _loaded_method(point: EntryPoint) -> type[Searcher] | None:
    """Return a method's section; None with a warning if unusable."""
    try:
        section = point.load()
        if not (isinstance(section, type) and issubclass(section, Searcher)):
            raise TypeError(f"it must be a subclass of `Searcher`, but is {section!r}")
        name = section.model_fields["name"].default
        if name != point.name:
            raise ValueError(
                f"the default of its field `name` must be {point.name!r}, but is {name!r}"
            )
        if get_args(section.model_fields["name"].annotation) != (name,):
            raise TypeError(f"its field `name` must have the type `Literal[{name!r}]`")
        # Union of the section alone: its other faults show here, not in the config of all sections.
        either: Any = section | SingleSearcher
        TypeAdapter(Annotated[either, Field(discriminator="name")])
    except Exception as error:
        # A package that is broken must not keep others from being used.
        logger.warning(
            "The search method %r (%s) cannot be loaded: %s: %s",
            point.name,
            point.value,
            type(error).__name__,
            error,
        )
        return None
    return section


class _OneOfThem:
    """Makes a field take the section of any known method, chosen by its name."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union: Any = reduce(or_, _registry.sections.values())
        return handler.generate_schema(Annotated[union, Field(discriminator="name")])


AnySearcher = Annotated[Searcher, _OneOfThem()]
