"""Review of sources: short ones in the host, long ones in a process of its own, since the parser holds the interpreter.

Contract: `review` gives what `policy.review` gives, without holding the event loop for longer than a short source takes.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import subprocess
import threading

from retool.sandbox import policy
from retool.sandbox.processes import start_python
from retool.sandbox.results import SandboxError

LONG_CODE_CHARS = 1000  # about half a millisecond
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
    return await asyncio.to_thread(REVIEWER.review, code, allowed)


def review_here(code: str, allowed: frozenset[str]) -> policy.Review:
    """The same for callers that have no loop; blocks."""
    return policy.review(code, allowed) if len(code) <= LONG_CODE_CHARS else REVIEWER.review(code, allowed)


class Reviewer:
    """The process, started when first needed. Its methods block, so they are called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

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
            if self._process is None:
                self._process = start_python(policy.__file__, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            answer = self._exchange(self._process, request)
            if not answer.endswith(b"\n"):
                status = self._process.wait()
                self._close()
                if status not in ENDED_BY_SOURCE:
                    raise SandboxError(f"the process that reviews sources ended with exit status {status}")
                problem = "Python's parser crashed on the code. Write it in a simpler way."
                return policy.Review(refusal=problem, unreadable=problem)
        refusal, unreadable, shown, imports = json.loads(answer)
        return policy.Review(refusal, unreadable, tuple(shown), tuple(imports))

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return b""

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process; the next long source starts another."""
        with self._lock:
            self._close()

    def after_fork(self) -> None:
        """In a forked child of the host: the process is the parent's."""
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                # Not closed: a thread that does not exist here may hold the file's own lock for ever.
                with open(os.devnull, "r+b") as nothing:
                    os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)
        self._lock, self._process = threading.Lock(), None


REVIEWER = Reviewer()
atexit.register(REVIEWER.close)
os.register_at_fork(after_in_child=REVIEWER.after_fork)
