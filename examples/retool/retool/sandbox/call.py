"""One call: its source goes to a child, its records come back, and the child ends with it.

Contract. Cancelling the task that awaits `run` ends the call at once. What the code does comes back in the `Reply`;
what the sandbox does wrong is a SandboxError. The host waits for no process while a loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import termios

from retool.sandbox import pool, wire
from retool.sandbox.pool import POOL, Worker, WorkerKey
from retool.sandbox.results import Reply, SandboxError

RECORDS_PER_WAKE = 8  # then the loop's other callbacks have their turn
WALL_FACTOR = 4  # how many times its processor time a call may take by the wall clock
MAX_FLUSH_SECONDS = 1.0  # for a call whose time is up by the wall clock, to send what it has buffered
MAX_RESPONSE_SECONDS = 10.0  # for its worker, which is as busy as the machine is, to say what the call has used
# Of its processor time: a call that got less than this until the wall clock's limit, and waited for nothing else, was
# not too slow, the machine was. Small, since calls that would never end share a busy machine with many like them.
STARVED_SHARE = 0.02
BUSY_SECONDS = 0.01
BUSY_ERRORS = {"EAGAIN", "ETOOMANYREFS", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"}


class _NotStarted(Exception):
    """The call's request was never read, so it can be sent again; the text says why."""


async def run(key: WorkerKey, request: bytes, timeout: float, keep: int) -> Reply:
    """Run the code of a request in a child of its own.

    Args:
        key: what it needs of its worker.
        request: as `wire.request` makes it.
        timeout: seconds of processor time, which the child limits by itself; and WALL_FACTOR times as many of wall
            clock, from when it reads its source.
        keep: bytes of the beginning and of the end of each stream.

    Raises:
        SandboxError: it could not be run, its worker died with it, or it hardly got a processor.
    """
    for attempt in (1, 2):
        async with POOL.worker(key) as worker:
            reply = Reply(keep)
            try:
                connection = await _connect(worker, request)
                worker.prefork()
                await _converse(connection, reply, WALL_FACTOR * timeout)
            except _NotStarted as reason:
                if worker.is_dead() or reply.ended == "timeout" or attempt == 2:
                    POOL.discard(worker)
                if attempt == 2:
                    raise SandboxError(f"the sandbox could not start the call: {reason}") from reason
                continue
        if reply.ended == "timeout":
            _check_starvation(reply, timeout)
        if not reply.is_complete() and await _is_dying(worker):
            POOL.discard(worker)
            raise SandboxError("the sandbox worker died during the call")
        return reply
    raise AssertionError("unreachable")


def _check_starvation(reply: Reply, timeout: float) -> None:
    """SandboxError: the call ran into the wall clock's limit because it got no processor."""
    used, limit = reply.cpu_seconds, f"{WALL_FACTOR * timeout:g} seconds"
    if reply.final or (used is None and reply.exit_status is not None):
        return  # it ended at that moment
    if used is None:
        raise SandboxError(f"the sandbox worker did not respond when a call had taken {limit}")
    if used < STARVED_SHARE * timeout and reply.exit_status in (None, wire.STARVED):
        raise SandboxError(f"a call got {used:.2f} seconds of processor time in {limit}: this machine is overloaded")


async def _connect(worker: Worker, request: bytes) -> socket.socket:
    """A call's socket with the request on it; `_NotStarted` where the worker does not take it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + pool.MAX_START_SECONDS
    while True:
        try:
            connection = worker.take()
            try:
                connection.send(request)
                return connection
            except BaseException:
                reason = _not_confined(connection)
                connection.close()
                if reason:  # no other child of this worker could confine itself either
                    raise _NotStarted(reason) from None
                raise
        except OSError as error:
            its_child_died = isinstance(error, (BrokenPipeError, ConnectionResetError)) and not worker.is_dead()
            busy = errno.errorcode.get(error.errno or 0) in BUSY_ERRORS
            if not (busy or its_child_died) or loop.time() > deadline:
                raise _NotStarted(str(error)) from error
            if busy:
                await asyncio.sleep(BUSY_SECONDS)


def _not_confined(connection: socket.socket) -> str:
    """What a child said that could not confine itself and ended with its source unread; "" of any other child."""
    reply = Reply(keep=0)
    for _ in range(2):  # a reset is told once, then what came before it can be read
        with contextlib.suppress(OSError):
            while record := connection.recv(wire.MAX_RECORD_BYTES):
                reply.add(record)
    return reply.not_confined


async def _converse(connection: socket.socket, reply: Reply, wall_seconds: float) -> None:
    """Collect what the call sends until it has ended or its time is up, and end it in any case."""
    loop, descriptor = asyncio.get_running_loop(), connection.fileno()
    finished: asyncio.Future[OSError | None] = loop.create_future()
    given_up = loop.time() + pool.MAX_START_SECONDS

    timer = loop.call_later(wall_seconds, lambda: time_is_up())

    def finish(error: OSError | None = None) -> None:
        if not finished.done():
            finished.set_result(error)

    def read() -> None:
        try:
            for _ in range(RECORDS_PER_WAKE):
                record = connection.recv(wire.MAX_RECORD_BYTES)
                if not record or reply.add(record):
                    return finish()
        except BlockingIOError:
            pass
        except OSError as error:
            finish(error)

    def time_is_up() -> None:
        nonlocal timer
        if _is_unread(connection) and loop.time() < given_up:  # no child has read it yet: the time has not begun
            timer = loop.call_later(wall_seconds, time_is_up)
            return
        reply.ended = "timeout"
        with contextlib.suppress(OSError):  # its other end is closed already
            connection.shutdown(socket.SHUT_WR)  # tells the child to flush and to end
        timer = loop.call_later(MAX_FLUSH_SECONDS, worker_must_respond)

    def worker_must_respond() -> None:
        nonlocal timer
        timer = loop.call_later(0 if reply.cpu_seconds is not None else MAX_RESPONSE_SECONDS, finish)

    loop.add_reader(descriptor, read)
    try:
        error = await finished
        if error:
            # A reset: the source was in the socket when its other end was closed.
            raise _NotStarted(reply.not_confined or _not_confined(connection) or str(error))
        if reply.ended == "timeout" and _is_unread(connection):
            raise _NotStarted("the worker does not respond")
    finally:
        timer.cancel()
        if not loop.is_closed():
            loop.remove_reader(descriptor)
        _end(connection)


def _is_unread(connection: socket.socket) -> bool:
    return fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) != bytes(4)


def _end(connection: socket.socket) -> None:
    """The worker sees this and kills the call. The shutdown works where a forked process still holds the socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # its other end is closed already
    connection.close()


async def _is_dying(worker: Worker) -> bool:
    """Whether the worker is dead now or soon: its sockets may close one after the other, as its children end."""
    for _ in range(100):
        if worker.is_dead():
            return True
        await asyncio.sleep(BUSY_SECONDS)
    return False
