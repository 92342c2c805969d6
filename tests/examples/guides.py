"""The guides: their code, their commands, and where their links lead."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class Guide:
    """A page of the documentation.

    Args:
        path: Where it is below the root, such as "docs/train.md".
    """

    def __init__(self, path: str) -> None:
        self.path = ROOT / path
        self.text = self.path.read_text()

    def blocks(self, language: str) -> list[str]:
        """Return the blocks of a language, from top to bottom."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    def block(self, text: str, language: str = "python") -> str:
        """Return the block that has a text, which others must not have."""
        [block] = [block for block in self.blocks(language) if text in block]
        return block

    def code(self) -> str:
        """Return all Python code as one script."""
        return "\n".join(self.blocks("python"))

    def run(self, blocks: Iterable[str], names: dict[str, Any]) -> None:
        """Execute blocks that share names; a traceback has the lines of the page."""
        for block in blocks:
            above = self.text.partition(block)[0].count("\n")
            exec(compile("\n" * above + block, str(self.path), "exec"), names)

    def commands(self, program: str) -> list[str]:
        """Return the lines in blocks and sentences that begin with a program."""
        blocks = re.sub(r"\\\n *", "", "\n".join(_BLOCKS.findall(self.text)))
        lines = re.findall(rf"^(?:\$ )?({program} .*)$", blocks, re.MULTILINE)
        lines += re.findall(rf"`({program}\s[^`]+)`", _BLOCKS.sub("", self.text))
        return [" ".join(re.sub(r"\s#.*", "", line).split()) for line in lines]

    def headings(self) -> set[str]:
        """Return what links to headings end in."""
        titles = re.findall(r"^#+ (.*)$", self.text, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    def dead_links(self) -> list[str]:
        """Return the links that lead to no file or heading."""
        links = re.findall(r"\]\(((?!https?:)[^)]+)\)", self.text)
        return [link for link in links if self._is_dead(link)]

    def _is_dead(self, link: str) -> bool:
        name, _, heading = link.partition("#")
        path = (self.path.parent / name).resolve() if name else self.path
        if not path.exists() or not heading:
            return not path.exists()
        return heading not in Guide(str(path.relative_to(ROOT))).headings()


def line_trial() -> str:
    """Return the imports and the trial class `LineTrial`, which guides use."""
    return (ROOT / "examples" / "line" / "line.py").read_text()
