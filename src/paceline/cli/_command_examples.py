"""Examples and exit codes at the end of each help."""

from functools import cache
from pathlib import Path

_COMMON = {0: "success", 1: "an error", 2: "wrong usage", 130: "interrupted"}
_FOLLOWED = {
    0: "COMPLETED",
    1: "another end, or an error",
    3: "COMPLETED, but records are lost",
    4: "no finite value of the searched metric",
    130: "interrupted; the experiment continues",
}
_EXIT_CODES: dict[str, dict[int, str]] = {
    "experiment wait": _FOLLOWED | {124: "not ended within --timeout"},
    "run": {0: "the script ended with 0", 1: "an error; other codes are the script's"},
    "doctor": {1: "a problem was found, or an error"},
    "verify-resume": {
        1: "the runs differ",
        2: "no verdict, or wrong usage",
        3: "not supported: the command does not resume",
        4: "nothing resumable: no checkpoint was stored",
    },
    "restore": {3: "restored, but files of the backup are damaged"},
    "home check": {1: "differences are left, or an error"},
}
# With `-f` these commands end as the experiment does.
_FOLLOWING = {f"experiment {name}" for name in ("create", "continue", "fork", "logs")}
_FOLLOWING |= {"trial continue"}
_WORDS = {"e": "experiment", "t": "trial", "c": "checkpoint", "s": "slot"}
_WORDS |= {"lt": "list-trials", "lc": "list-checkpoints"}


@cache
def command_examples() -> dict[str, list[str]]:
    """Return the examples of each command, by its full name without `paceline`."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    rows = (line.split(": ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: examples.split("; ") for name, examples in rows}


def help_ending(command_path: str) -> str:
    """Return two examples and the exit codes of a command or a group, as lines for its help."""
    path = " ".join(_WORDS.get(word, word) for word in command_path.split()[1:])
    prefix = f"{path} " if path else ""
    below = [each for name, each in command_examples().items() if name.startswith(prefix)]
    # A group shows an example of each of its first two commands.
    of_group = [example for place in zip(*below, strict=True) for example in place]
    shown = command_examples().get(path) or of_group[:2]
    lines = ["", "Examples:", *(f"  paceline {example}" for example in shown), ""]
    codes = _COMMON | _EXIT_CODES.get(path, {})
    for title, group in (("Exit codes", codes), ("Exit codes with -f", _FOLLOWED)):
        if group is codes or path in _FOLLOWING:
            lines += [f"{title}:", *(f"  {code:<4} {group[code]}" for code in sorted(group))]
    if not path:
        skill = Path(__file__).parents[1] / ".agents" / "skills" / "paceline" / "SKILL.md"
        lines += ["", f"For agents: read {skill}"]
    return "\n".join(lines) + "\n"
