"""Build the web UI into the package, unless it was built from this very source.

Usage: python webui/scripts/build.py [--check]

`make ui` and the build of wheel and sdist (hatch_build.py) both use this. With `--check` nothing is
built; the exit status is 0 if the build is up to date.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

WEBUI = Path(__file__).resolve().parents[1]
BUILT = WEBUI.parent / "src" / "paceline" / "_cluster" / "master" / "webui"
STAMP = BUILT / "source.sha256"
# Vite writes the licences of all that it puts into the assets.
LICENSES = BUILT / "licenses.md"
# A package without the text of its licence, and one of the same author and licence that has it.
TEXTS = {"react-remove-scroll-bar": "react-remove-scroll/LICENSE"}
# They change nothing in what is built.
IGNORED = {"node_modules", "tests", "__pycache__", "openapi.json"}


def source_digest() -> str:
    """Return a digest of the source; unlike times of files, it survives archives and clones."""
    digest = hashlib.sha256()
    for path in sorted(WEBUI.rglob("*")):
        name = path.relative_to(WEBUI)
        if IGNORED.isdisjoint(name.parts) and path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name.as_posix()} {content}\n".encode())
    return digest.hexdigest()


def is_up_to_date(digest: str) -> bool:
    """Tell whether the build was made from the source with this digest."""
    return (
        (BUILT / "index.html").is_file() and STAMP.is_file() and STAMP.read_text().strip() == digest
    )


def complete_licenses() -> None:
    """Add the notices of the packages, and the texts that they lack."""
    modules = WEBUI / "node_modules"
    written = LICENSES.read_text(encoding="utf-8")
    for name in re.findall(r"^## (\S+) - ", written, re.MULTILINE):
        package = modules / name
        files = [*package.glob("NOTICE*"), *package.glob("licenses/*")]
        files += [modules / TEXTS[name]] if name in TEXTS else []
        for file in sorted(files):
            text = file.read_text(encoding="utf-8")
            written += f"\n## {name}: {file.name}\n\n{text.strip()}\n"
    LICENSES.write_text(written, encoding="utf-8")


def main() -> int:
    """Build if need be, and return the exit status."""
    digest = source_digest()
    if is_up_to_date(digest):
        return 0
    if "--check" in sys.argv[1:]:
        return 1
    if not (WEBUI / "package.json").is_file():
        print(f"There is no {WEBUI / 'package.json'}.", file=sys.stderr)
        return 1
    npm = ["sh", str(WEBUI / "scripts" / "npm.sh"), sys.executable]
    for arguments in (
        ["ci", "--no-audit", "--no-fund", "--loglevel=error"],
        ["run", "--silent", "build"],
    ):
        # Standard output belongs to who builds a package.
        status = subprocess.run([*npm, *arguments], stdout=sys.stderr, check=False).returncode
        if status != 0:
            return status
    complete_licenses()
    # Last, so that a build that was interrupted is not taken for a whole one.
    STAMP.write_text(f"{digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
