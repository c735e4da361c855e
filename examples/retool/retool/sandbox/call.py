"""One call: its source goes to a child, its records come back, and the child ends with it.

Contract. Cancelling the task that awaits `run` ends the call at once. What the code does comes back in the `Reply`;
what the sandbox does wrong is a SandboxError. The host waits for no process while a loop runs.

Invariant. Once a child has read its source, whatever it writes, does or leaves undone is an observation: what makes an
infrastructure error comes over the leash, which no child has, or from the kernel.

Time is the call's own: what passes while its process stands ready and waits for a processor does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import socket
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from retool.sandbox import pool, results, wire
from retool.sandbox.pool import POOL, Call, Worker, WorkerKey
from retool.sandbox.results import Reply, SandboxError

RECORDS_PER_WAKE = 8  # then the loop's other callbacks have their turn
# How often its limit a call may stand ready and wait for a processor, until the machine is taken to be overloaded, and
# how long at least: a short limit is soon waited for ten times.
MAX_WAITS = 10
MIN_WAIT_SECONDS = 30.0
# Where the kernel does not tell how long a process waited, it is taken to be at most this part of its time.
UNKNOWN_WAIT = 0.75
LOOK_SECONDS = 0.05  # between two looks at a call that computes or waits for a processor
MAX_FLUSH_SECONDS = 1.0  # for a call whose time is up, to send what it has buffered
MAX_RESPONSE_SECONDS = 30.0  # for its worker, which is as busy as the machine is, to show the call's process
BUSY_SECONDS = 0.01
BUSY_ERRORS = {"EAGAIN", "ETOOMANYREFS", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"}


class _NotStarted(Exception):
    """The call's request was never read, so it can be sent again; the text says why."""


def longest_wait(timeout: float) -> float:
    """Seconds that a call may stand ready and wait for a processor."""
    return max(MAX_WAITS * timeout, MIN_WAIT_SECONDS)


class _Starved(Exception):
    """The call hardly got a processor; the text says for how long."""


async def run(key: WorkerKey, request: bytes, timeout: float, keep: int) -> Reply:
    """Run the code of a request in a child of its own.

    Args:
        key: what it needs of its worker.
        request: as `wire.request` makes it.
        timeout: seconds that the call may use of a processor, sleep, or wait for anything but a processor.
        keep: bytes of the beginning and of the end of each stream.

    Raises:
        SandboxError: it could not be run, its worker died with it, or it hardly got a processor. Each was tried twice,
            but for a worker that died while the code ran.
    """
    for attempt in (1, 2):
        async with POOL.worker(key) as worker:
            try:
                call = await _connect(worker, request)
                worker.prefork()
                conversation = _Conversation(call, Reply(keep), timeout)
                await conversation.run()
                return conversation.reply
            except _NotStarted as reason:
                if worker.is_dead() or attempt == 2 or str(reason) == _NO_ANSWER:
                    POOL.discard(worker)
                if attempt == 2:
                    raise SandboxError(f"the sandbox could not start the call: {reason}") from reason
            except _Starved as reason:
                if attempt == 2:
                    raise SandboxError(f"{reason}: this machine is overloaded") from reason
            except SandboxError:
                POOL.discard(worker)
                raise
    raise AssertionError("unreachable")


_NO_ANSWER = "the worker does not respond"


