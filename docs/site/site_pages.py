"""Pages of the site: which there are, where they stand in the navigation, and their links."""

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Groups of the navigation, in this order; a page stands at the first pattern that it matches. The
# pages of a pattern are in the order of their names. A page that matches none fails the build.
NAVIGATION: dict[str, dict[str, list[str]]] = {
    "Start": {
        "": [
            *("index.md", "overview.md", "start/index.md", "start/which-front-door.md"),
            "start/*.md",
        ],
    },
    "Guides": {
        "Train": [
            *("pytorch.md", "train.md", "core-api.md", "creators.md", "declarative.md"),
            *("batch-inference.md", "checkpoints.md", "media.md", "profiling.md"),
            "verify-resume.md",
        ],
        "Search": ["tune.md", "search-methods.md", "agents.md"],
        "Data and models": ["data.md", "stores.md", "distributed.md", "sharding.md", "backends.md"],
        "Clusters and other libraries": [
            *(
                "clusters.md",
                "scheduling.md",
                "ray.md",
                "integrations.md",
                "import-and-export.md",
                "sdk.md",
            ),
            *("cli.md", "web-ui.md"),
        ],
        "Operation": [
            *("operations.md", "lab.md", "interactive.md", "messages.md", "security.md"),
            *("SECURITY.md", "plugins.md"),
        ],
        "Examples": ["examples/*"],
    },
    "Coming from": {"": ["coming-from/index.md", "coming-from/*.md"]},
    "Reference": {
        "": ["reference.md", "experiment-config.md"],
        "Packages": ["reference/paceline*.md"],
        "Program and protocol": ["reference/*.md"],
    },
    "Explanation": {
        "": [
            *("architecture.md", "exactness.md", "who-resumes-exactly.md", "durability.md"),
            *("liveness.md", "lost-data.md", "proof.md"),
        ],
        # Each page lists its group, so the records stand in their own list alone.
        "Decisions": ["decisions/README.md"],
    },
    "Troubleshooting": {
        "": ["troubleshooting.md", "faq.md", "upgrading.md", "CHANGELOG.md", "CONTRIBUTING.md"],
    },
}

# Files that a page may link to without being a page: they are copied.
_COPIED = {".webp", ".png", ".svg", ".jpg", ".gif", ".json", ".ipynb"}
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s]+|(?<=(?:src|ref|set)=\")(?!\w+:|#)[^\"\s]+")
_ITEM = re.compile(r"(?:\d\.|[-*]) +(?=\S)")
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".toml": "toml", ".sbatch": "sh"}


class SiteError(Exception):
    """Raised when the site is not as it must be; each line of the message is one fault."""


def is_record(place: str) -> bool:
    """Return whether a page is the record of one decision."""
    return fnmatch(place, "decisions/[0-9]*.md")


class Pages:
    """All pages of the site: those of `docs/`, the README, and the files that they link to.

    Args:
        generated: Texts of further pages, by their places in the site; no link there leads to
            the repository.
        root: The directory of the repository.

    Attributes:
        texts: The text of each page as the site shows it, by its place in the site.
        files: The path of each copied file, by its place.
    """

    def __init__(self, generated: dict[str, str], root: Path = ROOT) -> None:
        self._root, self._docs = root, root / "docs"
        self.texts: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        self._faults: list[str] = []
        self._has_index = (self._docs / "index.md").is_file()
        first = [root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
        waiting = [*first, *sorted(self._docs.rglob("*.md"))]
        while waiting:
            path = waiting.pop()
            place = self.place(path)
            if place not in self.texts and place not in self.files:
                waiting += self._add(path, place)
        self.texts |= generated
        if self._faults:
            raise SiteError("\n".join(self._faults))

    def place(self, path: Path) -> str:
        """Return the place of a file of the repository in the site."""
        if path == self._root / "README.md":
            return "overview.md" if self._has_index else "index.md"
        top = self._docs if path.is_relative_to(self._docs) else self._root
        name = path.relative_to(top).as_posix()
        is_page = path.suffix == ".md" or path.suffix in _COPIED
        return name if is_page else f"{name}.md"

    def _add(self, path: Path, place: str) -> list[Path]:
        """Add a file, and return the files that it links to."""
        if path.suffix in _COPIED:
            self.files[place] = path
            return []
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".md":
            name = path.relative_to(self._root).as_posix()
            language = _LANGUAGES.get(path.suffix, "text")
            self.texts[place] = f"# {name}\n\n````{language}\n{text}````\n"
            return []
        found: list[Path] = []

        def lead(link: re.Match[str]) -> str:
            name, hash_sign, heading = link[0].partition("#")
            target = (path.parent / name).resolve()
            if not target.is_relative_to(self._root) or not target.is_file():
                page = path.relative_to(self._root)
                self._faults.append(f"{page}: there is no file {link[0]!r}.")
                return link[0]
            found.append(target)
            way = relpath(self.place(target), Path(place).parent)
            return f"{Path(way).as_posix()}{hash_sign}{heading}"

        self.texts[place] = _indented(_outside_code(text, lambda prose: _LINK.sub(lead, prose)))
        return found

    def navigation(self) -> list[dict[str, list[object]]]:
        """Return the navigation in the form of Zensical; raise `SiteError` for unlisted pages."""
        left = set(self.texts)

        def take(patterns: list[str]) -> Iterator[str]:
            for pattern in patterns:
                for place in sorted(name for name in left if fnmatch(name, pattern)):
                    left.remove(place)
                    yield place

        groups: list[dict[str, list[object]]] = []
        # The names of packages come before whatever else is generated.
        for title, parts in NAVIGATION.items():
            entries: list[object] = []
            for part, patterns in parts.items():
                places = list(take(patterns))
                entries += places if not part else [{part: places}] if places else []
            groups += [{title: entries}] if entries else []
        left -= {"LICENSE.md", "CITATION.cff.md", *filter(is_record, left)}
        if left:
            raise SiteError(
                "\n".join(f"{place}: the page stands in no group." for place in sorted(left))
                + "\nHint: name it in `NAVIGATION` of docs/site/site_pages.py."
            )
        return groups


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a page's text with what stands outside of its code blocks changed."""
    parts, end = [], 0
    for block in _FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def _indented(text: str) -> str:
    """Return a page with what belongs to an item of a list below 4 spaces, as Zensical needs it."""
    lines, width = [], 0
    for line in text.splitlines(keepends=True):
        if item := _ITEM.match(line):
            width = len(item[0])
        elif line.startswith(" " * width) and width:
            line = f"{' ' * (4 - width)}{line}"
        elif line.strip():
            width = 0
        lines.append(line)
    return "".join(lines)
