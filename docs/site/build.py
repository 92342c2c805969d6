"""Build the documentation site into build/site and into the package, strictly.

Usage: python docs/site/build.py [--check]

The pages of `docs/` and the reference made from the code become HTML by Zensical; decision 93 says
why. The build fails on dead links and anchors, on pages that stand in no group of the navigation,
on public names without docstring or place in the index, and on addresses of others in the HTML.
With `--check` nothing is built; the exit status is 0 if the site in the package is up to date.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "src" / "paceline" / "_cluster" / "master" / "docs"
STAMP = BUILT / "source.sha256"
WORK = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
MAX_BYTES = 3 * 2**20
# What the pages are made from; all of it is in an sdist.
_SOURCES = ("docs/**/*", "examples/**/*.md", "examples/**/*.py", "src/paceline/**/*.py", "*.md")

_CONFIG: dict[str, Any] = {
    "site_name": "Paceline",
    "docs_dir": "pages",
    "site_dir": "html",
    "use_directory_urls": False,
    "theme": {
        "variant": "modern",
        "language": "en",
        # Otherwise pages load it from the servers of Google.
        "font": False,
        "features": [
            "content.code.copy", "navigation.indexes", "navigation.prune", "navigation.tabs",
            "navigation.footer", "navigation.top", "search.highlight", "toc.follow",
        ],
        "palette": [
            {
                "media": "(prefers-color-scheme)",
                "toggle": {"icon": "lucide/sun-moon", "name": "Light"},
            },
            {
                "media": "(prefers-color-scheme: light)", "scheme": "default",
                "toggle": {"icon": "lucide/sun", "name": "Dark"},
            },
            {
                "media": "(prefers-color-scheme: dark)", "scheme": "slate",
                "toggle": {"icon": "lucide/moon", "name": "As the system"},
            },
        ],
    },
    "extra": {"generator": False},
    # What GitHub shows too, so that a page looks the same there.
    "markdown_extensions": {
        "attr_list": {},
        "md_in_html": {},
        "sane_lists": {},
        "tables": {},
        "toc": {"permalink": True, "toc_depth": 3},
        "pymdownx.highlight": {"anchor_linenums": False},
        "pymdownx.superfences": {},
        "pymdownx.tilde": {"subscript": False},
    },
}  # fmt: skip


def source_digest() -> str:
    """Return a digest of all sources; unlike times of files, it survives archives and clones."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in ROOT.glob(pattern)}):
        if path.is_file() and "__pycache__" not in path.parts and not path.is_relative_to(BUILT):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def is_up_to_date(digest: str) -> bool:
    """Tell whether the site in the package was built from the sources with this digest."""
    return STAMP.is_file() and STAMP.read_text().strip() == digest


def write_pages() -> None:
    """Write the pages and the config for Zensical; raise `SiteError` if something is missing."""
    from site_check import UNSEARCHED
    from site_names import INDEX, NamePages
    from site_pages import Pages, is_record
    from site_tables import table_pages

    names = NamePages()
    pages = Pages(names.texts() | table_pages())
    pages.texts[INDEX.name] = names.linked_index(pages.texts[INDEX.name])
    shutil.rmtree(WORK, ignore_errors=True)
    for place, text in pages.texts.items():
        target = WORK / "pages" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_record(str(place)):
            # It is for who changes the code: who searches looks for guides.
            text = f"{UNSEARCHED}{text}\n[All decisions](README.md)\n"
        target.write_text(text, encoding="utf-8")
    for place, path in pages.files.items():
        target = WORK / "pages" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    project = _CONFIG | {"nav": pages.navigation()}
    (WORK / "zensical.toml").write_text(f"project = {_toml(project)}\n", encoding="utf-8")


def _toml(value: Any) -> str:
    """Return a value as TOML on one line; its strings are those of JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def make_html() -> None:
    """Have Zensical make the HTML; raise `SiteError` with what it said if it fails."""
    from site_pages import SiteError

    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        # Its own frames say nothing about a page.
        raise SiteError(said.partition("Traceback ")[0].strip() or said)
    html = WORK / "html"
    # It names files by absolute paths, which only the root of a server has.
    (html / "404.html").unlink(missing_ok=True)
    (html / "sitemap.xml").unlink(missing_ok=True)
    shutil.rmtree(html / "assets" / "stylesheets" / "classic", ignore_errors=True)
    for page in html.rglob("*.html"):
        page.write_text(_without_blanks(page.read_text(encoding="utf-8")), encoding="utf-8")


def _without_blanks(html: str) -> str:
    """Return a page without the blank lines and indentations of its template."""
    parts = re.split(r"(<pre.*?</pre>|<script.*?</script>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\s*\n\s*", "\n", part) for part in parts[::2]]
    return "".join(parts)


def shipped_size(site: Path) -> int:
    """Return the size of the files of a site in bytes, each compressed as in a wheel."""
    return sum(len(zlib.compress(path.read_bytes())) for path in site.rglob("*") if path.is_file())


def main() -> int:
    """Build if need be, and return the exit status."""
    digest = source_digest()
    if "--check" in sys.argv[1:]:
        return 0 if is_up_to_date(digest) else 1
    if is_up_to_date(digest) and SITE.is_dir():
        return 0
    if sys.version_info < (3, 11):
        print("NOT BUILT: the documentation, as Zensical needs Python 3.11.", file=sys.stderr)
        return 0
    from site_check import faults_in
    from site_pages import SiteError

    try:
        write_pages()
        make_html()
        if faults := faults_in(WORK / "html", WORK / "pages"):
            raise SiteError("\n".join(faults))
    except SiteError as error:
        print(f"{error}\nThe documentation was not built.", file=sys.stderr)
        return 1
    size = shipped_size(WORK / "html")
    shutil.rmtree(BUILT, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(WORK / "html", SITE)
    num_pages = sum(1 for _ in SITE.rglob("*.html"))
    print(f"{num_pages} pages in {SITE.relative_to(ROOT)}; {size / 2**20:.1f} MiB in a wheel.")
    if size > MAX_BYTES:
        print("They are too large to be shipped: 3 MiB at most.", file=sys.stderr)
        return 1
    shutil.copytree(SITE, BUILT)
    # Last, so that a build that was interrupted is not taken for a whole one.
    STAMP.write_text(f"{digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
