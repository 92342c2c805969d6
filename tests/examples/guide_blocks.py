"""Blocks of code in the pages, as programs that a reader can run.

A comment before a block says what the page cannot show:

- none: the block runs alone, in an empty directory;
- `<!-- needs: above -->`: it continues the block above, in the same directory;
- `<!-- file: train.py -->`: the reader saves it as this file, which the blocks below run;
- `<!-- needs: ray -->`: one of `PACKAGES` or `ELSEWHERE`;
- `<!-- before: wandb -->`, of a `diff`: packages that the lines of before need; both sides run;
- `<!-- fragment -->`: it is a part of something that the reader has, and looks so.

Several are separated by semicolons: `<!-- needs: above, ray; file: train.py -->`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"python": "python", "sh": "sh", "bash": "sh"}
# What no test of this machine has: other machines, buckets, a terminal that waits, and libraries
# that need an environment of their own or that no current Python runs.
ELSEWHERE = {
    *("checkout", "nodes", "cloud", "terminal", "deepspeed", "horovod", "torchrun"),
    *("determined", "generic_trainer", "optuna", "raysgd"),
}
# Packages that development installs; without one, its blocks are skipped.
PACKAGES = {"accelerate", "lightning", "mlflow", "pandas", "ray", "transformers", "wandb"}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<marks>[^>]*) -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        page: Where the page is below the root.
        line: The line of its first line of code, from 1.
        language: "python" or "sh", or that of a file, such as "yaml".
        code: Its text.
        needs: What must be there; "above" stands for the blocks above.
        file: The name of the file that it is, if any.
        is_fragment: Whether it is a part of something that the reader has.
    """

    page: str
    line: int
    language: str
    code: str
    needs: frozenset[str] = frozenset()
    file: str | None = None
    is_fragment: bool = False

    @property
    def place(self) -> str:
        """Return the page and the line."""
        return f"{self.page}:{self.line}"

    @property
    def looks_like_a_fragment(self) -> bool:
        """Whether a reader sees that something is left out, or must be put in."""
        # A name such as HEAD, or the script of the reader.
        own = r"\b[A-Z]{3,}\b(?!=)|\btrain\.py\b"
        return "..." in self.code or (self.language == "sh" and bool(re.search(own, self.code)))


@dataclass(frozen=True)
class Program:
    """Blocks that a reader runs one after the other in one directory."""

    blocks: tuple[Block, ...]

    @property
    def needs(self) -> frozenset[str]:
        """Return what must be there, other than blocks."""
        return frozenset().union(*(block.needs for block in self.blocks)) - {"above"}

    def __str__(self) -> str:
        lines = ",".join(str(block.line) for block in self.blocks)
        return f"{self.blocks[0].page}:{lines}"


def pages() -> list[str]:
    """Return the README and the pages of the documentation, without the decisions."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if not name.startswith("docs/decisions/")]


def page_blocks(page: str, text: str | None = None) -> Iterator[Block]:
    """Return the blocks of a page that a reader runs or saves, from top to bottom.

    Args:
        page: Where the page is below the root.
        text: Its text, unless it is to be read.

    Raises:
        ValueError: If a comment before a block has a word that has no meaning.
    """
    text = (ROOT / page).read_text() if text is None else text
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        language = LANGUAGES.get(match["language"], match["language"])
        before = None
        block = Block(page, line, language, match["code"])
        for mark in filter(None, (part.strip() for part in (match["marks"] or "").split(";"))):
            word, _, value = mark.partition(": ")
            if word == "needs" and value:
                block = replace(block, needs=frozenset(value.split(", ")))
            elif word == "file" and value:
                block = replace(block, file=value)
            elif word == "before" and value and language == "diff":
                before = frozenset(value.split(", ")) - {"nothing"}
            elif mark == "fragment":
                block = replace(block, is_fragment=True)
            else:
                raise ValueError(f"The comment before {block.place} has the unknown word {mark!r}.")
        if before is not None:
            # The side of before is a program of its own.
            yield replace(block, language="python", code=_side(block.code, "-"), needs=before)
            block = replace(block, language="python", code=_side(block.code, "+"))
        if block.file or block.language in LANGUAGES.values():
            yield block


def _side(diff: str, sign: str) -> str:
    lines = diff.splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in (sign, " ", ""))


def page_programs(blocks: Iterator[Block]) -> list[Program]:
    """Return the programs of a page; fragments belong to none.

    If some blocks of a program need more than the others, those others are a program too.
    """
    chains: list[list[Block]] = []
    for block in blocks:
        if block.is_fragment:
            continue
        if "above" in block.needs:
            chains[-1].append(block)
        else:
            chains.append([block])
    programs = []
    for chain in chains:
        plain = [block for block in chain if block.needs <= {"above"}]
        if plain and "above" not in plain[0].needs and any(b.file is None for b in plain):
            programs.append(Program(tuple(plain)))
        if len(plain) < len(chain):
            programs.append(Program(tuple(chain)))
    return programs
