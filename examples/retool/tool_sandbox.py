"""Host side of code execution: which code may run, who runs it, what the model is told, and the tools it can call.

    host process (any event loops, in any threads)           |  jail (``sandbox_worker.py``, no privileges)
                                                             |
    ToolRegistry.execute_tool     takes SEMAPHORE, once      |
      PythonSandbox.execute_code  policy on the syntax tree  |
        _Pool -> _Worker          children forked ahead      |
            control socket --------------------------------- | --> worker: confined once, forks, kills, reaps
            call socket: source, records of output --------- | --> child: confined, runs one call, is gone

Contract. Whatever the model's code does is an observation: a text (``ToolOutput``) that says what was printed or went
wrong. Whatever the machinery does wrong is a ``SandboxError``, never an observation, since a model must not be trained
on it. Cancelling the task that awaits a call ends the call at once. Nothing starts at import; workers start at the
first call, are shared by all loops and threads of the process, and end with it, even if it is killed.

Invariants. The limit on concurrent calls is taken in ``ToolRegistry.execute_tool`` and nowhere else. No byte from the
jail is trusted: a record is text to show or one of a few letters, and what a call may send, hold and last is bounded
here. The host waits for no process while a loop runs: a call is one socket, and closing it is what kills its child.

Why this way. A fork from a warm worker costs a millisecond where an interpreter costs forty; children forked ahead of
their calls take even that out of the latency, and get their source from the host alone, so that no buffer of the
worker can keep it. Landlock and seccomp are some hundred lines over prctl and syscall: the packages for them
(pyseccomp over libseccomp, landlock, sandlock) bring a shared library that trainer images lack, build their filters in
each child, which halves the rate, or start an interpreter per call (66 calls a second where this gives a thousand).
"""

import ast
import asyncio
import atexit
import concurrent.futures
import errno
import fcntl
import functools
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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

# What the model is told, by SFT and RL alike, so it stands where both can import it without vime. The reward reads the
# box.
SYSTEM_PROMPT = (
    "You are a helpful assistant that solves math problems step by step. Whenever a calculation, a search over cases or a "
    "check would help, call the code_interpreter tool with a short Python program: you are shown what it prints, and "
    "every call starts afresh. When you are sure, end with your final answer on its own line as `Answer: \\boxed{...}`."
)
CODE_TOOL = "code_interpreter"


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
# Policy: which source may run. It reads the syntax tree and never text, and it is the first layer, not the wall.

MAX_CODE_BYTES = 60_000
# Mathematics and what goes with it. None of these gives files, processes or the interpreter away by a public name, but
# for names that are refused below. Not in it: sys, os, io (opens files), types (builds code), inspect, gc, threading.
DEFAULT_MODULES = frozenset(
    "__future__ abc array bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum fractions"
    " functools heapq itertools json math numbers operator pprint random re statistics string textwrap time"
    " typing".split()
)
FORBIDDEN_NAMES = frozenset(
    "eval exec open compile input globals vars locals breakpoint help __import__ __builtins__ __loader__ __spec__"
    " __build_class__".split()
)
READABLE_DUNDERS = frozenset({"__name__", "__qualname__", "__doc__"})
SUPER_DUNDERS_DENIED = frozenset(
    {"__class__", "__dict__", "__getattribute__", "__reduce__", "__reduce_ex__", "__subclasses__"}
)
# Attributes that lead from ordinary objects to frames, code or evaluation of strings.
FORBIDDEN_ATTRIBUTES = frozenset(
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await cr_origin ag_frame ag_code ag_await tb_frame tb_next"
    " f_back f_builtins f_code f_globals f_locals f_trace func_globals func_code"
    " get_type_hints ForwardRef evaluate_forward_ref Formatter vformat get_field".split()
)
# Modules that must not be had through any object's attribute, whether or not the object is known to be a module.
FORBIDDEN_MODULES = frozenset(
    "os sys subprocess builtins importlib ctypes posix socket shutil pickle marshal gc inspect".split()
)
ATTRIBUTE_FUNCTIONS = frozenset({"getattr", "setattr", "delattr", "attrgetter", "methodcaller"})
_SUSPICIOUS_TEXT = re.compile("__|" + "|".join(sorted(FORBIDDEN_ATTRIBUTES)))
_CHILD_FIELDS: dict[type, tuple[str, ...]] = {}  # by class of node: fields that hold nodes, last first


