"""Pages of the public names: signature, docstring and members of each, read from the source."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
from site_pages import DOCS, ROOT, SiteError

INDEX = DOCS / "reference.md"
_SECTION = re.compile(r"^## (paceline[\w.]*)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+)` \| (.*?) *\|$", re.MULTILINE)
_LINE_LENGTH = 88
# Modules with `__all__` that are no packages of names: the command is described by itself.
_NO_NAMES = {"paceline.cli", "paceline.launch"}
_TITLES = {
    "parameters": "Arguments",
    "other parameters": "Other arguments",
    "attributes": "Attributes",
    "returns": "Returns",
    "yields": "Yields",
    "raises": "Raises",
    "warns": "Warns",
}


class NamePages:
    """Pages of the packages that the index `docs/reference.md` names.

    Args:
        source: The directory that has the package `paceline`.
        index: The index.

    Attributes:
        faults: Names without docstring, and names that only one of code and index has.
    """

    def __init__(self, source: Path = ROOT / "src", index: Path = INDEX) -> None:
        self._root = griffe.load(
            "paceline",
            search_paths=[source],
            resolve_aliases=True,
            docstring_parser="google",
            extensions=griffe.load_extensions("dataclasses"),
        )
        self._sections = dict(_SECTION.findall(index.read_text(encoding="utf-8")))
        self.faults: list[str] = []
        self._places: dict[str, str] = {}
        offered = {module.path: set(map(str, module.exports)) for module in self._modules()}
        for package in sorted(offered.keys() | self._sections.keys()):
            listed = {name for name, _ in _ROW.findall(self._sections.get(package, ""))}
            for name in sorted(offered.get(package, set()) ^ listed):
                where = "`__all__`" if name in listed else index.name
                self.faults.append(f"{package}.{name}: the name is missing in {where}.")
            for name in listed & offered.get(package, set()):
                path = _source_path(self._at(f"{package}.{name}"), f"{package}.{name}")
                place = f"{package}.md#{_anchor(f'{package}.{name}')}"
                # A name that two packages offer has its entry where it is defined.
                if path.startswith(f"{package}.") and package != "paceline":
                    self._places[path] = place
                self._places.setdefault(path, place)

    def texts(self) -> dict[str, str]:
        """Return the text of each page by its place; raise `SiteError` if something is missing."""
        pages = {
            f"reference/{package}.md": self._page(package, section)
            for package, section in self._sections.items()
        }
        if self.faults:
            raise SiteError("\n".join(self.faults))
        return pages

    def linked_index(self, text: str) -> str:
        """Return the index with each name as a link to its entry."""
        package = ""
        lines = []
        for line in text.splitlines():
            package = line[3:] if line.startswith("## paceline") else package
            if package:
                line = re.sub(r"^\| `(\w+)` ", _linked_row(package), line)
            lines.append(line)
        return "\n".join(lines) + "\n"

    def _modules(self) -> list[Any]:
        """Return the public modules that offer names."""
        found, waiting = [], [self._root]
        while waiting:
            module = waiting.pop()
            waiting += [
                one
                for name, one in module.members.items()
                if not one.is_alias and one.is_module and not name.startswith("_")
            ]
            # What a public package offers as a whole is described there.
            is_a_name = (
                module.parent is not None
                and module.name in (module.parent.exports or ())
                and module.path not in self._sections
            )
            if module.exports and module.path not in _NO_NAMES and not is_a_name:
                found.append(module)
        return found

    def _page(self, package: str, section: str) -> str:
        # The index links from `docs/`, this page from a folder below.
        intro = re.sub(r"\]\((?=[\w-]+\.md)", "](../", section.partition("\n|")[0].strip())
        parts = [f"# {package}", intro]
        for name, text in _ROW.findall(section):
            path = f"{package}.{name}"
            parts += [_heading(2, path, name), *self._entry(path, self._at(path), text)]
        return "\n\n".join(parts) + "\n"

    def _at(self, path: str) -> Any:
        """Return what stands at a path, None for a name that exists only when it is asked for."""
        try:
            return self._root[path.removeprefix("paceline.")]
        except KeyError:
            return None

    def _entry(self, path: str, member: Any, text: str) -> list[str]:
        if member is None:
            return [text + "."]
        source = _source_path(member, path)
        known = self._places.get(source, "")
        package = known.partition(".md#")[0]
        if source.startswith(f"{package}.") and known.partition("#")[2] != _anchor(path):
            return [text + ".", f"See [`{known.partition('#')[2]}`]({known})."]
        try:
            target = member.final_target if member.is_alias else member
        except griffe.AliasResolutionError as error:
            return [text + ".", f"From another library: `{error.alias.target_path}`."]
        if target.is_attribute:
            value = [] if target.value is None else [_code(f"{target.name} = {target.value}")]
            return [*value, *(self._docstring(target) or [text + "."])]
        if target.docstring is None:
            self.faults.append(f"{path}: the name has no docstring ({_place_of(target)}).")
            return []
        if target.is_module:
            parts = self._docstring(target)
            if path in self._sections:
                return [*parts, f"See [`{path}`]({path}.md)."]
            for name, one in target.members.items():
                if not (name.startswith("_") or one.is_alias or one.is_attribute):
                    parts += [_heading(3, f"{path}.{name}", name)]
                    parts += self._entry(f"{path}.{name}", one, "")
            return parts
        if target.is_class:
            return self._class(path, target)
        return [_code(_signature(target, target.name)), *self._docstring(target)]

    def _class(self, path: str, target: Any) -> list[str]:
        constructor = target.all_members.get("__init__")
        is_enum = any("Enum" in str(base) for base in target.bases)
        parts = []
        if constructor is not None and not is_enum and not _is_exception(target):
            parts.append(
                _code(_signature(constructor, target.name, skips_self=True, returns=False))
            )
        bases = ", ".join(self._linked(base) for base in target.bases)
        parts += [f"Bases: {bases}"] if bases else []
        parts += self._docstring(target)
        if is_enum:
            values = [
                f"- `{name}` = `{one.value}`"
                for name, one in target.members.items()
                if one.is_attribute and one.value is not None and not name.startswith("_")
            ]
            parts += ["\n".join(values)] if values else []
        seen_at: dict[str, list[str]] = {}
        for name, one in {**target.inherited_members, **target.members}.items():
            if name.startswith("_") or (one.is_attribute and "property" not in one.labels):
                continue
            home = one.final_target.parent if one.is_alias else target
            if home is not target and home.path in self._places:
                seen_at.setdefault(home.path, []).append(name)
            else:
                parts += self._member(path, name, one.final_target if one.is_alias else one)
        for home, names in seen_at.items():
            listed = ", ".join(f"`{name}`" for name in names)
            short = home.rpartition(".")[2]
            parts.append(f"From [`{short}`]({self._places[home]}): {listed}.")
        return parts

    def _member(self, path: str, name: str, one: Any) -> list[str]:
        if not (one.is_function or one.is_attribute):
            return []
        docstring = self._docstring(one) or self._inherited_docstring(one)
        if not docstring:
            self.faults.append(f"{path}.{name}: the member has no docstring ({_place_of(one)}).")
        if one.is_attribute:
            kind = _code(f"{name}: {one.annotation}" if one.annotation else name)
        else:
            is_free = "staticmethod" in one.labels
            kind = _code(_signature(one, name, skips_self=not is_free))
        return [_heading(3, f"{path}.{name}", name), kind, *docstring]

    def _inherited_docstring(self, one: Any) -> list[str]:
        """Return the docstring of the method that an override without one carries out."""
        for base in one.parent.mro() if one.parent.is_class else ():
            above = base.members.get(one.name)
            if above is not None and above.docstring is not None:
                return self._docstring(above)
        return []

    def _linked(self, base: Any) -> str:
        path = getattr(base, "canonical_path", str(base))
        known = self._places.get(path)
        return f"[`{base}`]({known})" if known else f"`{base}`"

    def _docstring(self, target: Any) -> list[str]:
        parts = []
        for section in target.docstring.parsed if target.docstring else ():
            kind = section.kind.value
            if kind == "text":
                parts.append(section.value)
            elif kind in _TITLES:
                parts += [
                    f"**{section.title or _TITLES[kind]}**",
                    "\n".join(map(_item, section.value)),
                ]
            elif kind == "admonition":
                parts += [f"**{section.title}**", section.value.description]
            elif kind == "examples":
                parts += [
                    text if one.value == "text" else _code(text) for one, text in section.value
                ]
            else:
                place = _place_of(target)
                self.faults.append(f"{target.path}: no page shows a section {kind!r} ({place}).")
        return parts


def _linked_row(package: str) -> Callable[[re.Match[str]], str]:
    def row(found: re.Match[str]) -> str:
        return f"| [`{found[1]}`](reference/{package}.md#{_anchor(f'{package}.{found[1]}')}) "

    return row


def _source_path(member: Any, path: str) -> str:
    """Return where a name is defined, its own path if that is known only at run time."""
    try:
        found: str = getattr(member, "final_target", member).path
    except (AttributeError, griffe.AliasResolutionError):
        return str(getattr(member, "target_path", path))
    return found


def _anchor(path: str) -> str:
    # Markdown would take a pair of underscores for emphasis.
    return path.replace("__", "")


def _item(one: Any) -> str:
    name = getattr(one, "name", "") or (str(one.annotation) if one.annotation else "")
    text = one.description.replace("\n", "\n    ")
    return f"- `{name}`: {text}" if name else f"- {text}"


def _heading(level: int, anchor: str, name: str) -> str:
    return f"{'#' * level} `{name}` {{ #{_anchor(anchor)} }}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _signature(function: Any, name: str, *, skips_self: bool = False, returns: bool = True) -> str:
    parameters, shown = list(function.parameters), []
    kinds = griffe.ParameterKind
    is_open = True
    for position, one in enumerate(parameters[1 if skips_self else 0 :]):
        if one.kind is kinds.keyword_only and is_open:
            shown.append("*")
            is_open = False
        is_open = is_open and one.kind is not kinds.var_positional
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(one.kind, "")
        text = f"{stars}{one.name}" + (f": {one.annotation}" if one.annotation else "")
        if one.default is not None and not stars:
            text += f" = {one.default}" if one.annotation else f"={one.default}"
        shown.append(text)
        after = parameters[position + (2 if skips_self else 1) :][:1]
        if one.kind is kinds.positional_only and (not after or after[0].kind is not one.kind):
            shown.append("/")
    end = f" -> {function.returns}" if returns and function.returns else ""
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) <= _LINE_LENGTH:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){end}"


def _is_exception(target: Any) -> bool:
    names = [str(base) for base in target.bases] + [base.name for base in target.mro()]
    return any(name.endswith(("Error", "Exception")) for name in names)


def _place_of(target: Any) -> str:
    return f"{Path(target.filepath).name}:{target.lineno or 1}"
