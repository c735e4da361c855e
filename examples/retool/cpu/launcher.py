"""Leads the process group of one server: starts it, ends it with the run, and leaves nothing of it behind.

    python -I launcher.py FOLDER COMMAND ...

stdin is a pipe from the run. When it ends without a word, the run was killed before it could end the server, and the
whole group is ended; after the byte KEEP the server lives on until this process gets a SIGTERM. FOLDER is the server's
directory and TMPDIR, and is removed at the end. Exits with the server's code, 128 + signal if a signal ended it.

Standard library only, and imports nothing of ours.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

KEEP = b"k"
GRACE = 10  # seconds between SIGTERM and SIGKILL
TRACKER = b"multiprocessing.resource_tracker"


def main() -> int:
    folder, command = sys.argv[1], sys.argv[2:]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, cwd=folder, env={**os.environ, "TMPDIR": folder, "PWD": folder}
    )

    def on_term(signum: int, frame: FrameType | None) -> None:
        threading.Thread(target=end_group, daemon=True).start()

    def follow_the_run() -> None:
        if sys.stdin.buffer.read(1) != KEEP:
            end_group()

    signal.signal(signal.SIGTERM, on_term)
    threading.Thread(target=follow_the_run, daemon=True).start()
    code = server.wait()
    end_group(grace=0)  # what a server leaves running when it crashes
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end_group(grace: float = GRACE) -> None:
    """End every process of the group but this one: ask, then kill.

    Python's resource trackers ignore SIGTERM and are killed last: they remove what the others left in /dev/shm.
    """
    wait_for_end(members(), signal.SIGTERM, grace)
    wait_for_end([pid for pid in members() if not is_tracker(pid)], signal.SIGKILL, GRACE)
    wait_for_end([], signal.SIGKILL, 2)
    wait_for_end(members(), signal.SIGKILL, GRACE)


def wait_for_end(pids: list[int], signum: signal.Signals, seconds: float) -> None:
    """Send the signal to these, then wait until the group is empty, for so many seconds at most."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + seconds
    while members() and time.monotonic() < deadline:
        time.sleep(0.05)


def members() -> list[int]:
    """The other processes of this one's group, zombies left out."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state, _, group = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it has ended meanwhile
            if int(group) == os.getpgrp() and state != "Z":
                found.append(int(entry.name))
    return found


def is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the threads may still wait
