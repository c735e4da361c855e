"""Host side of code execution: which code may run, who runs it, what the model is told, and the tools it can call.

    host process (any event loops, in any threads)           |  jail (``retool/sandbox/worker.py``, no privileges)
                                                             |
    ToolRegistry.execute_tool     takes SEMAPHORE, once      |
      PythonSandbox.execute_code  policy on the syntax tree  |
        _Pool -> _Worker          children forked ahead      |
            control socket --------------------------------- | --> worker: confined once, forks, kills, reaps
            call socket: source, records of output --------- | --> child: confined, runs one call, is gone

Contract. Whatever the model's code does is an observation: a text (``ToolOutput``) that says what was printed or went
wrong. Whatever the machinery does wrong is a ``SandboxError``, never an observation, since a model must not be trained
on it. Cancelling the task that awaits a call ends the call at once. Nothing starts at import; workers start at the
first call, are shared by all loops and threads of the process, and end with it, even if it is killed. Linux only.

Invariants. The limit on concurrent calls is taken in ``ToolRegistry.execute_tool`` and nowhere else. No byte from the
jail is trusted: a record is text to show or one of a few letters, and what a call may send, hold and last is bounded
here. The host waits for no process while a loop runs: a call is one socket, and closing it is what kills its child.

Why this way. A fork from a warm worker costs about a millisecond where an interpreter costs ten to forty; children
forked ahead of their calls take even that out of the latency, and get their source from the host alone, so that no
buffer of the worker can keep it. Most of a fork, and of a child's life, is the kernel's: it copies page tables, then
each page that is written to, and takes it all down again. So the worker has loaded little and forks several children in
a row. Sources are compiled in the child, where it costs a tenth of a call, and not in the host: a line of nested
comprehensions crashes the compiler of Python 3.12, and twenty of nested `finally` keep any for seconds.

Landlock and seccomp are some hundred lines over prctl and syscall, since what they need is then built once and only
installed in each child. The packages for them build it where it is installed: measured in forked children on one
machine, pyseccomp 1.6 ms against 0.3, landlock 1.8 ms against 0.1; and pyseccomp needs the library libseccomp. The
package sandlock runs a command for each call, 24 ms where the bare interpreter took 15. All layers together cost a
tenth of a call.
"""

import ast
import asyncio
import atexit
import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import logging
import marshal
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from retool.chat import CODE_INTERPRETER, CODE_TOOL, SYSTEM_PROMPT, neutralize, shorten  # noqa: F401
from retool.sandbox import policy as sandbox_policy

logger = logging.getLogger(__name__)

TOOL_CONFIGS: dict[str, Any] = {
    "max_turns": 20,
    "max_tool_calls": 16,
    "tool_concurrency": 32,
    # Seconds of wall clock: what ends at all ends in a part of this, and a batch waits for its slowest sample.
    "python_timeout": 10.0,
    # What one call may map beside the interpreter. With all calls at their limit it is 32 GB of the machine's memory.
    "python_memory_limit": "1GB",
    # Digits are a token each: 4000 characters are about half of the published response budget of 8192 tokens.
    "max_output_chars": 4000,
    # Of the last episodes, how many may be lost to failures of the engine or the sandbox before the run is stopped.
    "max_failure_rate": 0.5,
}


class SandboxError(RuntimeError):
    """The machinery failed, not the model's code. The call has no observation and must not be trained on."""


class ToolOutput(str):
    """An observation; `outcome` says what it reports.

    "ok", "error" (an exception in the code), "timeout", "memory", "too_long" (ended for printing without end),
    "crashed" (the interpreter died), "refused" (by the source policy), "invalid" (no usable arguments), "not_found".
    """

    outcome: str

    def __new__(cls, text: str, outcome: str = "ok"):
        output = super().__new__(cls, text)
        output.outcome = outcome
        return output


# ---------------------------------------------------------------------------------------------------------------------
# The limit on concurrent calls


