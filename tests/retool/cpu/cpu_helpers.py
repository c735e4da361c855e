"""What the tests of the CPU run share: starting it as its script does, and its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from cpu import options

EXAMPLE = Path(options.__file__).parents[1]
# As the scripts set them: the folder that models are kept in, and where the run is imported from.
CACHE = subprocess.check_output(
    ["bash", "-c", '. "$0"; echo "$RETOOL_CACHE"', EXAMPLE / "cpu" / "cache.sh"], text=True
)
ENVIRONMENT = {"RETOOL_CACHE": CACHE.strip(), "PYTHONPATH": str(EXAMPLE)}


def start(folder: Path, *arguments, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cpu.run", *map(str, arguments)],
        cwd=folder,
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 600) -> SimpleNamespace:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return SimpleNamespace(code=process.returncode, out=out, err=err)


def the_error(done: SimpleNamespace) -> str:
    """The one line on stderr of a run that failed."""
    assert done.code == 1, (done.out, done.err)
    lines = done.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    return lines[0]


def problem_file(folder: Path, *rows) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def fake_model(folder: Path) -> Path:
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder
