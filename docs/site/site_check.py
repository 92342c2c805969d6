"""Checks of the HTML: where links lead, whose addresses it loads, and what is on the pages."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

# A link to a page of others is no fault; to load a file of others is one.
_LOADING = {("link", "href"), ("script", "src"), ("img", "src"), ("source", "srcset")}
# Head of a page that the search of the site does not find.
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_COUNTED = ("li", "ol", "ul", "pre", "table", "tr", "h2", "h3", "blockquote")


class _Page(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src", "srcset") and value is not None:
                is_loaded = (tag, key) in _LOADING
                (self.loaded if is_loaded else self.links).append(value)
            if key in ("id", "name") and value:
                self.anchors.append(value)


def faults_in(html: Path, pages: Path) -> list[str]:
    """Return the faults of a site, one line each.

    Args:
        html: The directory of the site.
        pages: The directory of its pages in Markdown.
    """
    parsed = {
        path: _Page(path.read_text(encoding="utf-8")) for path in sorted(html.rglob("*.html"))
    }
    faults = []
    for path, page in parsed.items():
        name = path.relative_to(html)
        for link in page.loaded:
            if re.match(r"(\w+:)?//", link):
                faults.append(f"{name}: the page loads a file of others, {link!r}.")
        for link in [*page.links, *page.loaded]:
            if not re.match(r"\w+:|//", link) and not _is_there(path, link, parsed):
                faults.append(f"{name}: the link {link!r} leads nowhere.")
        faults += _other_structure(name, pages, path)
    if not (html / "search.json").is_file():
        faults.append("search.json: there is no index for the search.")
    return faults


def _is_there(path: Path, link: str, parsed: dict[Path, _Page]) -> bool:
    place, _, anchor = unquote(link).partition("#")
    target = (path.parent / place).resolve() if place else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return not anchor or target not in parsed or anchor in parsed[target].anchors


def _other_structure(name: Path, pages: Path, path: Path) -> list[str]:
    """Return a fault if a page has other lists, tables or blocks here than on GitHub."""
    source = (pages / name).with_suffix(".md")
    if not source.is_file():
        source = source.with_name("README.md")
    text = source.read_text(encoding="utf-8").removeprefix(UNSEARCHED)
    written = MarkdownIt("gfm-like", {"linkify": False}).render(text)
    shown = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article")[0]
    wanted, found = (
        Counter(re.findall(rf"<({'|'.join(_COUNTED)})\b", text)) for text in (written, shown)
    )
    return [
        f"{name}: GitHub shows {wanted[tag]} elements <{tag}>, and the site {found[tag]}."
        " Hint: indent what belongs to an item of a list by 4 spaces."
        for tag in sorted(wanted.keys() | found.keys())
        if wanted[tag] != found[tag]
    ]