class _ProcessSemaphore:
    """`async with` like an asyncio.Semaphore, for all loops and threads of the process; first come, first served.

    asyncio's own binds itself to the first loop on which it has to wait.
    """

    def __init__(self, value: int):
        self._value = value
        self._reset()

    def _reset(self) -> None:
        self._free = self._value
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future]] = deque()

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

    async def __aexit__(self, *_exception) -> None:
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
    def _grant(turn: asyncio.Future) -> None:
        if not turn.done():  # cancelled meanwhile: its own handler passes the place on
            turn.set_result(None)


SEMAPHORE = _ProcessSemaphore(TOOL_CONFIGS["tool_concurrency"])


# ---------------------------------------------------------------------------------------------------------------------
# Processes of our own

WORKER_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "LD_BIND_NOW": "1",  # else each child looks up anew what C functions it calls
    # A pool of threads reserves address space per core, and a call may not start threads.
    **{f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")},
}


def _start_python(*arguments: str, **options) -> subprocess.Popen:
    """An interpreter that sees nothing of the host: no environment, no site, no descriptors, no terminal."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-I", "-S", *arguments]
    try:
        return subprocess.Popen(
            command, cwd="/", env=WORKER_ENVIRONMENT, start_new_session=True, **(streams | options)
        )
    except OSError as error:
        raise SandboxError(f"cannot start {' '.join(command)}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Review of sources: short ones here, long ones in a process of its own, since the parser holds the interpreter

LONG_CODE_CHARS = 1000  # about half a millisecond
ENDED_BY_SOURCE = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}


class _Reviewer:
    """That process, started when first needed. Blocks, so it is called from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def review(self, code: str, allowed: frozenset[str]) -> sandbox_policy.Review:
        """SandboxError: the process failed. If the source crashes it, the source is refused."""
        request = json.dumps({"code": code, "allowed": sorted(allowed)}).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # died since its last source
                self._close()
            if self._process is None:
                self._process = _start_python(sandbox_policy.__file__, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except OSError:
                answer = b""
            if not answer.endswith(b"\n"):
                status = self._process.wait()
                self._close()
                if status not in ENDED_BY_SOURCE:
                    raise SandboxError(f"the process that reviews sources ended with exit status {status}")
                problem = "Python's parser crashed on the code. Write it in a simpler way."
                return sandbox_policy.Review(refusal=problem, unreadable=problem)
        refusal, unreadable, shown, imports = json.loads(answer)
        return sandbox_policy.Review(refusal, unreadable, tuple(shown), tuple(imports))

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        with self._lock:
            self._close()

    def after_fork(self) -> None:
        """In a forked child of the host: the process is the parent's."""
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
            for pipe in (self._process.stdin, self._process.stdout):
                # Not closed: a thread that is gone here may hold the file's own lock for ever.
                with open(os.devnull, "r+b") as nothing:
                    os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)
        self.__init__()


_REVIEWER = _Reviewer()


@functools.lru_cache(maxsize=64)  # one call asks twice; with all calls at once in between
def _review(code: str, allowed: frozenset[str]) -> sandbox_policy.Review:
    if len(code) > LONG_CODE_CHARS:
        return _REVIEWER.review(code, allowed)
    return sandbox_policy.review(code, allowed)


# ---------------------------------------------------------------------------------------------------------------------
# Workers: started when first needed, shared by all loops and threads, replaced when in doubt

