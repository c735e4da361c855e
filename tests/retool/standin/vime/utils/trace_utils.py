"""vime's spans, kept as a plain list on ``sample.trace``."""

from __future__ import annotations

import time
from contextlib import contextmanager


@contextmanager
def trace_span(target, name, attrs=None):
    span = {"name": name, "attrs": dict(attrs or {}), "start": time.time()}
    target.trace = [*getattr(target, "trace", []), span]
    try:
        yield span
    finally:
        span["end"] = time.time()
