"""Interpreters that the host starts for itself: workers, and the reviewer of long sources."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from retool.sandbox.results import SandboxError

ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "LD_BIND_NOW": "1",  # else each child looks up anew what C functions it calls
    # A pool of threads reserves address space per core, and a call may not start threads.
    **{f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")},
}


def start_python(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start an interpreter that sees nothing of the host: no environment, no site, no descriptors, no terminal.

    It keeps where the host's own interpreter finds its shared libraries: a cluster's module system, or a Python that
    lies where it was not built for, says so in LD_LIBRARY_PATH, without which it does not start. The worker takes it out of its environment.

    Args:
        arguments: of the interpreter.
        options: of subprocess.Popen, above those set here.

    Raises:
        SandboxError: it could not be started.
    """
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-I", "-S", *arguments]
    environment = ENVIRONMENT | {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    try:
        return subprocess.Popen(command, cwd="/", env=environment, start_new_session=True, **(streams | options))
    except OSError as error:
        raise SandboxError(f"cannot start {' '.join(command)}: {error}") from error
