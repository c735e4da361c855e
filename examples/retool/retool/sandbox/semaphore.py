"""A limit on concurrent calls that holds for the process, on whichever loops and threads they run."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


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
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self._free

    @property
    def waiting(self) -> int:
        """Tasks in line, those of closed loops included."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            await turn
        except BaseException:
            with self._lock:
                granted = (loop, turn) not in self._waiting
                if not granted:
                    self._waiting.remove((loop, turn))
            if granted:
                self._release()
            raise

    async def __aexit__(self, *_exception: object) -> None:
        self._release()

    def _release(self) -> None:
        """Hand the place to the longest waiting task whose loop still runs, else put it back."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                loop, turn = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(self._grant, turn)
                return
            except RuntimeError:
                continue  # that loop was closed with the task still waiting

    @staticmethod
    def _grant(turn: asyncio.Future[None]) -> None:
        if not turn.done():  # cancelled meanwhile: its own handler passes the place on
            turn.set_result(None)