async def _connect(worker: Worker, request: bytes) -> Call:
    """A call with the request on it; `_NotStarted` where the worker does not take it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + pool.MAX_START_SECONDS
    while True:
        try:
            call = worker.take()
            try:
                call.socket.send(request)
                return call
            except BaseException:
                reason = _not_confined(call)
                call.close()
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


def _not_confined(call: Call) -> str:
    """What a child said that could not confine itself and ended with its source unread; "" of any other child."""
    for _ in range(2):  # a reset is told once, then what came before it can be read
        with contextlib.suppress(OSError):
            while record := call.socket.recv(wire.MAX_RECORD_BYTES):
                if record[:1] == wire.NOT_CONFINED:
                    return record[1:].decode("utf-8", "replace")
    return ""


class _Conversation:
    """What passes between the host and a call from when its source is sent."""

    def __init__(self, call: Call, reply: Reply, timeout: float):
        self.call, self.reply, self.timeout = call, reply, timeout
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.started = time.monotonic()
        self.process: int | None = None  # a descriptor of the child's process
        self.seen = _TimeUsed(0.0, 0.0, 0.0, False)
        self.unmoved_since = 0.0  # of its wall time: when it was last seen before it last ran

    async def run(self) -> None:
        """Collect what the call sends until it has ended or its time is up, and end it in any case."""
        self.timer = self.loop.call_later(self.timeout, self.look)
        self.loop.add_reader(self.call.socket, self.read)
        try:
            await self.finished
        finally:
            self.timer.cancel()
            if not self.loop.is_closed():
                self.loop.remove_reader(self.call.socket)
                self.loop.remove_reader(self.call.leash)
            self.call.close()
            if self.process is not None:
                os.close(self.process)

    def finish(self, error: Exception | None = None) -> None:
        if self.finished.done():
            return
        if error:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(None)

    def wake_in(self, seconds: float, then: Callable[[], None]) -> None:
        self.timer.cancel()
        self.timer = self.loop.call_later(seconds, then)

    def read(self, records: int = RECORDS_PER_WAKE) -> None:
        """Take in some records of the call."""
        try:
            for _ in range(records):
                record = self.call.socket.recv(wire.MAX_RECORD_BYTES)
                if not record:  # closed, by the child or by its end: how it ended, or ends, the worker tells
                    self.loop.remove_reader(self.call.socket)
                    self.loop.add_reader(self.call.leash, self.read_leash)
                    return
                if self.reply.add(record):
                    return self.finish()
        except BlockingIOError:
            pass
        except OSError as error:  # a reset: the source was in the socket when its other end was closed
            self.finish(_NotStarted(_not_confined(self.call) or str(error)))

    def read_leash(self) -> None:
        """The worker's word."""
        try:
            record, descriptors, _, _ = socket.recv_fds(self.call.leash, 64, 1)
        except BlockingIOError:
            return
        except OSError:
            record, descriptors = b"", []
        if record[:1] == wire.LOOK:
            self.process = next(iter(descriptors), None)
            self.judge()
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if not re.fullmatch(rb"X-?\d{1,3}", record):
            return self.finish(SandboxError("the sandbox worker died during the call"))
        self.reply.exit_status = int(record[1:])
        # What it wrote is all there, and nothing is after its end: read it to that.
        self.read(results.MAX_RECORDS)
        self.finish()

    def look(self) -> None:
        """The call's time may be up, by the wall clock."""
        self.read()  # the loop may have been held: what is there counts
        if self.finished.done():
            return
        if _is_unread(self.call):  # no child has read it yet: its time has not begun
            if time.monotonic() - self.started > pool.MAX_START_SECONDS:
                return self.finish(_NotStarted(_NO_ANSWER))
            return self.wake_in(self.timeout, self.look)
        self.loop.add_reader(self.call.leash, self.read_leash)
        with contextlib.suppress(OSError):  # the child has ended: the worker has told, or will
            self.call.leash.send(wire.LOOK)
        self.wake_in(MAX_RESPONSE_SECONDS, self.give_up)

    def give_up(self) -> None:
        self.finish(SandboxError(f"{_NO_ANSWER}, when a call had taken {self.timeout:g} seconds"))

    def judge(self) -> None:
        """Whether the time that was the call's own is up."""
        used = _time_used(self.process, self.started)
        if used is None:  # it has ended: the worker tells how
            return self.wake_in(MAX_RESPONSE_SECONDS, self.give_up)
        # A wait is in the kernel's account when it has ended. One that still lasts began after the call last ran.
        if used.cpu > self.seen.cpu:
            self.unmoved_since = self.seen.wall
        self.seen = used
        waited = used.waited + (used.wall - self.unmoved_since if used.ready else 0.0)
        waited = min(waited, max(used.wall - used.cpu, 0.0))  # the rest was before the child had its source
        own = used.wall - waited
        if own >= self.timeout:
            self.reply.ended, self.reply.cpu_seconds = "timeout", used.cpu
            with contextlib.suppress(OSError):
                self.call.leash.send(wire.TIME_UP)
            self.wake_in(MAX_FLUSH_SECONDS, self.finish)
        elif waited >= longest_wait(self.timeout):
            got = f"a call got {used.cpu:.2f} seconds of processor time in {used.wall:.0f} seconds"
            self.finish(_Starved(got))
        else:
            self.wake_in(LOOK_SECONDS if used.ready else max(self.timeout - own, LOOK_SECONDS), self.judge)


class _TimeUsed(NamedTuple):
    """Of a call, in seconds."""

    wall: float
    cpu: float
    waited: float  # ready to run, for a processor
    ready: bool  # it computes, or waits for a processor now


def _time_used(process: int | None, started: float) -> _TimeUsed | None:
    """None: the process has ended.

    Args:
        process: a descriptor of it, or None where the kernel has none to give.
        started: when the source was sent. A process that was forked later began then.
    """
    wall = time.monotonic() - started
    if process is None:
        return _TimeUsed(wall, 0.0, UNKNOWN_WAIT * wall, False)
    number = _process_number(process)
    if number is None:
        return None
    try:
        cpu, waited, _ = map(int, Path(f"/proc/{number}/schedstat").read_bytes().split())
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None if _process_number(process) is None else _TimeUsed(wall, 0.0, UNKNOWN_WAIT * wall, False)
    lifetime = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if _process_number(process) != number:
        return None
    return _TimeUsed(min(wall, lifetime), cpu / 1e9, waited / 1e9, fields[0] == b"R")


def _process_number(process: int) -> int | None:
    """None: it was reaped."""
    found = re.search(r"^Pid:\t(\d+)$", Path(f"/proc/self/fdinfo/{process}").read_text(), re.M)
    return int(found[1]) if found else None


def _is_unread(call: Call) -> bool:
    return fcntl.ioctl(call.socket, termios.TIOCOUTQ, bytes(4)) != bytes(4)
