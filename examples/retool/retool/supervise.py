"""Run work whose processes must all end with it, and locks that hold as long as it runs.

    front process (what the shell waits for) --- worker process (the work) --- whatever the work starts

Contract: `supervise` returns when the work has ended and no process that came from it is left; no other process is
touched. A stop signal ends the work in order. Either of the two processes may be killed outright: the other one then
ends everything. Both are subreapers, which inherit the orphans below them, so their descendants are exactly what they
started, however that daemonized.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from retool.processes import Stopped, ignore_stop_signals, raise_on_stop_signals

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_STOP_SECONDS = 15.0
RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS = 2.0


class LaunchError(Exception):
    """The work cannot be done; the message is one line that says why and where to look."""


def supervise(work: Callable[[], int]) -> int:
    """Do the work in a process of its own, and end every process that came from it.

    Args:
        work: returns an exit code; a LaunchError or an OSError is printed as one line and is the code 1.

    Returns:
        The work's exit code; 128 + signal where a signal ended the work or this process was asked to stop.
    """
    become_subreaper()
    raise_on_stop_signals()
    front = os.getpid()
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            code = _work(work, front)
        finally:
            os._exit(code)  # the caller goes on in the front process alone
    try:
        code = exit_code(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    except Stopped as stopped:
        code = stopped.exit_code
        _signal(worker, stopped.signum)
        os.waitpid(worker, 0)
    finally:
        ignore_stop_signals()
        end_descendants()
    return code


def _work(work: Callable[[], int], front: int) -> int:
    os.setsid()  # Ctrl-C in the terminal reaches the front process alone, which ends the rest in order
    become_subreaper()
    end_with_parent(front)
    try:
        return work()
    except Stopped as stopped:
        return stopped.exit_code
    except (LaunchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()  # this process ends without the interpreter's own report
        return 1
    finally:
        ignore_stop_signals()
        end_descendants()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def end_with_parent(parent: int) -> None:
    """Let the kernel send this process SIGTERM when its parent ends, however that ends.

    Args:
        parent: the parent's process id; if it has ended already, the signal is sent now.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def exit_code(returncode: int) -> int:
    """What a shell reports for a `returncode` of subprocess, where a signal is a negative number."""
    return returncode if returncode >= 0 else 128 - returncode


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file, which the kernel releases when this process and its forks have ended.

    Args:
        path: the lock file; it and its folder are made. It stays: a file that is removed could be locked twice.
        what: what only one launch may do at a time, for the message.

    Raises:
        LaunchError: another process holds it; it is not waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise LaunchError(f"{what}: {holder} does that now (lock file {path})") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def become_subreaper() -> None:
    """From here on this process inherits the orphans below it, so that its descendants are all that it started."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(grace: float = MAX_STOP_SECONDS) -> None:
    """End every process below this one: first its own shutdown, then what is left, then by force.

    Python's resource trackers ignore SIGTERM and are killed last: they remove what the others left in /dev/shm.

    Args:
        grace: seconds that a process has after SIGTERM.
    """
    for number, seconds, spared in (
        (signal.SIGTERM, grace, b""),
        (signal.SIGKILL, MAX_STOP_SECONDS, RESOURCE_TRACKER),
        (0, TRACKER_SECONDS, b""),  # is no signal: they end by themselves once all that used them has ended
        (signal.SIGKILL, MAX_STOP_SECONDS, b""),
    ):
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while pids := {pid for pid in _descendants() if not spared or spared not in _command_line(pid)}:
            for pid in pids - signalled:
                _signal(pid, number)
            # A process that is killed can have started another since the list was made: look until none is left.
            signalled = set() if number == signal.SIGKILL else signalled | pids
            _reap()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> Iterator[int]:
    """The processes below this one, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            # The name of a process stands in parentheses and may hold any character, so count from the last one.
            state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        children.setdefault(int(parent), []).append(int(entry.name) if state != "Z" else -int(entry.name))
    pending = [os.getpid()]
    while pending:
        for pid in children.get(pending.pop(), []):
            pending.append(abs(pid))
            if pid > 0:
                yield pid