WORKER_FILE = Path(sandbox_policy.__file__).with_name("worker.py")
# Imported and not run as a script: modules are kept compiled, and each fork copies what a compiler leaves behind.
WORKER_START = (
    "import sys; sys.path[:0] = sys.argv[1:2]; worker = __import__(sys.argv[2]); del sys.path[0]; worker.main()"
)
START_SECONDS = 60.0
MOST_WORKERS = 5  # two for plain calls, one for each set of libraries imported together; the longest unused one goes
SPARE_CHILDREN = 16  # forked ahead, so that a call does not wait for its fork
FORKS_AT_ONCE = 8  # in a row, since the worker has some ninety pages copied on its way to the next request
# What most calls import. With all of the default set loaded a call is slower by a fifteenth, so calls that need more
# than this have another worker.
COMMON_MODULES = frozenset(
    "__future__ abc bisect cmath collections contextlib copy decimal enum fractions functools heapq itertools math"
    " numbers operator random re statistics string time".split()
)
ALL_MODULES = sandbox_policy.DEFAULT_MODULES | {sandbox_policy.DATE_PARSER}
FIRST_PRIVATE_USER = 1_900_000_000  # above the ranges that distributions and container engines hand out


class _NotStarted(Exception):
    """The call's request was never read, so it can be sent again; the text says why."""


class _WorkerKey(NamedTuple):
    """Calls with the same needs share a worker."""

    all_modules: bool  # or only COMMON_MODULES
    libraries: tuple[str, ...]
    memory_bytes: int
    disabled: tuple[str, ...]


class _Worker:
    """A running worker. Safe in all threads: they share a deque, whose operations are atomic, and a socket that takes
    whole records. Several at once in `fork_ahead` may fork some children more than SPARE_CHILDREN."""

    def __init__(self, process: subprocess.Popen, control: socket.socket):
        self.process, self.control = process, control
        self.spare: deque[socket.socket] = deque()

    def _fork(self, count: int) -> list[socket.socket]:
        """The host's ends of so many calls, or of fewer where descriptors run out; OSError: of none."""
        ours, theirs = [], []
        try:
            for _ in range(count):
                try:
                    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                except OSError:
                    if not ours:
                        raise
                    break
                ours.append(pair[0])
                theirs.append(pair[1])
                pair[0].setblocking(False)
            socket.send_fds(self.control, [b"F"], [end.fileno() for end in theirs])
        except BaseException:
            for end in ours:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
        return ours

    def take(self) -> socket.socket:
        """A call's socket. OSError: the worker is gone, or (EAGAIN and the like) has too much to do."""
        while True:
            try:
                return self.spare.popleft()
            except IndexError:
                self.spare.extend(self._fork(FORKS_AT_ONCE))

    def fork_ahead(self) -> None:
        try:
            while len(self.spare) <= SPARE_CHILDREN - FORKS_AT_ONCE:
                self.spare.extend(self._fork(FORKS_AT_ONCE))
        except OSError:
            pass  # busy, or gone: the next call finds out which

    def is_dead(self) -> bool:
        try:
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the worker; its calls end with it. A spare socket is closed by whoever takes it, here as in a call, or
        with this object, if another thread forks meanwhile."""
        self.control.close()
        with contextlib.suppress(IndexError):
            while True:
                self.spare.popleft().close()
        self.process.kill()
        self.process.wait()


def _start_worker(key: _WorkerKey) -> _Worker:
    """Blocks for some tens of milliseconds, longer with libraries. SandboxError: it did not come up."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        descriptor = theirs.fileno()
        arguments = "-c", WORKER_START, os.fspath(WORKER_FILE.parent), WORKER_FILE.stem, str(descriptor)
        process = _start_python(*arguments, pass_fds=[descriptor])
    except SandboxError:
        ours.close()
        raise
    finally:
        theirs.close()
    worker = _Worker(process, ours)
    try:
        settings = {
            "modules": sorted(ALL_MODULES if key.all_modules else COMMON_MODULES),
            "libraries": key.libraries,
            **_library_paths(key.libraries)._asdict(),
            "memory_bytes": key.memory_bytes,
            "user_id": FIRST_PRIVATE_USER + os.getpid(),
            "disabled": key.disabled,
        }
        ours.settimeout(START_SECONDS)
        ours.send(marshal.dumps(settings))
        _report_layers(_missing_layers(ours.recv(1 << 16)))
        ours.setblocking(False)
        worker.fork_ahead()
    except BaseException as error:
        worker.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox worker failed to start: {error}") from error
        raise
    return worker


