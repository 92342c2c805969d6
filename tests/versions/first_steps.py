"""The first steps of a user, with the Python and the versions that run this file.

`python first_steps.py README.md` asks each command for its help, follows the quick start of the
README and runs a search. It needs nothing but Paceline. Without torch it trains without torch.
"""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.main import get_command

from paceline.cli import app

# A search as users write it, of a script that needs no torch.
SCRIPT = """
import paceline

with paceline.core.init() as context:
    x = paceline.get_cluster_info().trial.hparams["x"]
    for step in range(1, 4):
        context.train.report_validation_metrics(step, {"loss": x / step})
"""
SEARCH = """
entrypoint: python3 search.py
hyperparameters:
  x: {type: double, minval: 1, maxval: 2}
searcher:
  name: random
  metric: loss
  max_trials: 3
"""


def main() -> None:
    """Take the steps; end with the first that fails."""
    readme = Path(sys.argv[1]).read_text(encoding="utf-8")
    assert "Usage: paceline" in paceline("--help")
    print(f"{help_texts()} commands have a help text.")
    with tempfile.TemporaryDirectory(prefix="first-steps-") as directory:
        os.chdir(directory)
        os.environ["PACELINE_HOME"] = str(Path(directory, "home"))
        if importlib.util.find_spec("torch"):
            follow_readme(readme)
        search()


def help_texts() -> int:
    """Print the help of each command into nowhere, and return how many there are."""
    asked = list(commands())
    for words in asked:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            get_command(app).main([*words, "--help"], "paceline", standalone_mode=False)
        assert text.getvalue().startswith(" ".join(["Usage: paceline", *words])), words
    return len(asked)


def commands() -> Iterator[list[str]]:
    """Yield the words of each command and each group."""
    yield []
    groups = [([], get_command(app))]
    while groups:
        words, group = groups.pop()
        for name, command in getattr(group, "commands", {}).items():
            yield [*words, name]
            groups.append(([*words, name], command))


def follow_readme(readme: str) -> None:
    """Run the script of the README, resume it, and list its run."""
    scripts = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    Path("train.py").write_text(scripts[0], encoding="utf-8")
    run(sys.executable, "train.py")
    assert "completed" in paceline("runs", "list")
    print("The script of the README trains.")
    [config] = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    Path("experiment.yaml").write_text(config, encoding="utf-8")
    run_experiment("experiment.yaml")
    print("The experiment of the README trains.")


def search() -> None:
    """Run a search with a master of its own."""
    Path("search.py").write_text(SCRIPT, encoding="utf-8")
    Path("search.yaml").write_text(SEARCH, encoding="utf-8")
    run_experiment("search.yaml")
    print("A search runs.")


def run_experiment(config: str) -> None:
    """Start a master, run an experiment to its end, and stop the master."""
    paceline("up", "--detach", "--port", "0", "--slots", "2")
    try:
        paceline("experiment", "create", config, "-f")
        assert "COMPLETED" in paceline("experiment", "list")
        paceline("experiment", "describe", "1")
        paceline("status")
    finally:
        paceline("down")


def paceline(*arguments: str) -> str:
    """Run the `paceline` of this environment and return what it prints."""
    return run(str(Path(sys.executable).with_name("paceline")), *arguments)


def run(*command: str) -> str:
    """Run a command; it must succeed and warn of nothing."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{output}"
    assert not re.search(r"\w+Warning\b", output), f"{command} warned:\n{output}"
    return output


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}, typer {typer.__version__}")
    main()
