"""`paceline home`: check a master's home and mend it."""

from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli._command_options import Home, Json, home_of

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check the home of a master.")

_DIFFERENT = 1


@app.callback()
def _home() -> None:
    """Check the home of a master."""


@app.command()
def check(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Mend what can be mended; the master must be stopped. A lost database is made"
            " from the records and journals in the home.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes of checkpoints instead of their bytes.")
    ] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Compare the database of a home with its records, code, logs, journals and checkpoints.

    The master may run or not. The exit code is 0 if there is no difference, or if all are fixed,
    and 1 otherwise.
    """
    from paceline.cli._console_output import print_json
    from paceline.master.upkeep import check
    from paceline.master.upkeep import fix as fix_damage

    directory = home_of(home)
    result = (fix_damage if fix else check)(directory, is_quick=quick)
    if json:
        findings = [asdict(finding) for finding in result.findings]
        print_json(
            {"home": str(directory), "master_runs": result.master_runs, "findings": findings}
        )
    else:
        for finding in result.findings:
            typer.echo(finding.text)
        typer.echo(
            _summary_of_home(
                len(result.findings), result.num_left, master_runs=result.master_runs, is_fixed=fix
            )
        )
    if result.num_left:
        raise typer.Exit(_DIFFERENT)


def _summary_of_home(num_found: int, num_left: int, *, master_runs: bool, is_fixed: bool) -> str:
    note = " A master is at work: what has not been stored yet was not looked at." * master_runs
    if not num_found:
        return f"No differences.{note}"
    found = "1 difference" if num_found == 1 else f"{num_found} differences"
    if num_left == 0:
        return f"{found}, all fixed.{note}"
    left = "" if num_left == num_found else f", {num_left} not fixed"
    hint = "see docs/durability.md"
    if not is_fixed:
        hint = f"`--fix` mends what can be mended, {hint}"
    return f"{found}{left}. Hint: {hint}.{note}"
