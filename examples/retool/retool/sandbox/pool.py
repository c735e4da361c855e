"""The process's workers: started when first needed, shared by all loops and threads, replaced when in doubt.

A worker (``worker.py``) is confined once and forks a child for each call. The host pre-forks some, so that a call does
not wait for its fork, and keeps their sockets: a call, which the child has, and a leash, which the worker has.

Invariant. A worker has its place in the table and its calls are counted under one lock, so that none is retired while
a call is on its way to it.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import importlib.util
import logging
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from retool.sandbox import wire
from retool.sandbox.policy_tables import COME_WITH, COMMON_MODULES, DEFAULT_MODULES, LATE_IMPORTS
from retool.sandbox.results import SandboxError

logger = logging.getLogger(__name__)

PACKAGE_FOLDER = os.fspath(Path(__file__).parents[2])
# Imported and not run as a script: modules are kept compiled, and each fork copies what a compiler leaves in memory.
WORKER_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from retool.sandbox import worker; del sys.path[0]; worker.main()"
)
ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "LD_BIND_NOW": "1",  # else each child looks up anew what C functions it calls
    # A pool of threads reserves address space per core, and a call may not start threads.
    **{f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")},
}
MAX_START_SECONDS = 60.0
MAX_SEARCHED_CHARS = 8000  # of the longest source in which names of modules are looked for
MAX_WORKERS = 5  # of one sandbox there are two (`worker_keys`); over this the longest unused one goes
PREFORKED_CHILDREN = 16
FORKS_PER_REQUEST = 8  # in a row, since the worker has some ninety pages copied on its way to the next request
FIRST_PRIVATE_USER = 1_900_000_000  # above the ranges that distributions and container engines hand out


class Call(NamedTuple):
    """The host's ends of a call that is not yet running."""

    socket: socket.socket  # to the child
    leash: socket.socket  # to the worker

    def close(self) -> None:
        """The worker sees this and kills the child. The shutdown works where a forked process still holds a socket."""
        for end in self:
            with contextlib.suppress(OSError):  # its other end is closed already
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class WorkerKey(NamedTuple):
    """What a call needs of its worker. Calls with the same needs share one."""

    allowed: tuple[str, ...]  # modules that its programs may import
    modules: tuple[str, ...]  # of the standard library, to be loaded
    libraries: tuple[str, ...]  # others
    memory_bytes: int
    layers_off: tuple[str, ...] = ()  # names as in wire.LAYERS; for tests


@functools.lru_cache(maxsize=64)
def worker_keys(allowed: frozenset[str], memory_bytes: int, layers_off: tuple[str, ...] = ()) -> tuple[WorkerKey, ...]:
    """The workers of a sandbox, each with more loaded than the one before, which its calls pay for: the common
    modules, all allowed ones of the standard library, and all allowed libraries, if there are any."""
    allowed |= {part for library, part in COME_WITH.items() if library in allowed}
    packages = {name.split(".")[0] for name in allowed}
    standard = {name for name in allowed if name.split(".")[0] in sys.stdlib_module_names} | DEFAULT_MODULES
    common, every = tuple(sorted(COMMON_MODULES)), tuple(sorted(standard | {*LATE_IMPORTS.values()}))
    libraries = tuple(sorted(packages - sys.stdlib_module_names))
    needs = [(common, ()), (every, ()), *([(every, libraries)] if libraries else [])]
    return tuple(WorkerKey(tuple(sorted(allowed)), *loaded, memory_bytes, layers_off) for loaded in needs)


def worker_key(keys: tuple[WorkerKey, ...], code: str) -> WorkerKey:
    """The last of `worker_keys` of which a module that the ones before lack is named in this source. That a name may
    be a part of another word only costs that call a larger worker, as does a source that is too long to look for all
    names: on the event loop that would take a millisecond for each."""
    if "import" not in code and code.isascii():  # Python reads look-alike letters
        return keys[0]
    if len(code) > MAX_SEARCHED_CHARS:
        return keys[-1]
    if len(keys) > 2 and any(library in code for library in keys[2].libraries):
        return keys[2]
    return keys[1] if not code.isascii() or any(word in code for word in _words(keys[1].modules)) else keys[0]


@functools.lru_cache(maxsize=64)
def _words(modules: tuple[str, ...]) -> frozenset[str]:
    """By which a source is seen to need what the smallest worker lacks."""
    return frozenset({module.split(".")[0] for module in modules} - COMMON_MODULES | LATE_IMPORTS.keys())


