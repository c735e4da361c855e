"""Review of sources: short ones in the host, long ones in a process of its own, since the parser holds the interpreter.

Contract: `review` gives what `policy.review` gives, without holding the event loop for longer than a short source takes.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from retool.sandbox import policy
from retool.sandbox.processes import start_python
from retool.sandbox.results import SandboxError

LONG_CODE_CHARS = 1000  # about half a millisecond
MAX_REVIEW_SECONDS = 20.0  # the longest source takes about one
REVIEWER_START = (
    "-c",
    "import sys; sys.path.insert(0, sys.argv[1]); from retool.sandbox import policy; policy.main()",
    str(Path(__file__).parents[2]),
)
ENDED_BY_SOURCE = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}


async def review(code: str, allowed: frozenset[str]) -> policy.Review:
    """What the host has to know of a source before it runs.

    Args:
        code: the source.
        allowed: the modules that code may import.

    Raises:
        SandboxError: the process that reviews long sources failed, and not because of the source.
    """
    if len(code) <= LONG_CODE_CHARS:
        return policy.review(code, allowed)
    try:
        return await asyncio.to_thread(REVIEWER.review, code, allowed)
    except RuntimeError as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxError(f"no thread to review a source in: {error}") from error


def review_here(code: str, allowed: frozenset[str]) -> policy.Review:
    """The same for callers that have no loop; blocks."""
    return policy.review(code, allowed) if len(code) <= LONG_CODE_CHARS else REVIEWER.review(code, allowed)


class Reviewer:
    """The process, started when first needed. Its methods block, so they are called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # the process's standard input and output

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def review(self, code: str, allowed: frozenset[str]) -> policy.Review:
        """`policy.review`, where a source that crashes the parser is refused.

        Raises:
            SandboxError: the process failed for another reason.
        """
        request = json.dumps({"code": code, "allowed": sorted(allowed)}).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # died since its last source
                self._close()
            try:
                answer = self._exchange(request)
            except TimeoutError:
                self._close()
                message = f"the process that reviews sources did not answer within {MAX_REVIEW_SECONDS:g} seconds"
                raise SandboxError(message) from None
            if not answer.endswith(b"\n"):
                assert self._process
                status = self._process.wait()
                self._close()
                if status not in ENDED_BY_SOURCE:
                    raise SandboxError(f"the process that reviews sources ended with exit status {status}")
                problem = "Python's parser crashed on the code. Write it in a simpler way."
                return policy.Review(refusal=problem, unreadable=problem)
        refusal, unreadable, shown, imports, guarded = json.loads(answer)
        return policy.Review(refusal, unreadable, tuple(shown), tuple(imports), guarded)

    def _exchange(self, request: bytes) -> bytes:
        """Its answer, or as much as it wrote before it died; TimeoutError: it is slower than any source can be."""
        if self._socket is None:
            self._start()
        assert self._socket
        answer = b""
        deadline = time.monotonic() + MAX_REVIEW_SECONDS
        try:
            self._socket.settimeout(MAX_REVIEW_SECONDS)
            self._socket.sendall(request)
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._socket.recv(1 << 16)
                if not part:
                    break
                answer += part
        except TimeoutError:
            raise
        except OSError:
            pass
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = start_python(*REVIEWER_START, stdin=theirs, stdout=theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = ours

    def _close(self) -> None:
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process; the next long source starts another."""
        with self._lock:
            self._close()

    def after_fork(self) -> None:
        """In a forked child of the host: the process is the parent's."""
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        if self._socket is not None:
            self._socket.close()
        self._lock, self._process, self._socket = threading.Lock(), None, None


REVIEWER = Reviewer()
atexit.register(REVIEWER.close)
os.register_at_fork(after_in_child=REVIEWER.after_fork)
