"""vime runs every rollout on one event loop that lives in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import threading


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="rollout-loop").start()
    return loop


def run(coro):
    return asyncio.run_coroutine_threadsafe(coro, _background_loop()).result()
