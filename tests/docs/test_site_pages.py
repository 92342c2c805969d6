"""Pages that are not as they must be fail the build before any HTML is made."""

import re
from pathlib import Path
from typing import Any

import pytest
import site_pages


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a small repository with pages in some groups, and files that they link to."""
    for name, text in {
        "README.md": "# Paceline\n[guide](docs/train.md) [licence](LICENSE)\n",
        "CHANGELOG.md": "# Changelog\n",
        "CONTRIBUTING.md": "# Contributing\n",
        "LICENSE": "Apache\n",
        "docs/train.md": "# The train function\n",
        "docs/pytorch.md": "# The trainer\n",
        "docs/images/trial.webp": "",
        "examples/hpc/README.md": "# Jobs\n",
        "examples/hpc/train.py": "print('trained')\n",
    }.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


def add_page(repository: Path, name: str, text: str) -> None:
    path = repository / "docs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def places(entry: Any) -> list[str]:
    """Return all places in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [place for part in parts for place in places(part)]


def test_each_page_of_this_repository_stands_in_the_navigation_once() -> None:
    pages = site_pages.Pages({"reference/paceline.core.md": "# paceline.core\n"})
    navigation = pages.navigation()
    listed = places(navigation)
    records = {page for page in pages.texts if site_pages.is_record(page)}
    assert "decisions/0001-one-journal-per-rank.md" in records
    others = pages.texts.keys() - {"LICENSE.md", "CITATION.cff.md"} - records
    assert sorted(listed) == sorted(others)
    # Who starts reads this page before one of the tutorials.
    assert listed[:2] == ["index.md", "start/which-front-door.md"]
    assert {"index.md", "train.md", "examples/hpc/README.md", "decisions/README.md"} <= {*listed}
    titles = [title for group in navigation for title in group]
    assert titles == [title for title in site_pages.NAVIGATION if title in titles]


def test_a_page_of_a_folder_needs_no_line(repository: Path) -> None:
    for name in ("start/train.md", "start/index.md", "coming-from/ray.md", "troubleshooting.md"):
        add_page(repository, name, "# A page\n")
    navigation = site_pages.Pages({}, repository).navigation()
    groups = {title: places(group) for one in navigation for title, group in one.items()}
    assert groups == {
        "Start": ["index.md", "start/index.md", "start/train.md"],
        "Guides": ["pytorch.md", "train.md"],
        "Coming from": ["coming-from/ray.md"],
        "Troubleshooting": ["troubleshooting.md", "CHANGELOG.md", "CONTRIBUTING.md"],
    }


def test_an_index_of_the_site_stands_before_the_readme(repository: Path) -> None:
    add_page(repository, "index.md", "# Documentation\n[install](../README.md#install)\n")
    pages = site_pages.Pages({}, repository)
    assert places(pages.navigation())[:2] == ["index.md", "overview.md"]
    assert "[install](overview.md#install)" in pages.texts["index.md"]


def test_a_page_in_no_group_fails(repository: Path) -> None:
    add_page(repository, "forgotten.md", "# Forgotten\n")
    with pytest.raises(site_pages.SiteError, match=r"^forgotten\.md: the page stands in no group"):
        site_pages.Pages({}, repository).navigation()


@pytest.mark.parametrize("link", ["gone.md", "images/gone.webp", "../../out.md", "images"])
def test_a_link_to_no_file_fails(repository: Path, link: str) -> None:
    (repository.parent / "out.md").write_text("# Outside\n")
    add_page(repository, "train.md", f"# The train function\n\nA ![link]({link})\n")
    fault = rf"^docs/train\.md: there is no file '{re.escape(link)}'\.$"
    with pytest.raises(site_pages.SiteError, match=fault):
        site_pages.Pages({}, repository)


def test_links_lead_to_the_same_files_as_on_github(repository: Path) -> None:
    text = (
        "[a](../train.md#data) [b](../../README.md#install) [c](../../examples/hpc/README.md)"
        " [d](https://docs.ray.io) [e](#here) ![f](../images/trial.webp)"
        " [g](../../examples/hpc/train.py)\n"
        "```sh\n[not](a-link.md)\n```\n"
    )
    add_page(repository, "start/first.md", text)
    pages = site_pages.Pages({}, repository)
    wanted = text.replace("../../README.md", "../index.md").replace("../../examples", "../examples")
    assert pages.texts["start/first.md"] == wanted.replace("train.py", "train.py.md")
    assert pages.files["images/trial.webp"] == repository / "docs/images/trial.webp"
    script = pages.texts["examples/hpc/train.py.md"]
    assert "```python\nprint('trained')\n```" in script


def test_what_belongs_to_an_item_stays_in_its_list(repository: Path) -> None:
    text = "1. One\n\n   ```\n   code\n     deeper\n   ```\n\n2. Two\n\n- Three\n\n  Four\n\nFive\n"
    add_page(repository, "start/list.md", text)
    assert site_pages.Pages({}, repository).texts["start/list.md"] == (
        "1. One\n\n    ```\n    code\n      deeper\n    ```\n\n2. Two\n\n"
        "- Three\n\n    Four\n\nFive\n"
    )