class _Parsed(NamedTuple):
    """What Python's parser made of a source: a tree, or the error that Python would show, or a reason to refuse it."""

    tree: ast.Module | None = None
    error: SyntaxError | None = None
    refusal: str = ""


@functools.lru_cache(maxsize=2)  # policy and execution of one call each want it, one right behind the other
def _parse(code: str) -> _Parsed:
    try:
        if len(code) > MAX_CODE_BYTES or len(code.encode()) > MAX_CODE_BYTES:
            return _Parsed(refusal=f"the code is longer than {MAX_CODE_BYTES} bytes. Use a shorter program.")
        return _Parsed(tree=ast.parse(code, "<code>"))
    except SyntaxError as error:
        return _Parsed(error=error)
    except UnicodeEncodeError:
        return _Parsed(refusal="the code holds characters that are not valid Unicode. Write them as escapes.")
    except ValueError as error:
        return _Parsed(refusal=f"{error}. Remove the null characters.")
    except (RecursionError, MemoryError):
        return _Parsed(refusal="the code is nested too deeply. Use a loop or a list.")


class _Refused(Exception):
    """Carries what is refused and what may be used instead."""


def _walk(*roots: ast.AST) -> Iterator[ast.AST]:
    """All nodes in source order, parents first, without recursion; operators and contexts are left out."""
    stack: list[Any] = list(roots[::-1])
    while stack:
        node = stack.pop()
        kind = node.__class__
        fields = _CHILD_FIELDS.get(kind)
        if fields is None:
            names = getattr(kind, "_fields", ())
            fields = _CHILD_FIELDS[kind] = tuple(name for name in names[::-1] if name not in ("ctx", "op", "ops"))
        if not isinstance(node, ast.AST):
            continue
        yield node
        for name in fields:
            value = getattr(node, name, None)
            if value.__class__ is list:
                stack.extend(value[::-1])
            elif isinstance(value, ast.AST):
                stack.append(value)


