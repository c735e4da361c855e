"""Which files are the project's: for the tests that look at all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
EXAMPLE = ROOT / "examples" / "retool"
# Before a command: permissions hold for it, which root otherwise overlooks.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] * (os.geteuid() == 0)
IN_VIME = (ROOT / "vime").is_dir()  # the two folders were copied into a checkout, whose other files are not ours

GENERATED = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache"}
ROOT_FILES = (
    ".ci/run .gitignore .pre-commit-config.yaml CHANGELOG.md CONTRIBUTING.md LICENSE README.md pyproject.toml".split()
)


def our_files() -> Iterator[Path]:
    """Every file of the project, whether or not git is there to list them."""
    for folder in (EXAMPLE, TESTS):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not GENERATED & set(path.parts):
                yield path
    if not IN_VIME:
        yield from (ROOT / name for name in ROOT_FILES)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


DOCUMENTS = [path for path in our_files() if path.suffix == ".md"]
MODULES = {
    ".".join(path.relative_to(EXAMPLE).with_suffix("").parts): path
    for path in our_files()
    if path.suffix == ".py" and path.is_relative_to(EXAMPLE) and path.name != "__init__.py"
}