def _missing_layers(report: bytes) -> dict[str, str]:
    """Layers and reasons, from the record that a worker starts with. SandboxError: it failed, or makes no sense."""
    try:
        fields = ast.literal_eval(report.decode()) if report else {"failure": "it ended without a word"}
        failure = fields.get("failure")
        if failure is None:
            return {name: str(reason) for name, reason in fields["missing"].items()}
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
        failure = f"it said {report[:200]!r}"
    raise SandboxError(f"the sandbox worker failed to start: {failure}")


class _LibraryPaths(NamedTuple):
    """Where a worker finds its libraries, and what its calls may read of that: no project that a library lies in."""

    paths: list[str]
    readable: list[str]


def _library_paths(libraries: tuple[str, ...]) -> _LibraryPaths:
    if not libraries:
        return _LibraryPaths([], [])
    sites = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    specs = [importlib.util.find_spec(name) for name in libraries]
    packages = [place for spec in specs if spec for place in spec.submodule_search_locations or ()]
    parents = [os.path.dirname(place) for place in packages]
    return _LibraryPaths(list(dict.fromkeys(sites + parents)), list(dict.fromkeys(sites + packages)))


LAYERS = ("namespaces", "user", "capabilities", "no_new_privs", "limits", "landlock", "seccomp")


@functools.cache  # once for each state of affairs, not for each worker
def _log_layers(holding: str, missing: str) -> None:
    logger.log(logging.WARNING if missing else logging.INFO, "sandbox layers: %s%s", holding, missing)


def _report_layers(missing: dict[str, str]) -> None:
    reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
    if missing and os.environ.get("RETOOL_SANDBOX_STRICT") == "1":
        raise SandboxError(f"RETOOL_SANDBOX_STRICT=1 and this machine lacks the sandbox layers: {reasons}")
    _log_layers(", ".join(name for name in LAYERS if name not in missing), reasons and f"; missing: {reasons}")


def _disabled_layers() -> tuple[str, ...]:
    """Layers that tests switch off: RETOOL_SANDBOX_DISABLE=landlock,seccomp and so on, names as in `LAYERS`."""
    return tuple(filter(None, os.environ.get("RETOOL_SANDBOX_DISABLE", "").split(",")))


class _Pool:
    """The process's workers. A future stands for a worker, so that calls on all loops can wait for one start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: OrderedDict[_WorkerKey, concurrent.futures.Future[_Worker]] = OrderedDict()
        self._calls: dict[_Worker, int] = {}

    def _future(self, key: _WorkerKey) -> concurrent.futures.Future:
        with self._lock:
            future = self._workers.get(key)
            if future is None:
                future = self._workers[key] = concurrent.futures.Future()
                threading.Thread(target=self._start, args=(key, future), daemon=True).start()
            self._workers.move_to_end(key)
        return future

    def _start(self, key: _WorkerKey, future: concurrent.futures.Future) -> None:
        try:
            future.set_result(_start_worker(key))
        except BaseException as error:
            with self._lock:
                if self._workers.get(key) is future:
                    del self._workers[key]
            future.set_exception(error)
        self._retire()

    def _retire(self) -> None:
        """End workers over the limit that have no call, those first whose libraries were not needed for longest."""
        with self._lock:
            over = len(self._workers) - MOST_WORKERS
            idle = [
                key for key, future in self._workers.items() if future.done() and not self._calls.get(future.result())
            ]
            retired = [self._workers.pop(key).result() for key in idle[: max(over, 0)]]
        for worker in retired:
            worker.close()

    async def enter(self, key: _WorkerKey) -> _Worker:
        """A worker that will not be retired before `leave`."""
        future = self._future(key)
        worker = future.result() if future.done() else await asyncio.shield(asyncio.wrap_future(future))
        with self._lock:
            self._calls[worker] = self._calls.get(worker, 0) + 1
        return worker

    def leave(self, worker: _Worker) -> None:
        with self._lock:
            self._calls[worker] -= 1
            if not self._calls[worker]:
                del self._calls[worker]

    def discard(self, worker: _Worker) -> None:
        """Replace a worker that is dead or in doubt: the next call starts another."""
        with self._lock:
            for key, future in self._workers.items():
                if future.done() and not future.exception() and future.result() is worker:
                    del self._workers[key]
                    break
            else:
                return
        threading.Thread(target=worker.close, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            futures = list(self._workers.values())
            self._workers.clear()
        for future in futures:
            if future.done() and not future.exception():
                future.result().close()

    def after_fork(self) -> None:
        """In a forked child of the host: the workers are the parent's; nothing here may keep their sockets open."""
        for future in self._workers.values():
            if future.done() and not future.exception():
                worker = future.result()
                worker.process.returncode = 0  # not ours to wait for
                for connection in (worker.control, *worker.spare):
                    connection.close()
        self.__init__()


