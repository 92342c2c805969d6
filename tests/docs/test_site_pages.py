"""Pages that are not as they must be fail the build before any HTML is made."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import site_pages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of all that pages are made from."""
    for folder in ("docs", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "paceline_runs", "*.webp")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for image in ROOT.glob("docs/images/*.webp"):
        (tmp_path / image.relative_to(ROOT)).touch()
    for page in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(page, tmp_path)
    return tmp_path


def places(entry: Any) -> list[str]:
    """Return all places in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [place for part in parts for place in places(part)]


def test_each_page_stands_in_the_navigation_once(copy: Path) -> None:
    pages = site_pages.Pages({"reference/paceline.core.md": "# paceline.core\n"}, copy)
    navigation = pages.navigation()
    listed = places(navigation)
    assert sorted(listed) == sorted(pages.texts.keys() - {"LICENSE.md"})
    assert {"index.md", "train.md", "examples/hpc/README.md", "decisions/README.md"} <= {*listed}
    titles = [title for group in navigation for title in group]
    assert titles == [title for title in site_pages.NAVIGATION if title in titles]
    [guides] = [group["Guides"] for group in navigation if "Guides" in group]
    assert places(guides)[:2] == ["pytorch.md", "train.md"]


def test_a_page_of_a_folder_needs_no_line(copy: Path) -> None:
    for name in ("start/train.md", "coming-from/ray.md", "troubleshooting.md"):
        page = copy / "docs" / name
        page.parent.mkdir(exist_ok=True)
        page.write_text("# A page\n")
    groups = {
        title: places(group)
        for one in site_pages.Pages({}, copy).navigation()
        for title, group in one.items()
    }
    assert groups["Start"] == ["index.md", "start/train.md"]
    assert groups["Coming from"] == ["coming-from/ray.md"]
    assert groups["Troubleshooting"][0] == "troubleshooting.md"


def test_a_page_in_no_group_fails(copy: Path) -> None:
    (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    with pytest.raises(site_pages.SiteError, match=r"^forgotten\.md: the page stands in no group"):
        site_pages.Pages({}, copy).navigation()


@pytest.mark.parametrize(
    "link",
    ["[gone](gone.md)", "![gone](images/gone.webp)", "[out](../../out.md)", "[all](decisions)"],
)
def test_a_link_to_no_file_fails(copy: Path, link: str) -> None:
    (copy.parent / "out.md").write_text("# Outside\n")
    page = copy / "docs" / "train.md"
    page.write_text(page.read_text() + f"\n{link}\n")
    target = re.escape(link.partition("(")[2].rstrip(")"))
    with pytest.raises(
        site_pages.SiteError, match=rf"^docs/train\.md: there is no file '{target}'\.$"
    ):
        site_pages.Pages({}, copy)


def test_links_lead_to_the_same_files_as_on_github(copy: Path) -> None:
    page = copy / "docs" / "start" / "first.md"
    page.parent.mkdir()
    page.write_text(
        "[a](../train.md#data) [b](../../README.md#install) [c](../../examples/hpc/README.md)"
        " [d](https://docs.ray.io) [e](#here) ![f](../images/trial.webp)"
        " [g](../../examples/streamed_data/train.py)\n"
        "```sh\n[not](a-link.md)\n```\n"
    )
    pages = site_pages.Pages({}, copy)
    assert pages.texts["start/first.md"] == (
        "[a](../train.md#data) [b](../index.md#install) [c](../examples/hpc/README.md)"
        " [d](https://docs.ray.io) [e](#here) ![f](../images/trial.webp)"
        " [g](../examples/streamed_data/train.py.md)\n"
        "```sh\n[not](a-link.md)\n```\n"
    )
    assert pages.files["images/trial.webp"] == copy / "docs/images/trial.webp"
    script = pages.texts["examples/streamed_data/train.py.md"]
    assert (copy / "examples/streamed_data/train.py").read_text() in script


def test_what_belongs_to_an_item_stays_in_its_list(copy: Path) -> None:
    page = copy / "docs" / "start" / "list.md"
    page.parent.mkdir()
    page.write_text(
        "1. One\n\n   ```\n   code\n     deeper\n   ```\n\n2. Two\n\n- Three\n\n  Four\n\nFive\n"
    )
    assert site_pages.Pages({}, copy).texts["start/list.md"] == (
        "1. One\n\n    ```\n    code\n      deeper\n    ```\n\n2. Two\n\n"
        "- Three\n\n    Four\n\nFive\n"
    )
