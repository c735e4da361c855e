"""What ends a run: too many infrastructure errors, or an error that no further episode can escape.

Contract: `count` is called once for every episode that was not aborted, from any thread, and raises TooManyFailures
when going on would waste the run. `ends_the_run` wraps what vime calls, so that an exception which leaves the plugin
ends the run also where nobody awaits the task in which it was raised.

Where exceptions go. vime's synchronous rollout and its evaluation await the tasks of `generate`: an exception reaches
the driver by itself. The fully asynchronous rollout runs them in a worker thread, whose callback logs an exception and
drops the group: the rollout function waits for ever on a queue that nobody fills. `generate` cannot raise there. So
the cause is put at the head of that queue in the place of a group, and is raised in the rollout function as it unpacks
it: in the main thread of the Ray actor, from where it reaches the driver as any other exception does.

A rollout function of the user's own may drop exceptions as well, on a loop whose other end is not known here, so that
nothing can be raised there from inside `generate`. The next best is done: if in a Ray actor a loop that is not vime's
raises once more MAX_SWALLOWED_SECONDS after it raised first, the exception was dropped, and the actor's process ends
with the cause as its last log line. The driver then sees that the actor died.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 64  # episodes
# A small batch fills the window slowly, and each round of a dead engine lasts a minute: so losing all of them is
# enough. The seconds, because one worker of the sandbox that dies takes many calls with it at once.
MAX_LOST_IN_A_ROW = 16
MIN_SECONDS_IN_A_ROW = 4.0
MAX_SWALLOWED_SECONDS = 10.0


class TooManyFailures(RuntimeError):
    """So many episodes were lost to infrastructure errors that going on would waste the run."""


# ---------------------------------------------------------------------------------------------------------------------
# Infrastructure errors
# ---------------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_recent: collections.deque[bool] = collections.deque(maxlen=FAILURE_WINDOW)
_in_a_row: list[float] = []  # when each episode was lost since the last one that was not


def count(failure: Exception | None, max_rate: float, in_a_row_only: bool = False) -> None:
    """Take in how an episode ended.

    Args:
        failure: the infrastructure error that it was lost to, None if it was not.
        max_rate: the share of the last episodes that may be lost; 1 means all of them may.
        in_a_row_only: whether it counts only as long as all are lost, for some time: an update of the weights may cost
            every request that is under way at that moment.

    Raises:
        TooManyFailures: more were lost, or all for some time; the message ends with the last cause.
    """
    with _lock:
        _recent.append(failure is not None and not in_a_row_only)
        if failure is None:
            _in_a_row.clear()
            return
        _in_a_row.append(time.monotonic())
        lost, row, seconds = sum(_recent), len(_in_a_row), _in_a_row[-1] - _in_a_row[0]
        reason = None
        if lost > max_rate * FAILURE_WINDOW:
            reason = f"{lost} of the last {FAILURE_WINDOW} rollouts were"
        elif max_rate < 1 and row >= MAX_LOST_IN_A_ROW and seconds >= MIN_SECONDS_IN_A_ROW:
            reason = f"all of the last {row} rollouts were"
        if reason:
            _recent.clear()
            raise TooManyFailures(
                f"{reason} lost to infrastructure errors of the engine or the sandbox, the last to: {failure}"
            ) from failure
    logger.warning("a rollout is lost and will not be trained on: %s", failure)


# ---------------------------------------------------------------------------------------------------------------------
# The end of the run
# ---------------------------------------------------------------------------------------------------------------------


class PoisonPill:
    """Stands in the queue of finished groups; whoever unpacks it as one gets the cause raised."""

    def __init__(self, worker: Any, cause: Exception):
        self.worker, self.cause, self.queued = worker, cause, False

    def __iter__(self) -> NoReturn:
        self.queued = False
        raise self.cause


_end: PoisonPill | None = None
_raised: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, float] = weakref.WeakKeyDictionary()


Rollout = Callable[..., Awaitable[Any]]


def ends_the_run(*, gives_sample_back: bool = False) -> Callable[[Rollout], Rollout]:
    """Let what a coroutine function of vime's signature (args, sample, ...) raises end the run, in every mode of vime.

    Args:
        gives_sample_back: whether the sample is returned as an aborted one where the rollout function gets the cause
            from elsewhere: then its group goes back to the data buffer, while one that raises is dropped.
    """

    def decorate(function: Rollout) -> Rollout:
        @functools.wraps(function)
        async def ending(*given: Any, **named: Any) -> Any:
            try:
                raise_if_ended()
                return await function(*given, **named)
            except Exception as error:
                if not (end_run(error) and gives_sample_back):
                    raise
                sample = named["sample"] if "sample" in named else given[1]
                sample.status = sample.Status.ABORTED
                return sample

        return ending

    return decorate


def end_run(cause: Exception) -> bool:
    """Make sure that an exception ends the run. Called on the loop on which it was raised.

    Returns:
        Whether vime's rollout function gets it from here: then raising it as well would only drop a group.
    """
    global _end
    worker = _fully_async_worker()
    if worker is not None:
        with _lock:
            if _end is None or _end.worker is not worker:
                _end = PoisonPill(worker, cause)
            end = _end
        _put_first(worker, end)
        return True
    loop = asyncio.get_running_loop()
    if not _is_vimes(loop) and _in_ray_actor():
        if time.monotonic() - _raised.setdefault(loop, time.monotonic()) > MAX_SWALLOWED_SECONDS:
            _end_process(cause)
    return False


def raise_if_ended() -> None:
    """Raise the cause for which this worker's run was ended, if it was: no episode is to start any more."""
    if _end is not None and _end.worker is _fully_async_worker():
        raise _end.cause


# vime's modules are looked up where they are loaded: nothing else here needs vime.


def _fully_async_worker() -> Any:
    """vime's AsyncRolloutWorker, if this thread is its own."""
    worker = getattr(sys.modules.get("vime.rollout.fully_async_rollout"), "_global_worker", None)
    return worker if getattr(worker, "worker_thread", None) is threading.current_thread() else None


def _is_vimes(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether it is the loop of vime's `run`, which raises what its coroutine raises."""
    vimes = getattr(sys.modules.get("vime.utils.async_utils"), "async_loop", None)
    return getattr(vimes, "loop", None) is loop


def _put_first(worker: Any, end: PoisonPill) -> None:
    """At the head of the queue: after other groups it would wait for a training step."""
    try:
        queue = worker.output_queue
        with queue.mutex:
            if not end.queued:
                end.queued = True
                queue.queue.appendleft(end)
                queue.not_empty.notify()
    except AttributeError:  # a vime whose worker is built in another way: its other end is out of reach
        _end_process(end.cause)


def _in_ray_actor() -> bool:
    """Elsewhere the process is not ours to end: a test, a notebook, a driver that handles what it awaits."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _end_process(cause: Exception) -> NoReturn:
    logging.shutdown()
    traceback.print_exception(cause)
    print(f"{type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # sys.exit would end this thread alone


def forget() -> None:
    """Start anew; for tests."""
    global _end
    with _lock:
        _recent.clear()
        _in_a_row.clear()
        _end = None
    _raised.clear()