_POOL = _Pool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.after_fork)
atexit.register(_REVIEWER.close)
os.register_at_fork(after_in_child=_REVIEWER.after_fork)
os.register_at_fork(after_in_child=SEMAPHORE._reset)


# ---------------------------------------------------------------------------------------------------------------------
# One call: send the source, collect records, end the child

RECORD_BYTES = 16384  # the worker's, which never sends more at once
RECORDS_PER_WAKE = 8  # then the loop's other callbacks have their turn
MOST_OUTPUT_BYTES = 16 * 1024**2  # behind this the call is ended
FLUSH_SECONDS = 0.1  # for a call whose time is up, to send what it has buffered
BUSY_SECONDS = 0.01
BUSY_ERRORS = {"EAGAIN", "ETOOMANYREFS", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"}


class _Capture:
    """The beginning and the end of a stream, in bounded memory."""

    def __init__(self, keep: int):
        self.keep, self.size = keep, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self.keep - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.keep:
            del self.tail[: -self.keep]

    def text(self, most: int) -> str:
        """At most `most` characters, among them a note of what is left out between head and tail."""
        dropped = self.size - len(self.head) - len(self.tail)
        if not dropped:
            return shorten((self.head + self.tail).decode("utf-8", "replace").removesuffix("\n"), most)
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return shorten(f"{head}{tail}".removesuffix("\n"), most, also_dropped=dropped)


class _Reply:
    """What has come of a call so far."""

    def __init__(self, keep: int):
        self.output, self.errors = _Capture(keep), _Capture(keep)
        self.final: tuple[str, str] | None = None  # letter and text of the last record
        self.exit_status: int | None = None  # from the worker; negative: the signal
        self.ended = ""  # "timeout" or "too_long", where the host ended it
        self.setup_failure = ""  # of a child that could not confine itself; believed only if the source stayed unread

    def is_complete(self) -> bool:
        return bool(self.ended or self.final or self.exit_status is not None)

    def add(self, record: bytes) -> bool:
        """Take in a record; True where nothing more is of interest."""
        letter, data = record[:1], record[1:]
        if letter == b"o":
            self.output.add(data)
        elif letter in (b"D", b"E", b"M"):
            self.final = letter.decode(), data.decode("utf-8", "replace")
            return True
        elif letter == b"S":
            self.setup_failure = data.decode("utf-8", "replace")
        elif letter == b"X":
            self.exit_status = int(data) if re.fullmatch(rb"-?\d{1,3}", data) else 0
            return True
        else:
            self.errors.add(data)
        if self.output.size + self.errors.size > MOST_OUTPUT_BYTES:
            self.ended = "too_long"
            return True
        return False


def _setup_failure(connection: socket.socket) -> str:
    """What a child said that could not confine itself and ended with its source unread; "" of any other child."""
    reply = _Reply(keep=0)
    for _ in range(2):  # a reset is told once, then what came before it can be read
        with contextlib.suppress(OSError):
            while record := connection.recv(RECORD_BYTES):
                reply.add(record)
    return reply.setup_failure


async def _connect(worker: _Worker, request: bytes) -> socket.socket:
    """A call's socket with the request on it; `_NotStarted` where the worker does not take it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while True:
        try:
            connection = worker.take()
            try:
                connection.send(request)
                return connection
            except BaseException:
                reason = _setup_failure(connection)
                connection.close()
                if reason:  # it could not confine itself, and no other child of this worker could
                    raise _NotStarted(reason) from None
                raise
        except OSError as error:
            its_child_died = isinstance(error, (BrokenPipeError, ConnectionResetError)) and not worker.is_dead()
            busy = errno.errorcode.get(error.errno) in BUSY_ERRORS
            if not (busy or its_child_died) or loop.time() > deadline:
                raise _NotStarted(str(error)) from error
            if busy:
                await asyncio.sleep(BUSY_SECONDS)


async def _converse(connection: socket.socket, reply: _Reply, timeout: float) -> None:
    """Collect what the call sends until it has ended or its time is up, and end it in any case."""
    loop, descriptor = asyncio.get_running_loop(), connection.fileno()
    finished = loop.create_future()

    def finish(error: OSError | None = None) -> None:
        if not finished.done():
            finished.set_result(error)

    def read() -> None:
        try:
            for _ in range(RECORDS_PER_WAKE):
                record = connection.recv(RECORD_BYTES)
                if not record or reply.add(record):
                    return finish()
        except BlockingIOError:
            pass
        except OSError as error:
            finish(error)

    def time_is_up() -> None:
        nonlocal timer
        if _is_unread(connection) and loop.time() < given_up:  # waits for its child: the time has not begun
            timer = loop.call_later(timeout, time_is_up)
            return
        reply.ended = "timeout"
        with contextlib.suppress(OSError):  # its other end is closed already
            connection.shutdown(socket.SHUT_WR)  # tells the child to flush
        timer = loop.call_later(FLUSH_SECONDS, finish)

    given_up = loop.time() + START_SECONDS
    timer = loop.call_later(timeout, time_is_up)
    loop.add_reader(descriptor, read)
    try:
        error = await finished
        if error:
            # A reset: the source was in the socket when its other end was closed.
            raise _NotStarted(reply.setup_failure or _setup_failure(connection) or str(error))
        if reply.ended == "timeout" and _is_unread(connection):
            raise _NotStarted("the worker does not respond")
    finally:
        timer.cancel()
        if not loop.is_closed():
            loop.remove_reader(descriptor)
        _end(connection)


def _is_unread(connection: socket.socket) -> bool:
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0] != 0


def _end(connection: socket.socket) -> None:
    """The worker sees this and kills the call. The shutdown works where a forked process still holds the socket."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # its other end is closed already
    connection.close()


async def _run(key: _WorkerKey, request: bytes, timeout: float, keep: int) -> _Reply:
    """Run the code in a child of its own. SandboxError: it could not be run, or its worker died with it."""
    for attempt in (1, 2):
        worker = await _POOL.enter(key)
        reply = _Reply(keep)
        try:
            connection = await _connect(worker, request)
            worker.fork_ahead()
            await _converse(connection, reply, timeout)
        except _NotStarted as reason:
            if worker.is_dead() or reply.ended == "timeout" or attempt == 2:
                _POOL.discard(worker)
            if attempt == 2:
                raise SandboxError(f"the sandbox could not start the call: {reason}") from reason
            continue
        finally:
            _POOL.leave(worker)
        if not reply.is_complete() and await _is_dying(worker):
            _POOL.discard(worker)
            raise SandboxError("the sandbox worker died during the call")
        return reply
    raise AssertionError("unreachable")


async def _is_dying(worker: _Worker) -> bool:
    """Whether the worker is dead now or soon: its sockets may close one after the other, as its children end."""
    for _ in range(100):
        if worker.is_dead():
            return True
        await asyncio.sleep(BUSY_SECONDS)
    return False


def _ending(reply: _Reply, timeout: float, memory_bytes: int) -> tuple[str, str]:
    """(outcome, what to tell the model about it)."""
    if reply.ended == "timeout":
        return "timeout", f"Error: timed out after {timeout:g} seconds. Use a faster method or a smaller case."
    if reply.ended == "too_long":
        return (
            "too_long",
            f"Error: ended after printing more than {MOST_OUTPUT_BYTES} bytes. Print only what is needed.",
        )
    memory_hint = f"A call may use {memory_bytes // 1024**2} MB. Use less at a time."
    if reply.final:
        letter, text = reply.final
        if letter == "E":
            return "error", f"Error: {text}"
        return ("memory", f"Error: {text}\n{memory_hint}") if letter == "M" else ("ok", "")
    if reply.exit_status == -signal.SIGKILL:
        return "memory", f"Error: MemoryError: the call was killed, out of memory. {memory_hint}"
    if reply.exit_status is not None and reply.exit_status < 0:
        return "crashed", f"Error: the interpreter crashed ({_signal_name(-reply.exit_status)})."
    if reply.exit_status is not None:
        return "crashed", f"Error: the interpreter ended by itself (exit status {reply.exit_status})."
    return "crashed", "Error: the call closed its connection."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _observation(reply: _Reply, timeout: float, memory_bytes: int, most: int) -> ToolOutput:
    """At most `most` characters: first what went wrong, then errors, and the rest for the output."""
    outcome, ending = _ending(reply, timeout, memory_bytes)
    parts = [shorten(ending, most // 2)] if ending else []
    if reply.errors.size:
        parts.insert(0, "Errors:\n" + reply.errors.text(most // 4))
    if reply.output.size:
        rest = most - len("Output:\n") - sum(len(part) + 2 for part in parts)
        parts.insert(0, "Output:\n" + reply.output.text(rest))
    if not parts:
        parts.append("No output. Use print(...) to see a value.")
    return ToolOutput("\n\n".join(parts), outcome)


# ---------------------------------------------------------------------------------------------------------------------
# What the turn loop uses


def _memory_bytes(limit: int | str) -> int:
    """4294967296, "4GB" and "4096 MB" are the same; units are powers of 1024."""
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", limit, re.IGNORECASE)
    if not match:
        raise ValueError(f"memory limit {limit!r} is not a number of bytes, nor one with KB, MB, GB or TB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


class PythonSandbox:
    """Runs model-written Python. `timeout` in seconds of wall clock, `memory_limit` in bytes or as "1GB".

    `allowed_modules` may be widened. A call that imports a module beyond the default set runs under a worker that has
    loaded it, others pay nothing for it. Such a worker may read below the library directories, for late imports, and
    its calls can tell by a path whether a file is there, and its size. A library that evaluates strings, as sympy
    does, gives up the source policy; the jail is the same.
    """

    def __init__(
        self, timeout: float = TOOL_CONFIGS["python_timeout"], memory_limit=TOOL_CONFIGS["python_memory_limit"]
    ):
        self.timeout = float(timeout)
        self.memory_bytes = _memory_bytes(memory_limit)
        self.allowed_modules = set(sandbox_policy.DEFAULT_MODULES)

    def _check_code_safety(self, code: str) -> tuple[bool, str]:
        """(True, "") if the code may run; else (False, what is refused and what may be used instead).

        A syntax error is not a safety matter: nothing runs, and the observation is Python's own message.
        """
        message = self._review(code).refusal
        return not message, message

    def _review(self, code: str) -> sandbox_policy.Review:
        return _review(code, frozenset(self.allowed_modules))

    async def execute_code(self, code: str) -> ToolOutput:
        """The observation for this code. SandboxError: the machinery failed."""
        code = code.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")  # as Python itself reads it
        if len(code) > LONG_CODE_CHARS:
            await asyncio.to_thread(self._review, code)  # what follows finds it done
        most = TOOL_CONFIGS["max_output_chars"]
        safe, message = self._check_code_safety(code)
        if not safe:
            return ToolOutput(shorten(f"Error: not allowed: {message}", most), "refused")
        review = self._review(code)
        if review.unreadable:  # ends here and is never run: what the host cannot read it cannot have checked
            return ToolOutput(f"Error: {review.unreadable}", "error")
        libraries = self._libraries(review.imports)
        packages = {module.split(".")[0] for module in review.imports}
        key = _WorkerKey(
            bool(libraries) or not packages <= COMMON_MODULES, libraries, self.memory_bytes, _disabled_layers()
        )
        draws = bool(libraries) or not packages.isdisjoint(sandbox_policy.RANDOM_MODULES)
        request = b"%d %d %d\n%b" % (*review.shown, draws, code.encode())
        reply = await _run(key, request, self.timeout, keep=4 * most)
        return _observation(reply, self.timeout, self.memory_bytes, most)

    def _libraries(self, imports: tuple[str, ...]) -> tuple[str, ...]:
        """What the code imports beyond what a plain worker has."""
        extra = self.allowed_modules - sandbox_policy.DEFAULT_MODULES
        if not extra:
            return ()
        return tuple(sorted({name.split(".")[0] for name in imports if sandbox_policy.is_allowed(name, extra)}))


ToolHandler = Callable[[dict], Awaitable[str]]


class ToolRegistry:
    """The tools that the model is told of. `tools` holds the specs by name, in the order the prompt shows them."""

    def __init__(self) -> None:
        self.tools: dict[str, dict] = {}
        self._handlers: dict[str, ToolHandler | None] = {}
        self.python_sandbox = PythonSandbox()
        self.register_tool(CODE_TOOL, CODE_INTERPRETER, self._run_code)

    def register_tool(self, name: str, spec: dict, handler: ToolHandler | None = None) -> None:
        """Add or replace a tool. `handler` is awaited with the arguments and returns the observation.

        An exception that it raises is a failure of the machinery (SandboxError), not the model's: what the model did
        wrong, the handler reports in the text it returns. A spec without a handler is shown but answered as not found.
        """
        if spec.get("function", {}).get("name") != name:
            raise ValueError(
                f"tool {name!r} has a spec for {spec.get('function', {}).get('name')!r}: give both one name"
            )
        self.tools[name] = spec
        self._handlers[name] = handler

    def get_tool_specs(self) -> list[dict]:
        return list(self.tools.values())

    async def execute_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """The observation for one call, under the limit on concurrent calls. SandboxError: the machinery failed."""
        async with SEMAPHORE:
            handler = self._handlers.get(name)
            if handler is None:
                known = ", ".join(tool for tool in self.tools if self._handlers[tool])
                return ToolOutput(f"Error: tool {name!r} was not found. Available: {known}.", "not_found")
            if not isinstance(arguments, dict):
                return ToolOutput(f"Error: the arguments of {name!r} must be a JSON object.", "invalid")
            try:
                result = await handler(arguments)
            except SandboxError:
                raise
            except Exception as error:
                raise SandboxError(f"the handler of tool {name!r} failed: {error!r}") from error
            if not isinstance(result, str):
                raise SandboxError(f"the handler of tool {name!r} returned {type(result).__name__}, not a string")
            return result if isinstance(result, ToolOutput) else ToolOutput(result)

    async def _run_code(self, arguments: dict[str, Any]) -> str:
        if "code" not in arguments:
            return ToolOutput('Error: the argument "code" is missing. Put the program into it.', "invalid")
        code = arguments["code"]
        if not isinstance(code, str):
            return ToolOutput(f'Error: the argument "code" must be a string, not {type(code).__name__}.', "invalid")
        if not code.strip():
            return ToolOutput('Error: the argument "code" is empty. Put the program into it.', "invalid")
        return await self.python_sandbox.execute_code(code)


tool_registry = ToolRegistry()
