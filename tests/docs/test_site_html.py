"""The HTML of the site: what its check finds, and a build of the whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import site_check

ROOT = Path(__file__).resolve().parents[2]
PAGE = '<article><h1 id="page">Page</h1>{}</article>'
OK = '<a href="folder/other.html#here"></a><a href="#page"></a><a href="https://docs.ray.io"></a>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a site of two pages without a fault; its pages in Markdown are beside it."""
    for folder in ("html", "pages"):
        (tmp_path / folder / "folder").mkdir(parents=True)
    (tmp_path / "html" / "page.html").write_text(PAGE.format(OK))
    (tmp_path / "html" / "folder" / "other.html").write_text(PAGE.format('<p id="here">'))
    (tmp_path / "html" / "search.json").write_text("{}")
    for name in ("page.md", "folder/other.md"):
        (tmp_path / "pages" / name).write_text("# Page\n")
    return tmp_path


def faults_in(site: Path) -> list[str]:
    return site_check.faults_in(site / "html", site / "pages")


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ("", None),
        ('<a href="gone.html">', "page.html: the link 'gone.html' leads nowhere."),
        ('<a href="folder/">', "page.html: the link 'folder/' leads nowhere."),
        ('<img src="gone.webp">', "page.html: the link 'gone.webp' leads nowhere."),
        ('<a href="#gone">', "page.html: the link '#gone' leads nowhere."),
        (
            '<a href="folder/other.html#gone">',
            "page.html: the link 'folder/other.html#gone' leads nowhere.",
        ),
        (
            '<link rel="stylesheet" href="https://fonts.example/x">',
            "page.html: the page loads a file of others, 'https://fonts.example/x'.",
        ),
        (
            '<script src="//cdn.example/x.js"></script>',
            "page.html: the page loads a file of others, '//cdn.example/x.js'.",
        ),
    ],
)
def test_links_and_loaded_files_are_looked_at(site: Path, added: str, fault: str | None) -> None:
    page = site / "html" / "page.html"
    page.write_text(PAGE.format(OK + added))
    assert faults_in(site) == ([] if fault is None else [fault])


def test_a_page_that_github_shows_otherwise_is_found(site: Path) -> None:
    (site / "pages" / "page.md").write_text("# Page\n\nText:\n- one\n- two\n")
    first, second = faults_in(site)
    assert first.startswith("page.html: GitHub shows 2 elements <li>, and the site 0.")
    assert second.startswith("page.html: GitHub shows 1 elements <ul>, and the site 0.")


def test_a_site_without_search_is_found(site: Path) -> None:
    (site / "html" / "search.json").unlink()
    assert faults_in(site) == ["search.json: there is no index for the search."]


# Building takes long where much else runs; `make check` builds the site as well.
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_build_makes_the_site_and_the_next_one_stops_at_a_dead_anchor(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="NOT TESTED: the site needs Zensical, of Python 3.11")
    ignored = shutil.ignore_patterns("__pycache__", "paceline_runs", "webui", "source.sha256")
    for folder in ("docs", "examples", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for page in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "CITATION.cff"]:
        shutil.copy(page, tmp_path)
    shipped = tmp_path / "src" / "paceline" / "_cluster" / "master" / "docs"
    shutil.rmtree(shipped, ignore_errors=True)

    def build(*options: str) -> tuple[int, str]:
        command = [sys.executable, str(tmp_path / "docs" / "site" / "build.py"), *options]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert build("--check")[0] == 1
    status, said = build()
    assert status == 0, said
    assert "MiB in a wheel." in said
    assert build("--check")[0] == 0
    built = {path.relative_to(shipped) for path in shipped.rglob("*.html")}
    made = tmp_path / "build" / "site"
    assert built == {path.relative_to(made) for path in made.rglob("*.html")}
    assert {"index.html", "train.html", "reference/paceline.core.html"} <= {*map(str, built)}
    assert sum(path.stat().st_size for path in shipped.rglob("*.webp")) > 0
    index = json.loads((shipped / "search.json").read_text())
    places = {item["location"] for item in index["items"]}
    assert "reference/paceline.core.html#paceline.core.init" in places

    guide = tmp_path / "docs" / "train.md"
    guide.write_text(guide.read_text() + "\n[no such part](data.md#no-such-part)\n")
    assert build("--check")[0] == 1
    status, said = build()
    assert status == 1
    assert "anchor does not exist" in said
    assert "train.md" in said
    # The site of before stays.
    assert (shipped / "index.html").is_file()