class Worker:
    """A running worker. Safe in all threads: they share a deque, whose operations are atomic, and a socket that takes
    whole records. Several at once in `prefork` may fork some children more than PREFORKED_CHILDREN.

    Attributes:
        missing: layers that do not hold on this machine, and why.
        preforked: calls whose children wait for their source.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket):
        self.process, self.control = process, control
        self.missing: dict[str, str] = {}
        self.preforked: deque[Call] = deque()

    def fork(self, count: int) -> list[Call]:
        """So many calls, or fewer where descriptors run out.

        Raises:
            OSError: there is none.
        """
        calls: list[Call] = []
        theirs: list[socket.socket] = []
        try:
            for _ in range(count):
                try:
                    calls.append(_pairs(theirs))
                except OSError:
                    if not calls:
                        raise
                    break
            socket.send_fds(self.control, [wire.FORK], [end.fileno() for end in theirs])
        except BaseException:
            for call in calls:
                call.close()
            raise
        finally:
            for end in theirs:
                end.close()
        return calls

    def take(self) -> Call:
        """A call whose child waits, or will.

        Raises:
            OSError: the worker is dead, or (EAGAIN and the like) has too much to do.
        """
        while True:
            try:
                return self.preforked.popleft()
            except IndexError:
                self.preforked.extend(self.fork(FORKS_PER_REQUEST))

    def prefork(self) -> None:
        """Have so many children waiting as PREFORKED_CHILDREN says, if the worker takes the request now."""
        try:
            while len(self.preforked) <= PREFORKED_CHILDREN - FORKS_PER_REQUEST:
                self.preforked.extend(self.fork(FORKS_PER_REQUEST))
        except OSError:
            pass  # busy or dead: the next call finds out which

    def is_dead(self) -> bool:
        try:
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the worker; its calls end with it. A waiting child's socket is closed by whoever takes it, here as in a
        call, or with this object, if another thread forks meanwhile."""
        self.control.close()
        with contextlib.suppress(IndexError):
            while True:
                self.preforked.popleft().close()
        self.process.kill()
        self.process.wait()


def _pairs(theirs: list[socket.socket]) -> Call:
    """A new call; the other ends of its sockets are added to `theirs`. OSError: descriptors have run out."""
    call, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        leash, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        call.close()
        child.close()
        raise
    theirs += [child, worker]
    call.setblocking(False)
    leash.setblocking(False)
    return Call(call, leash)


def start_worker(key: WorkerKey) -> Worker:
    """A new worker. Blocks for some tens of milliseconds, longer with libraries.

    It sees nothing of the host: no environment, no site, no descriptor but its own, no terminal. It is told where the
    host's own interpreter finds its shared libraries, if a variable says so: a cluster's module system, or a Python
    that lies where it was not built for, does not start without.

    Raises:
        SandboxError: it did not come up, or lacks a layer where RETOOL_SANDBOX_STRICT=1 asks for all.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-I", "-S", "-c", WORKER_START, PACKAGE_FOLDER, str(theirs.fileno())]
    environment = ENVIRONMENT | {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, cwd="/", env=environment, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    except OSError as error:
        ours.close()
        raise SandboxError(f"cannot start {' '.join(command[:3])}: {error}") from error
    finally:
        theirs.close()
    worker = Worker(process, ours)
    try:
        settings = {
            "modules": key.modules,
            "libraries": key.libraries,
            **_library_paths(key.libraries)._asdict(),
            "memory_bytes": key.memory_bytes,
            "user_id": FIRST_PRIVATE_USER + os.getpid(),
            "layers_off": key.layers_off,
            "allowed": frozenset(key.allowed),
        }
        ours.settimeout(MAX_START_SECONDS)
        ours.send(marshal.dumps(settings))
        worker.missing = _missing_layers(ours.recv(wire.MAX_REQUEST_BYTES))
        _report_layers(worker.missing)
        ours.setblocking(False)
        worker.prefork()
    except BaseException as error:
        worker.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox worker failed to start: {error}") from error
        raise
    return worker


def _missing_layers(report: bytes) -> dict[str, str]:
    """Layers and reasons, from the record that a worker starts with. SandboxError: it failed, or makes no sense."""
    try:
        fields: dict[str, Any] = (
            ast.literal_eval(report.decode()) if report else {"failure": "it ended without a word"}
        )
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
    found = [spec for spec in specs if spec]
    places = [str(place) for spec in found for place in (spec.submodule_search_locations or (spec.origin,))]
    places = [place for place in places if os.path.exists(place)]
    parents = [os.path.dirname(place) for place in places]
    return _LibraryPaths(list(dict.fromkeys(sites + parents)), list(dict.fromkeys(sites + places)))


@functools.cache  # once for each state of affairs, not for each worker
def _log_layers(holding: str, missing: str) -> None:
    logger.log(logging.WARNING if missing else logging.INFO, "sandbox layers: %s%s", holding, missing)


def _report_layers(missing: dict[str, str]) -> None:
    reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
    if missing and os.environ.get("RETOOL_SANDBOX_STRICT") == "1":
        raise SandboxError(f"RETOOL_SANDBOX_STRICT=1 and this machine lacks the sandbox layers: {reasons}")
    _log_layers(", ".join(name for name in wire.LAYERS if name not in missing), reasons and f"; missing: {reasons}")


class _Place:
    """A worker's place in the table: a future, so that calls on all loops can wait for one start, and its calls."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[Worker] = concurrent.futures.Future()
        self.calls = 0

    def worker(self) -> Worker | None:
        """None: it has not started yet, or did not."""
        return self.future.result() if self.future.done() and not self.future.exception() else None


