"""What the programs that start servers share: signals that end them in order, free ports, and what a log says last.

Contract: standard library only, since launch/local_ray.py runs before anything of the example is installed. Nothing
here starts or ends a process.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType

LOOPBACK = "127.0.0.1"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_LINE_CHARS = 300  # of a log line that goes into a message of one line


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
