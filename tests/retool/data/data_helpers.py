"""What the tests of the data scripts share: running a script as a user does, and writing its input."""

import json
import subprocess
import sys
from pathlib import Path


def run_script(
    script: Path, folder: Path, *arguments, downloads: Path | None = None, **options
) -> subprocess.CompletedProcess:
    """Run a script in `folder`, which is the vime checkout and holds the downloads as well, without network."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VIME_ROOT": str(folder),
        "RETOOL_DOWNLOADS": str(downloads or folder / "downloads"),
    }
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        **options,
    )


def write_jsonl(path: Path, rows) -> Path:
    """Write rows as JSON lines; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path