def _is_dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def _is_allowed(module: str, allowed: set[str]) -> bool:
    """Whether the module or a package it lies in is allowed; private modules never are."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in allowed for end in range(len(parts))) and not any(
        part.startswith("_") and part not in allowed for part in parts
    )


@functools.cache
def _module_members(module: str) -> dict[str, str]:
    """Modules that a module of the default set gives away as its attributes: {attribute: module}.

    Others are not imported into the host for this; what must not be had through them is refused by name.
    """
    if module not in DEFAULT_MODULES:
        return {}
    members = vars(importlib.import_module(module))
    return {name: member.__name__ for name, member in members.items() if isinstance(member, ModuleType)}


def _member_module(module: str, attribute: str) -> str | None:
    """The module that `module.attribute` is, if it is one."""
    submodule = f"{module}.{attribute}"
    return _module_members(module).get(attribute) or (submodule if submodule in sys.modules else None)


class _PolicyCheck:
    """One pass over a tree; raises `_Refused`. Names bound to modules are followed through imports and assignments."""

    def __init__(self, allowed: set[str]):
        self.allowed = allowed
        self.modules: dict[str, set[str]] = {}  # names: the modules they may stand for
        self.attribute_functions = {name: name for name in ATTRIBUTE_FUNCTIONS}
        self.accepted: set[int] = set()  # ids of function nodes whose call was looked at
        # Checked when all imports are known: assignments of names and attributes to names, and attribute accesses.
        self.assignments: list[tuple[list[str], ast.expr]] = []
        self.module_uses: list[tuple[ast.expr, str]] = []
        self.resolved: dict[int, set[str]] = {}  # by id of an attribute node
        self.dynamic_format = False
        self.suspicious_text = ""

    def run(self, tree: ast.Module) -> None:
        for node in _walk(tree):
            check = self.CHECKS.get(node.__class__)
            if check is not None:
                try:
                    check(self, node)
                except _Refused as refused:
                    raise _Refused(f"line {getattr(node, 'lineno', '?')}: {refused}") from None
        for names, value in self.assignments:
            for name in names:
                self.modules.setdefault(name, set()).update(self.resolve(value))
        for base, attribute in reversed(self.module_uses):  # inner attributes first, so that each is resolved once
            for module in self.resolve(base):
                self.check_member(module, attribute)
        if self.dynamic_format and self.suspicious_text:
            raise _Refused(f"a format string that may read {self.suspicious_text!r}. Use an f-string.")

    # Imports

    def check_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.check_module(alias.name)
            bound, module = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            self.modules.setdefault(bound, set()).add(module)

    def check_import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            raise _Refused("relative imports are not available. Import a module by its name.")
        self.check_module(node.module)
        for alias in node.names:
            self.check_member(node.module, alias.name)
            bound = alias.asname or alias.name
            if alias.name in ATTRIBUTE_FUNCTIONS:
                self.attribute_functions[bound] = alias.name
            member = _module_members(node.module).get(alias.name)
            if member:
                self.modules.setdefault(bound, set()).add(member)

    def check_module(self, module: str) -> None:
        if not _is_allowed(module, self.allowed):
            raise _Refused(f"module {module!r} is not available. Available: {', '.join(sorted(self.allowed))}.")

    def check_member(self, module: str, name: str) -> None:
        """`name` taken out of `module`, by a from-import or as an attribute."""
        if name.startswith("_") and name not in READABLE_DUNDERS:
            raise _Refused(f"{name!r} is private to {module!r}. Use the module's public names.")
        self.check_attribute_name(name)
        member = _module_members(module).get(name)
        if member and not _is_allowed(member, self.allowed):
            raise _Refused(f"module {member!r}, reached through {module!r}, is not available.")

    def resolve(self, node: ast.expr) -> set[str]:
        """The modules that an expression of names and dots may stand for."""
        path = []
        while isinstance(node, ast.Attribute) and id(node) not in self.resolved:
            path.append(node)
            node = node.value
        if isinstance(node, ast.Attribute):
            modules = self.resolved[id(node)]
        else:
            modules = self.modules.get(node.id, set()) if isinstance(node, ast.Name) else set()
        for attribute in reversed(path):
            modules = {member for module in modules if (member := _member_module(module, attribute.attr))}
            self.resolved[id(attribute)] = modules
        return modules

    def check_assign(self, node: ast.Assign | ast.NamedExpr | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and isinstance(node.value, (ast.Name, ast.Attribute)):
            self.assignments.append((names, node.value))
        if isinstance(node, ast.AnnAssign):
            self.check_annotation(node.annotation)

    # Names and attributes

    def check_name(self, node: ast.Name) -> None:
        name = node.id
        if name in FORBIDDEN_NAMES:
            raise _Refused(f"{name!r} is not available, also not as a variable's name.")
        if _is_dunder(name) and isinstance(node.ctx, ast.Load) and name not in READABLE_DUNDERS | {"__debug__"}:
            raise _Refused(f"the special name {name!r} is not available.")
        if name in self.attribute_functions and isinstance(node.ctx, ast.Load) and id(node) not in self.accepted:
            raise _Refused(f"{name!r} can only be called directly, with the attribute's name written out.")

    def check_attribute_name(self, name: str) -> None:
        if name in FORBIDDEN_ATTRIBUTES or name.strip("_") in FORBIDDEN_MODULES - self.allowed:
            raise _Refused(f"the attribute {name!r} is not available.")
        if _is_dunder(name) and name not in READABLE_DUNDERS:
            instead = "type(x)" if name == "__class__" else "operators, built-in functions or super()"
            raise _Refused(f"the special attribute {name!r} is not available. Use {instead}.")

    def check_attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        if id(node) in self.accepted:
            return
        if name in ("attrgetter", "methodcaller"):
            raise _Refused(f"{name!r} can only be called directly, with the attribute's name written out.")
        if name in ("format", "format_map"):
            self.check_format(node.value)
        if not (_is_dunder(name) and self.is_super(node.value) and name not in SUPER_DUNDERS_DENIED):
            self.check_attribute_name(name)
        if isinstance(node.value, (ast.Name, ast.Attribute)):
            self.module_uses.append((node.value, name))

    @staticmethod
    def is_super(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"

    def check_call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            kind = self.attribute_functions.get(function.id)
        elif isinstance(function, ast.Attribute):
            kind = function.attr if function.attr in ("attrgetter", "methodcaller") else None
            if function.attr == "__init__" and isinstance(function.value, ast.Name):
                self.accepted.add(id(function))  # Base.__init__(self)
        else:
            kind = None
        if kind is None:
            return
        named = node.args if kind == "attrgetter" else node.args[:1] if kind == "methodcaller" else node.args[1:2]
        for argument in named:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise _Refused(f"{kind!r} with a computed name. Write the attribute's name out.")
            for part in argument.value.split("."):
                self.check_attribute_name(part)
                if kind == "getattr" and isinstance(node.args[0], (ast.Name, ast.Attribute)):
                    self.module_uses.append((node.args[0], part))
        if named and not any(isinstance(argument, ast.Starred) for argument in node.args):
            self.accepted.add(id(function))

    def check_class_pattern(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self.check_attribute_name(name)

    # Strings that Python evaluates

    def check_format(self, template: ast.expr) -> None:
        if isinstance(template, ast.Constant) and isinstance(template.value, str):
            for field in re.findall(r"\{([^{}!:]*)", template.value):
                for part in re.findall(r"\.(\w+)", field):
                    self.check_attribute_name(part)
        else:
            self.dynamic_format = True

    def check_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value != "__main__" and _SUSPICIOUS_TEXT.search(node.value):
            self.suspicious_text = node.value[:40]

    def check_annotation(self, annotation: ast.expr | None) -> None:
        """Strings in annotations are code to typing and functools: those that call or look into something count."""
        for node in _walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                tree = _parse(node.value).tree
                if tree and any(isinstance(part, (ast.Call, ast.Attribute)) for part in _walk(tree)):
                    _PolicyCheck(self.allowed).run(tree)

    def check_argument(self, node: ast.arg) -> None:
        self.check_annotation(node.annotation)

    def check_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.check_annotation(node.returns)

    CHECKS: dict[type, Callable] = {
        ast.Import: check_import,
        ast.ImportFrom: check_import_from,
        ast.Assign: check_assign,
        ast.AnnAssign: check_assign,
        ast.NamedExpr: check_assign,
        ast.Name: check_name,
        ast.Attribute: check_attribute,
        ast.Call: check_call,
        ast.MatchClass: check_class_pattern,
        ast.Constant: check_constant,
        ast.arg: check_argument,
        ast.FunctionDef: check_function,
        ast.AsyncFunctionDef: check_function,
    }


def _imported_modules(tree: ast.Module) -> set[str]:
    modules = set()
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


# ---------------------------------------------------------------------------------------------------------------------
# Workers: started when first needed, shared by all loops and threads, replaced when in doubt

WORKER_FILE = Path(__file__).with_name("sandbox_worker.py")
START_SECONDS = 60.0
MOST_WORKERS = 4  # each set of libraries that calls import together has its own; the longest unused one goes
SPARE_CHILDREN = 4  # forked ahead, so that a call does not wait for its fork
FIRST_PRIVATE_USER = 1_900_000_000  # above the ranges that distributions and container engines hand out
WORKER_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    # A pool of threads reserves address space per core, and a call may not start threads.
    **{f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")},
}


class _NotStarted(Exception):
    """The call's source was never read, so it can be sent again; the text says why."""


