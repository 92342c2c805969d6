"""What attempts ran in, for `paceline trial describe`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.messages.trials import AttemptEnvironment

# Digits of a commit that people know it by.
_SHORT = 10


def print_environments(environments: "list[AttemptEnvironment]", *, is_whole: bool) -> None:
    """Print the environment of the newest attempt in short, or those of all as they are."""
    from paceline.cli._console_output import console, print_facts

    known = [one for one in environments if one.environment is not None]
    if is_whole:
        _print_whole(environments)
    elif known:
        console().print()
        print_facts(_environment_facts(known[-1].environment or {}, known[-1].source))


def _print_whole(environments: "list[AttemptEnvironment]") -> None:
    import yaml

    from paceline.cli._console_output import console

    found: list[dict[str, Any]] = []
    # Equal ones are told once.
    for before, one in zip([None, *environments], environments, strict=False):
        content: dict[str, Any] = {"environment": one.environment, "source": one.source}
        if before is not None and one.model_copy(update={"number": before.number}) == before:
            content = {"environment": f"that of attempt {before.number}"}
        found.append({"attempt": one.number, **content})
    console().print()
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    console().print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)


def _environment_facts(
    found: dict[str, Any], source: dict[str, Any] | None
) -> list[tuple[str, Any]]:
    python, host = found.get("python", {}), found.get("host", {})
    packages: dict[str, str] = found.get("packages", {})
    named = [f"{name} {packages[name]}" for name in ("torch",) if name in packages]
    named.append(f"{len(packages)} packages")
    return [
        ("Python", f"{python.get('version')}, {', '.join(named)} ({python.get('executable')})"),
        ("Paceline", found.get("paceline")),
        ("Host", f"{host.get('name')}, {host.get('platform')}, {host.get('num_cores')} cores"),
        ("GPUs", _gpus(found.get("gpus"))),
        ("Code", _code_facts(source)),
    ]


def _gpus(gpus: dict[str, Any] | None) -> str | None:
    if not gpus:
        return None
    return ", ".join([*gpus.get("models", []), f"driver {gpus.get('driver')}"])


def _code_facts(source: dict[str, Any] | None) -> str | None:
    if source is None:
        return None
    text = f"commit {source['commit'][:_SHORT]}"
    if source.get("branch"):
        text += f" of {source['branch']}"
    if source.get("num_diff_bytes"):
        text += f", {source['num_diff_bytes']} bytes of changes"
    if source.get("num_untracked_files"):
        number = source["num_untracked_files"]
        text += f", {number} new file{'s' * (number != 1)}"
    return text
