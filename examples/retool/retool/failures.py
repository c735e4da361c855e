"""When infrastructure errors keep coming, the run is stopped: going on would waste it.

Contract: `count` is called once for every episode that was not aborted, from any thread. It raises TooManyFailures once
more than the given share of the last FAILURE_WINDOW episodes of this process was lost.
"""

from __future__ import annotations

import collections
import logging
import threading

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 64  # episodes


class TooManyFailures(RuntimeError):
    """So many episodes were lost to infrastructure errors that going on would waste the run."""


_recent: collections.deque[bool] = collections.deque(maxlen=FAILURE_WINDOW)
_lock = threading.Lock()


def count(failure: Exception | None, max_rate: float) -> None:
    """Take in how an episode ended.

    Args:
        failure: the infrastructure error that it was lost to, None if it was not.
        max_rate: the share of the last episodes that may be lost.

    Raises:
        TooManyFailures: more were lost; the message ends with the last cause.
    """
    with _lock:
        _recent.append(failure is not None)
        lost = sum(_recent)
        if failure is None:
            return
        if lost > max_rate * FAILURE_WINDOW:
            _recent.clear()
            raise TooManyFailures(
                f"{lost} of the last {FAILURE_WINDOW} rollouts were lost to infrastructure errors of the engine or the "
                f"sandbox, the last to: {failure}"
            ) from failure
    logger.warning("a rollout is lost and will not be trained on: %s", failure)


def forget() -> None:
    """Start counting anew; for tests."""
    with _lock:
        _recent.clear()