class _WorkerKey(NamedTuple):
    """Calls with the same needs share a worker."""

    libraries: tuple[str, ...]
    memory_bytes: int
    disabled: tuple[str, ...]


class _Worker:
    """A running worker. Safe in all threads: each operation is one system call or one operation on a deque."""

    def __init__(self, process: subprocess.Popen, control: socket.socket):
        self.process, self.control = process, control
        self.spare: deque[socket.socket] = deque()

    def _new_call(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            socket.send_fds(self.control, [b"F"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def take(self) -> socket.socket:
        """A call's socket. OSError: the worker is gone, or (EAGAIN and the like) has too much to do."""
        try:
            return self.spare.popleft()
        except IndexError:
            return self._new_call()

    def fork_ahead(self) -> None:
        try:
            while len(self.spare) < SPARE_CHILDREN:
                self.spare.append(self._new_call())
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
        """End the worker; its calls end with it."""
        for connection in (self.control, *self.spare):
            connection.close()
        self.process.kill()
        self.process.wait()


def _start_worker(key: _WorkerKey) -> _Worker:
    """Blocks for some tens of milliseconds, longer with libraries. SandboxError: it did not come up."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.fspath(WORKER_FILE), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=WORKER_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise SandboxError(f"cannot start {sys.executable} {WORKER_FILE}: {error}") from error
    finally:
        theirs.close()
    worker = _Worker(process, ours)
    try:
        settings = {
            "modules": sorted(DEFAULT_MODULES),
            "libraries": key.libraries,
            "paths": _library_paths(key.libraries),
            "memory_bytes": key.memory_bytes,
            "user_id": FIRST_PRIVATE_USER + os.getpid(),
            "disabled": key.disabled,
        }
        ours.settimeout(START_SECONDS)
        ours.send(json.dumps(settings).encode())
        answer = ours.recv(1 << 16)
        report = json.loads(answer) if answer else {"failure": "it ended without a word"}
        if "failure" in report:
            raise SandboxError(f"the sandbox worker failed to start: {report['failure']}")
        _report_layers(report["missing"])
        ours.setblocking(False)
        worker.fork_ahead()
    except BaseException as error:
        worker.close()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox worker failed to start: {error}") from error
        raise
    return worker


def _library_paths(libraries: tuple[str, ...]) -> list[str]:
    """Directories from which the worker imports the libraries: site directories, and where else they lie."""
    paths = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    for name in libraries:
        spec = importlib.util.find_spec(name.split(".")[0])
        for location in (spec and spec.submodule_search_locations) or ():
            paths.add(os.path.dirname(location))
    return [path for path in dict.fromkeys((*sys.path, *sorted(paths))) if path in paths] if libraries else []


LAYERS = ("namespaces", "user", "capabilities", "no_new_privs", "limits", "landlock", "seccomp")


@functools.cache  # once for each state of affairs, not for each worker
def _log_layers(holding: str, missing: str) -> None:
    logger.log(logging.WARNING if missing else logging.INFO, "sandbox layers: %s%s", holding, missing)


def _report_layers(missing: dict[str, str]) -> None:
    reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
    if missing and os.environ.get("RETOOL_SANDBOX_STRICT") == "1":
        raise SandboxError(f"RETOOL_SANDBOX_STRICT=1 and this machine lacks the sandbox layers: {reasons}")
    _log_layers(", ".join(name for name in LAYERS if name not in missing), reasons and f"; missing: {reasons}")


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
        """At most `most` characters, and a note of what is left out between head and tail."""
        dropped = self.size - len(self.head) - len(self.tail)
        if not dropped:
            text = (self.head + self.tail).decode("utf-8", "replace")
            if len(text) <= most:
                return text
            head, tail, note = text[: most // 2], text[-(most // 2) :], f"{len(text) - 2 * (most // 2)} characters"
        else:
            head = self.head.decode("utf-8", "replace")[: most // 2]
            tail = self.tail.decode("utf-8", "replace")[-(most // 2) :]
            note = f"about {self.size - len(head.encode()) - len(tail.encode())} bytes"
        return f"{head}\n... {note} left out ...\n{tail}"


class _Reply:
    """What has come of a call so far."""

    def __init__(self, keep: int):
        self.output, self.errors = _Capture(keep), _Capture(keep)
        self.final: tuple[str, str] | None = None  # letter and text of the last record
        self.exit_status: int | None = None  # from the worker; negative: the signal
        self.ended = ""  # "timeout" or "too_long", where the host ended it

    def add(self, record: bytes) -> bool:
        """Take in a record; True where nothing more is of interest."""
        letter, data = record[:1], record[1:]
        if letter == b"o":
            self.output.add(data)
        elif letter in (b"D", b"E", b"M"):
            self.final = letter.decode(), data.decode("utf-8", "replace")
            return True
        elif letter == b"X":
            self.exit_status = int(data) if re.fullmatch(rb"-?\d{1,3}", data) else 0
            return True
        else:
            self.errors.add(data)
        if self.output.size + self.errors.size > MOST_OUTPUT_BYTES:
            self.ended = "too_long"
            return True
        return False


async def _connect(worker: _Worker, request: bytes) -> socket.socket:
    """A call's socket with the request on it; `_NotStarted` where the worker does not take it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while True:
        try:
            connection = worker.take()
            try:
                connection.send(request)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            if errno.errorcode.get(error.errno) not in BUSY_ERRORS or loop.time() > deadline:
                raise _NotStarted(str(error)) from error
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
        reply.ended = "timeout"
        connection.shutdown(socket.SHUT_WR)  # tells the child to flush
        timer = loop.call_later(FLUSH_SECONDS, finish)

    timer = loop.call_later(timeout, time_is_up)
    loop.add_reader(descriptor, read)
    try:
        error = await finished
        if error:
            raise _NotStarted(str(error))  # a reset: the source was in the socket when its other end was closed
        if reply.ended == "timeout" and _is_unread(connection):
            raise _NotStarted("the worker did not take the call")
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


def _request(code: str, tree: ast.Module) -> bytes:
    """What a child reads: the first and the last byte of a last expression, whose value it shows; the source."""
    source, start, end = code.encode(), 0, 0
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        start = _position(source, last.lineno, last.col_offset)
        end = _position(source, last.end_lineno, last.end_col_offset)
    return b"%d %d\n%b" % (start, end, source)


def _position(source: bytes, line: int, column: int) -> int:
    position = 0
    for _ in range(line - 1):
        position = source.index(b"\n", position) + 1
    return position + column


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
        if not reply.ended and reply.final is None and reply.exit_status is None and worker.is_dead():
            _POOL.discard(worker)
            raise SandboxError("the sandbox worker died during the call")
        return reply
    raise AssertionError("unreachable")


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
    return "crashed", "Error: the call ended without a result."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _observation(reply: _Reply, timeout: float, memory_bytes: int, most: int) -> ToolOutput:
    outcome, ending = _ending(reply, timeout, memory_bytes)
    parts = []
    if reply.output.size:
        parts.append("Output:\n" + reply.output.text(most).removesuffix("\n"))
    if reply.errors.size:
        parts.append("Errors:\n" + reply.errors.text(most // 4).removesuffix("\n"))
    if ending:
        parts.append(ending)
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
    """Runs model-written Python. `timeout` in seconds of wall clock, `memory_limit` in bytes or as "1GB"."""

    def __init__(
        self, timeout: float = TOOL_CONFIGS["python_timeout"], memory_limit=TOOL_CONFIGS["python_memory_limit"]
    ):
        self.timeout = float(timeout)
        self.memory_bytes = _memory_bytes(memory_limit)
        self.allowed_modules = set(DEFAULT_MODULES)

    def _check_code_safety(self, code: str) -> tuple[bool, str]:
        """(True, "") if the code may run; else (False, what is refused and what may be used instead).

        A syntax error is not a safety matter: nothing runs, and the observation is Python's own message.
        """
        parsed = _parse(code)
        if parsed.tree is None:
            return not parsed.refusal, parsed.refusal
        try:
            _PolicyCheck(self.allowed_modules).run(parsed.tree)
        except _Refused as refused:
            return False, str(refused)
        return True, ""

    async def execute_code(self, code: str) -> ToolOutput:
        """The observation for this code. SandboxError: the machinery failed."""
        code = code.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")  # as Python itself reads it
        safe, message = self._check_code_safety(code)
        if not safe:
            return ToolOutput(f"Error: not allowed: {message}", "refused")
        parsed = _parse(code)
        if parsed.tree is None:  # judged here and never run: what the host cannot read it cannot have checked
            return ToolOutput(f"Error: {_syntax_message(parsed)}", "error")
        libraries = ()
        if not self.allowed_modules <= DEFAULT_MODULES:
            extra = {
                name.split(".")[0]
                for name in _imported_modules(parsed.tree)
                if _is_allowed(name, self.allowed_modules)
            }
            libraries = tuple(sorted(name for name in extra - DEFAULT_MODULES))
        disabled = tuple(filter(None, os.environ.get("RETOOL_SANDBOX_DISABLE", "").split(",")))
        most = TOOL_CONFIGS["max_output_chars"]
        key = _WorkerKey(libraries, self.memory_bytes, disabled)
        reply = await _run(key, _request(code, parsed.tree), self.timeout, keep=4 * most)
        return _observation(reply, self.timeout, self.memory_bytes, most)


def _syntax_message(parsed: _Parsed) -> str:
    if parsed.error is None:
        return parsed.refusal
    lines = traceback.format_exception_only(type(parsed.error), parsed.error)
    return "".join(lines).rstrip("\n").replace('  File "<code>", line ', "  line ")[:2000]


ToolHandler = Callable[[dict], Awaitable[str]]

CODE_INTERPRETER = {
    "type": "function",
    "function": {
        "name": CODE_TOOL,
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}


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
