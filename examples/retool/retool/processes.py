"""What the programs that start servers share: signals that end them in order, free ports, and what a log says last.

Contract: standard library only, since the launch runs before anything of the example is installed. Nothing
here starts or ends a process.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType

LOOPBACK = "127.0.0.1"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_LINE_CHARS = 300  # of a log line that goes into a message of one line
OUT_OF_MEMORY = " (the kernel does that where memory runs out; dmesg says so)"
# "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:7] ", each part of it where it is there
LOG_PREFIX = re.compile(r"^(\([^()]*pid=\d+\) )?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\] )?")
DIED = re.compile(r"(died|exited) unexpectedly")  # of a process below the server, as by a signal: vLLM tells no more
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(:.*)?$")


class Stopped(BaseException):
    """A signal asked this process to stop. Not an Exception, so that no handler for those takes it for one."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell reports for a command that the signal ended."""
        return 128 + self.signum


def raise_on_stop_signals() -> None:
    """From here on SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread, once; later ones are ignored.

    A SIGHUP that is ignored already stays ignored: that is what `nohup` is for.
    """
    for signum in STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _stop)


def ignore_stop_signals() -> None:
    """From here on only the cleanup runs, which a second Ctrl-C must not cut short."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Stop signals that come inside take effect after it, except those that are ignored."""
    held: list[int] = []
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    handlers = {signum: handler for signum, handler in handlers.items() if handler != signal.SIG_IGN}
    for signum in handlers:
        signal.signal(signum, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if held:
        _stop(held[0], None)


def _stop(signum: int, frame: FrameType | None) -> None:
    ignore_stop_signals()
    raise Stopped(signum)


def loopback_directly(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep a proxy of this environment, which cannot reach loopback, out of the way to it."""
    given = {name: environment.get(name) for name in ("no_proxy", "NO_PROXY")}
    return {name: ",".join(filter(None, [value, LOOPBACK, "localhost"])) for name, value in given.items()}


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """Ports on loopback that are free now, no two the same: all sockets are held until the last one is found.

    Args:
        count: how many.
        avoid: ports that may be free but are not to be taken.
    """
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
            if port not in avoid:
                found.append(port)
        return found


def port_is_taken(port: int) -> bool:
    """Whether another program listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def last_log_line(log: Path) -> str:
    """The last line of a log that names an error, else its last line; "" where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()] or [""]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1])[-MAX_LINE_CHARS:]


def why_it_ended(log: Path, code: int) -> str:
    """In one line, why a server ended: the signal that ended it, else the first thing in its log that went wrong.

    Args:
        log: what the server wrote.
        code: its exit code, 128 + signal where a signal ended it.
    """
    if code - 128 in {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}:
        return f"it was ended by {signal.Signals(code - 128).name}{OUT_OF_MEMORY if code == 128 + 9 else ''}"
    error = first_error(log)
    return error + (OUT_OF_MEMORY if DIED.search(error) else "")


def first_error(log: Path) -> str:
    """The first line of a log that tells of a process that died or of an exception, else what it says last.

    The first is the cause: what follows is what others made of it.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    in_traceback = False
    for line in lines:
        words = LOG_PREFIX.sub("", line)
        if DIED.search(words):
            return words.strip()[-MAX_LINE_CHARS:]
        in_traceback = in_traceback or words.startswith("Traceback (most recent call last)")
        if in_traceback and EXCEPTION.match(words):
            return words.strip()[:MAX_LINE_CHARS]
    return last_log_line(log)
