"""A limit on concurrent calls that holds for the process, on whichever loops and threads they run."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class _Turn:
    """A task in line: what wakes it, and whether it was handed a place."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.granted = loop, False
        self.woken: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        if not self.woken.done():  # cancelled meanwhile: its own handler passes the place on
            self.woken.set_result(None)


class ProcessSemaphore:
    """`async with` like an asyncio.Semaphore, for all loops and threads of the process; first come, first served.

    asyncio's own binds itself to the first loop on which it has to wait.
    """

    def __init__(self, value: int):
        self._value = value
        self.after_fork()

    def after_fork(self) -> None:
        """All places free and nobody in line: in a forked child of the host, whose tasks are the parent's."""
        self._free = self._value
        # Reentrant: a garbage collection may end an abandoned task, which gives its place back, anywhere in here.
        self._lock = threading.RLock()
        self._waiting: deque[_Turn] = deque()

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self._free

    @property
    def waiting(self) -> int:
        """Tasks in line, those of closed loops included."""
        return len(self._waiting)

    def resize(self, value: int) -> None:
        """Allow `value` holders from now on; where more hold a place already, none is handed out until they are
        fewer."""
        with self._lock:
            more, self._value = value - self._value, value
            self._free += more
            for _ in range(min(self._free, len(self._waiting))):
                self._free -= 1
                self._release()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = _Turn(asyncio.get_running_loop())
            self._waiting.append(turn)
        try:
            await turn.woken
        except BaseException:
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                if turn.granted:
                    self._release()
            raise

    async def __aexit__(self, *_exception: object) -> None:
        self._release()

    def _release(self) -> None:
        """Hand the place to the longest waiting task whose loop still runs, else put it back."""
        with self._lock:
            while self._free >= 0 and self._waiting:
                turn = self._waiting.popleft()
                turn.granted = True
                try:
                    turn.loop.call_soon_threadsafe(turn.wake)
                    return
                except RuntimeError:  # that loop was closed with the task still waiting: it may end later, or never
                    turn.granted = False
            self._free += 1