class Pool:
    """The table of workers."""

    def __init__(self) -> None:
        self.after_fork()

    def workers(self) -> list[Worker]:
        """Those that have started, the longest unused one first."""
        with self._lock:
            return [worker for place in self._places.values() if (worker := place.worker())]

    @property
    def calls(self) -> int:
        """Calls that have a place now."""
        with self._lock:
            return sum(place.calls for place in self._places.values())

    @contextlib.asynccontextmanager
    async def worker(self, key: WorkerKey) -> AsyncIterator[Worker]:
        """A worker that is not retired within the block.

        Raises:
            SandboxError: it could not be started.
        """
        place = self._reserve(key)
        try:
            started = place.worker()
            yield started if started else await asyncio.shield(asyncio.wrap_future(place.future))
        finally:
            with self._lock:
                place.calls -= 1

    def start(self, key: WorkerKey) -> None:
        """Have a worker started that the next calls will find; one that does not start, they will be told of."""
        with contextlib.suppress(SandboxError):
            place = self._reserve(key)
            with self._lock:
                place.calls -= 1

    def _reserve(self, key: WorkerKey) -> _Place:
        with self._lock:
            place = self._places.get(key)
            if place is None:
                place = _Place()
                try:
                    threading.Thread(target=self._start, args=(key, place), daemon=True).start()
                except RuntimeError as error:  # no more threads: nobody would ever fill the place
                    raise SandboxError(f"no thread to start a sandbox worker in: {error}") from error
                self._places[key] = place
            self._places.move_to_end(key)
            place.calls += 1
        return place

    def _start(self, key: WorkerKey, place: _Place) -> None:
        try:
            worker = start_worker(key)
        except BaseException as error:
            with self._lock:
                if self._places.get(key) is place:
                    del self._places[key]
            place.future.set_exception(error)
            return
        with self._lock:
            closed = self._places.get(key) is not place
        if closed:
            worker.close()
            place.future.set_exception(SandboxError("the sandbox was shut down"))
        else:
            place.future.set_result(worker)
            self._retire()

    def _retire(self) -> None:
        """End workers over the limit that have no call, those first that were not needed for longest."""
        with self._lock:
            over = len(self._places) - MAX_WORKERS
            idle = [key for key, place in self._places.items() if place.worker() and not place.calls]
            retired = [self._places.pop(key).worker() for key in idle[: max(over, 0)]]
        for worker in retired:
            if worker:
                worker.close()

    def discard(self, worker: Worker) -> None:
        """Replace a worker that is dead or in doubt: the next call starts another."""
        with self._lock:
            for key, place in self._places.items():
                if place.worker() is worker:
                    del self._places[key]
                    break
            else:
                return
        try:
            threading.Thread(target=worker.close, daemon=True).start()
        except RuntimeError:  # no more threads
            worker.close()

    def close(self) -> None:
        """End all workers; the next call starts another."""
        workers = self.workers()
        with self._lock:
            self._places.clear()
        for worker in workers:
            worker.close()

    def after_fork(self) -> None:
        """In a forked child of the host: the workers are the parent's; nothing here may keep their sockets open."""
        for place in getattr(self, "_places", {}).values():
            if worker := place.worker():
                worker.process.returncode = 0  # not ours to wait for
                for end in (worker.control, *(end for call in worker.preforked for end in call)):
                    end.close()
        self._lock = threading.Lock()
        self._places: OrderedDict[WorkerKey, _Place] = OrderedDict()


POOL = Pool()
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.after_fork)
