"""The worst that a command can be started from: what it inherits must change nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

NAME = "a folder whose name is long and has blanks in it, as they are on other systems"


def worst(folder: Path, cache: str, **more: str) -> dict[str, Any]:
    """What `subprocess` is given to start a command so.

    A home folder with a long path, and what is kept below it; modules of the caller's that break whoever imports them;
    no proxy that answers, no cluster; another locale and time zone; files closed to others; no terminal and no stdin;
    signals that are ignored, as `nohup` and a script's background leave them.

    Args:
        folder: where the home folder is made.
        cache: what is kept below the home folder: environments and models.
        more: of the environment.
    """
    home, modules = folder / NAME / "home", folder / "modules"
    (home / ".cache").mkdir(parents=True)
    (home / ".cache" / "retool-vime").symlink_to(cache)
    modules.mkdir()
    for name in ("json", "pytest", "ray", "rich", "torch", "cpu", "retool"):
        (modules / f"{name}.py").write_text(f"raise SystemExit('the caller\\'s module {name} was imported')")
    nowhere = "http://127.0.0.1:1"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(modules), "PYTHONOPTIMIZE": "2"}
    environment |= {"PYTHONWARNINGS": "error", "LC_ALL": "C", "TZ": "Pacific/Kiritimati", "CDPATH": "/"}
    environment |= dict.fromkeys(("RAY_ADDRESS", "http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), nowhere)
    kept = {name: os.environ[name] for name in ("VIME_ROOT", "MEGATRON_ROOT") if name in os.environ}

    def before_it_starts() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        os.close(0)

    return {
        "env": environment | kept | more,
        "umask": 0o077,
        "start_new_session": True,
        "preexec_fn": before_it_starts,
    }
