"""Runs one server of a CPU run: starts it, ends it with the run, and leaves nothing of it behind.

    python -I launcher.py FOLDER COMMAND ...

stdin is a pipe from the run. When it ends without a word, the run was killed before it could end the server, and all
is ended; after the byte KEEP the server lives on until this process gets a SIGTERM. FOLDER is the server's directory
and TMPDIR, and is removed at the end. Exits with the server's code, 128 + signal if a signal ended it or this process.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from retool.processes import Stopped, ignore_stop_signals, raise_on_stop_signals
from retool.supervise import become_subreaper, end_descendants, exit_code

KEEP = b"k"
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def main() -> int:
    folder, command = sys.argv[1], sys.argv[2:]
    become_subreaper()
    raise_on_stop_signals()
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, cwd=folder, env={**os.environ, "TMPDIR": folder, "PWD": folder}
        )
        threading.Thread(target=follow_the_run, daemon=True).start()
        code, grace = exit_code(server.wait()), 0.0  # what a server leaves when it crashes is not asked first
    except Stopped as stopped:
        code, grace = stopped.exit_code, GRACE
    ignore_stop_signals()
    end_descendants(grace)
    shutil.rmtree(folder, ignore_errors=True)
    return code


def follow_the_run() -> None:
    if sys.stdin.buffer.read(1) != KEEP:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the thread may still wait
