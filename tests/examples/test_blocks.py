"""Every block of the pages runs as it stands, or says what it needs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from guide_blocks import (
    ELSEWHERE,
    PACKAGES,
    ROOT,
    Block,
    Program,
    page_blocks,
    page_programs,
    pages,
)

BLOCKS = [block for page in pages() for block in page_blocks(page)]
PROGRAMS = [
    program
    for page in pages()
    for program in page_programs(page_blocks(page))
    if not program.needs & ELSEWHERE
]
# They load in a minute, and some start processes of their own.
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


class Reader:
    """A person with a shell in an empty directory.

    Args:
        place: The directory for the home and the work.
        environment: The variables of the shell.
        torch_ranks: The server of processes that have torch loaded.
    """

    def __init__(self, place: Path, environment: dict[str, str], torch_ranks: Any) -> None:
        self.directory, self._home = place / "work", place / "home"
        self.directory.mkdir()
        # A block that installs, and that nobody has marked, must not change this environment.
        programs = self._home / "bin"
        programs.mkdir(parents=True)
        for name in ("pip", "pip3", "make"):
            (programs / name).write_text("#!/bin/sh\necho 'Hint: needs: checkout.' >&2; exit 1\n")
            (programs / name).chmod(0o755)
        self._environment = {
            **environment,
            "HOME": str(self._home),
            "PACELINE_HOME": str(self._home / ".paceline"),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{environment['PATH']}",
            "OMP_NUM_THREADS": "1",
            # No master is there to report to.
            "PACELINE_REPORT_PATIENCE_S": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        }
        self._torch_ranks = torch_ranks

    def run(self, program: Program) -> None:
        """Run the blocks; those of Python that follow each other are one script."""
        for language, group in groupby(program.blocks, lambda block: block.file or block.language):
            code = "\n".join(block.code for block in group)
            if language == "python":
                self._run_python(code, program)
            elif language == "sh":
                self.run_shell(code)
            else:
                (self.directory / language).write_text(code)

    def run_shell(self, code: str) -> str:
        """Run commands, stay in the directory where they end, and return what they print."""
        # Other masters of this machine have the usual port.
        code = re.sub(r"paceline up\b", "paceline up --port 0 --slots 2", code)
        done = self._start(["sh", "-euc", f"{code}\npwd > {self._home}/directory"])
        assert done.returncode == 0, f"{code}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        self.directory = Path((self._home / "directory").read_text().strip())
        return done.stdout

    def _run_python(self, code: str, program: Program) -> None:
        script = self.directory / "blocks.py"
        script.write_text(code)
        if not program.needs:
            done = self._torch_ranks.run_to_end(
                str(script), directory=self.directory, environment=self._environment
            )
        else:
            done = self._start([sys.executable, str(script)])
        script.unlink()
        assert done.returncode == 0, f"{program}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

    def _start(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self.directory, env=self._environment, timeout=850,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any) -> Iterator[Reader]:
    """Return a person with a shell, whose master is stopped at the end."""
    reader = Reader(tmp_path, clean_environment, torch_ranks)
    yield reader
    if (tmp_path / "home" / ".paceline").exists():
        reader.run_shell("paceline down >/dev/null 2>&1 || true")


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [pytest.param(each, id=str(each), marks=SLOW if each.needs else []) for each in PROGRAMS],
)
def test_a_reader_can_run(program: Program, reader: Reader, request: pytest.FixtureRequest) -> None:
    missing = [name for name in program.needs if find_spec(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: needs pip install {' '.join(missing)}")
    reader.run(program)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_what_a_block_needs_is_known(block: Block) -> None:
    # A typing error would skip the block for ever.
    assert block.needs <= {"above", *PACKAGES, *ELSEWHERE}, block.place
    assert not block.is_fragment or block.looks_like_a_fragment, block.place
    installs = re.search(r"\bpip3? (install|download)|^make ", block.code, re.MULTILINE)
    assert not installs or block.language != "sh" or block.needs & ELSEWHERE, block.place


def test_a_newcomer_scrolls_no_block_sideways() -> None:
    # As many columns as the site shows on a laptop.
    first = [b for b in BLOCKS if b.page == "README.md" or b.page.startswith("docs/start/")]
    lines = [(block.place, line) for block in first for line in block.code.splitlines()]
    assert [(place, line) for place, line in lines if len(line) > 88] == []


def test_the_page_of_optuna_names_all_samplers_and_calls_none_missing() -> None:
    page = (ROOT / "docs/coming-from/optuna.md").read_text()
    there, _, missing = page.partition("**Missing**")
    config = (ROOT / "docs/experiment-config.md").read_text()
    [row] = re.findall(r"\| `searcher\.sampler\.of` \|([^|]*)\|", config)
    for name in re.findall(r"`(\w+)`", row):
        assert re.search(rf"\W{name}\W", there), name
        assert name not in re.sub("[^a-z]", "", missing.lower())


def test_the_command_for_diffs_writes_the_side_of_after() -> None:
    page = (ROOT / "docs/coming-from/README.md").read_text()
    [command] = re.findall(r"^sed .*(?= page\.diff > train\.py$)", page, re.MULTILINE)
    texts = [path.read_text() for path in sorted((ROOT / "docs/coming-from").glob("*.md"))]
    diffs = re.findall(r"^```diff\n(.*?)^```$", "".join(texts), re.DOTALL | re.MULTILINE)
    assert len(diffs) >= 10
    for diff in diffs:
        done = subprocess.run(
            ["sh", "-c", command], input=diff, capture_output=True, text=True, check=True
        )
        block = list(page_blocks("page.md", f"<!-- before: nothing -->\n```diff\n{diff}```\n"))[-1]
        assert done.stdout.split("\n") == [line for line in block.code.split("\n") if line] + [""]


@pytest.mark.parametrize("page", pages())
def test_a_page_says_that_its_blocks_continue_others(page: str) -> None:
    if any("above" in block.needs for block in page_blocks(page)):
        assert "continue one another" in " ".join((ROOT / page).read_text().split())


def test_a_comment_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="before page.md:3 has the unknown word 'fragments'"):
        list(page_blocks("page.md", "<!-- fragments -->\n```python\nx\n```\n"))


def test_a_block_that_continues_others_is_run_after_them() -> None:
    text = """
```python
a = 1
```
<!-- fragment -->
```python
...
```
<!-- needs: above; file: b.yaml -->
```yaml
b: 2
```
<!-- needs: above, ray -->
```bash
cat b.yaml
```
```python
c = 3
```
"""
    programs = page_programs(page_blocks("page.md", text))
    assert [[block.code for block in each.blocks] for each in programs] == [
        ["a = 1\n", "b: 2\n"], ["a = 1\n", "b: 2\n", "cat b.yaml\n"], ["c = 3\n"],
    ]  # fmt: skip
    assert [set(each.needs) for each in programs] == [set(), {"ray"}, set()]
