"""What a child of the worker does with its call: runs the source as a notebook cell and sends what comes of it.

The worker (``worker.py``) is handed this module. Both run inside the jail, use the standard library alone and import
nothing of the project.

Records of a child: OUTPUT and ERRORS as they come, then one of DONE, RAISED + text (ended with an exception) and
NO_MEMORY + text (ran out of memory).
"""

import builtins
import codecs
import contextlib
import gc
import importlib
import io
import os
import string
import struct
import sys
import time
import traceback
import types
from collections import namedtuple
from functools import partial
from resource import RUSAGE_SELF, getrusage
from signal import ITIMER_PROF, ITIMER_REAL, ITIMER_VIRTUAL, setitimer

import _socket as socket  # its C half alone: see "Speed" in ``worker.py``

# What the host has under the same names in ``wire.py``.
MAX_RECORD_BYTES = 32768
MAX_REQUEST_BYTES = 1 << 16
OUTPUT, ERRORS, DONE, RAISED, NO_MEMORY = b"o", b"e", b"D", b"E", b"M"
CPU_TIME_UP, STARVED = 71, 72
DRAWS, GUARDED = 1, 2

CHATTY_RECORDS = 16  # records of a stream after which it is flushed by a timer and no longer at each line
FLUSH_SECONDS = 0.05
RETRY_SECONDS = 0.001  # where the timer met a stream in the middle of a write
# How much later than by its own timer the kernel ends a call that is busy in C and lets no handler run.
GRACE_SECONDS = 0.25
MAX_TRACEBACK_CALLS = 8
REHEARSALS = 10  # twice over, more than the times after which Python makes an instruction special
MAX_CAUSES = 4  # that are shown of a chain of exceptions, the last ones
MAX_MESSAGE_CHARS = 2000
SOURCE_NAME = "<code>"
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_.[], |")

# What `re`, `random`, `traceback` and Python itself (for long integers) import late, each in some version. No path can
# be opened then, so it is loaded beforehand.
LATE_MODULES = ("unicodedata", "_sha2", "_pylong", "_colorize", "linecache", "tokenize")
LATE_PARTS = {"matplotlib": ("matplotlib.pyplot",)}  # of libraries
LATE_CODECS = (
    "ascii latin-1 utf-8 utf-8-sig utf-16 utf-16-le utf-16-be utf-32 utf-32-le utf-32-be utf-7 cp437 cp1252"
    " unicode_escape raw_unicode_escape punycode".split()
)


# ---------------------------------------------------------------------------------------------------------------------
# Before any call, in the worker


def preload(settings) -> None:
    """Import everything that calls may need, and warm up what is slow when used for the first time.

    `settings`: the worker's.
    """
    sys.stdin, sys.stdout, sys.stderr = None, STDOUT, STDERR
    sys.path.extend(settings.paths)
    import_random()
    for name in (*settings.modules, *LATE_MODULES):
        with contextlib.suppress(ImportError):  # not on this Python: the code that imports it is told so
            importlib.import_module(name)
    if settings.libraries:
        load_libraries(settings.libraries)
    for name in LATE_CODECS:
        codecs.lookup(name)
    if not settings.libraries:
        sys.path.clear()  # nothing there can be opened later; the import machinery shall not try
    sys.argv = [""]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # number theory prints long integers; the clock bounds what that costs
    rehearse(Guards(settings))


def load_libraries(libraries) -> None:
    """With their parts, of which numpy and scipy import some when they are first asked for, and matplotlib one that
    insists on a folder for its cache: libraries have such a folder for as long as they are loaded."""
    import shutil
    import tempfile

    try:
        folder = tempfile.mkdtemp(prefix="retool-cache-")
    except OSError:
        folder = os.devnull  # nothing here can be written to: a library that insists says so
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"), folder)
    os.environ.update(places, MPLBACKEND="agg")
    try:
        for name in libraries:
            for module in (name, *LATE_PARTS.get(name, ())):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            for attribute in dir(sys.modules.get(name)):
                with contextlib.suppress(Exception):  # the library's own matter
                    getattr(sys.modules[name], attribute)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name in places:
            del os.environ[name]


def import_random() -> None:
    """It would have each fork draw a new state from 2500 random bytes, which is 12 of a short call's page faults. `seed`
    does it at a third of the cost, for calls that may draw from it."""
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    try:
        importlib.import_module("random")
    finally:
        os.register_at_fork = register


def random_states() -> list:
    """Every generator that Python code holds, for children to seed."""
    generator = sys.modules["random"].Random
    return [state for state in gc.get_objects() if isinstance(state, generator)]


def seed(states: list) -> None:
    """Give this child random states of its own."""
    for state in states:
        sys.modules["random"].Random.seed(state, int.from_bytes(os.urandom(32), "little"))
    if "numpy.random" in sys.modules:
        numbers = struct.unpack("=8I", os.urandom(32))  # left to itself, numpy takes a millisecond to find some
        sys.modules["numpy.random"].seed(numbers)


# ---------------------------------------------------------------------------------------------------------------------
# Output


class _Records(io.RawIOBase):
    """The raw end of a text stream: each write becomes one record of the call.

    A line is a record of its own, so that it is kept whatever happens next, for the first CHATTY_RECORDS. After them a
    timer sends what there is, also for code that flushes after each line: a record costs the host more than a line.
    """

    stream: io.TextIOWrapper

    def __init__(self, letter: bytes):
        self.letter, self.count = letter, 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        chunk = bytes(data[: MAX_RECORD_BYTES - 1])
        os.write(_call, self.letter + chunk)
        self.count += 1
        if self.count == CHATTY_RECORDS:
            with contextlib.suppress(ValueError):  # the code has detached it
                vars(self.stream)["flush"] = _nothing
                self.stream.reconfigure(line_buffering=False)  # which flushes, but by the name above
            setitimer(ITIMER_REAL, FLUSH_SECONDS, FLUSH_SECONDS)
        return len(chunk)


def _nothing() -> None:
    pass


def _stream(records: _Records) -> io.TextIOWrapper:
    """No class of its own: Python asks such a one at each write, by name, whether it is closed."""
    buffer = io.BufferedWriter(records, MAX_RECORD_BYTES - 1)
    records.stream = io.TextIOWrapper(
        buffer, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True
    )
    return records.stream


# Made once: new stream objects in each child would cost it a tenth of a millisecond.
RECORDS = _Records(OUTPUT), _Records(ERRORS)
STDOUT, STDERR = map(_stream, RECORDS)
_call = -1  # the descriptor of this child's call
_cpu_seconds = float("inf")  # that this call may use
_switches_before = 0  # of this process, to wait for something, before its code ran


def flush(*_signal) -> None:
    for stream in (STDOUT, STDERR):
        try:
            io.TextIOWrapper.flush(stream)
        except RuntimeError:  # called by a handler in the middle of a write
            setitimer(ITIMER_REAL, RETRY_SECONDS, FLUSH_SECONDS)
        except (ValueError, OSError):
            pass  # the code has closed it


def cpu_time_is_up(_number=None, _frame=None) -> None:
    try:
        flush()
    finally:  # also where the code has left no memory to flush with
        os._exit(CPU_TIME_UP)


def wall_time_is_up(_number, _frame) -> None:
    """Says, by its exit status, whether this call waited for the processor alone."""
    status = 0
    try:
        flush()
        status = 0 if getrusage(RUSAGE_SELF).ru_nvcsw > _switches_before else STARVED
    finally:
        os._exit(status)


def limit_time(seconds: float) -> None:
    """End this call when it has used so much processor time: by a handler, which flushes what was printed, and a
    little later by the kernel, where the handler has no chance to run."""
    global _cpu_seconds, _switches_before
    _cpu_seconds = seconds
    _switches_before = getrusage(RUSAGE_SELF).ru_nvcsw
    setitimer(ITIMER_PROF, seconds)
    setitimer(ITIMER_VIRTUAL, seconds + GRACE_SECONDS)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error: BaseException, source: str) -> str:
    """A short traceback in the code's own line numbers, after those of the exceptions that led to it."""
    chain = [error]
    joints = []
    while len(chain) < MAX_CAUSES:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or cause in chain:
            break
        joints.append(
            "The above exception was the direct cause of the following exception:"
            if last.__cause__
            else "During handling of the above exception, another exception occurred:"
        )
        chain.append(cause)
    parts = [describe_one(chain.pop(), source)]
    while chain:
        parts += [joints.pop(), describe_one(chain.pop(), source)]
    return "\n\n".join(parts)


def describe_one(error: BaseException, source: str) -> str:
    """Frames of libraries are left out, deep recursion is cut."""
    lines = source.split("\n")
    calls = [
        (frame.f_code.co_name, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == SOURCE_NAME
    ]
    shown = []
    for position, (name, number) in enumerate(calls):
        if (
            len(calls) > MAX_TRACEBACK_CALLS
            and MAX_TRACEBACK_CALLS // 2 <= position < len(calls) - MAX_TRACEBACK_CALLS // 2
        ):
            if position == MAX_TRACEBACK_CALLS // 2:
                shown.append(f"  ... {len(calls) - 2 * (MAX_TRACEBACK_CALLS // 2)} more calls ...")
            continue
        text = lines[number - 1].strip() if number and number <= len(lines) else ""
        shown.append(f"  line {number}, in {name}\n    {_shorten(text, 200)}")
    heading = ["Traceback (most recent call last):"] if shown else []
    message = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    message = message.replace(f'  File "{SOURCE_NAME}", line ', "  line ")
    return "\n".join([*heading, *shown, _shorten(message, MAX_MESSAGE_CHARS)])


# ---------------------------------------------------------------------------------------------------------------------
# Guards: what the source policy lets through because it is looked at here. Advisory like all of that policy, and put up
# only for a call whose review asks for it, in its own child.


class _Sys(types.ModuleType):
    """A stand-in for `sys`, with what is harmless of it; its streams are Python's own, also when they are replaced."""

    def __getattr__(self, name):
        if name in ("stdout", "stderr"):
            return getattr(sys, name)
        raise AttributeError(f"'sys.{name}' is not available")

    def __setattr__(self, name, value):
        if name in ("stdout", "stderr"):
            setattr(sys, name, value)
        else:
            super().__setattr__(name, value)


class Guards:
    """Made once in the worker, since a child would have to make each object anew."""

    def __init__(self, settings):
        self.forbidden = frozenset(settings.forbidden_attributes)
        self.special = frozenset(settings.special_attributes)
        self.stand_ins = {name: (_Sys if name == "sys" else types.ModuleType)(name) for name in settings.stand_ins}
        public = {name: getattr(sys, name) for name in settings.stand_ins["sys"] if name not in ("stdout", "stderr")}
        if "setrecursionlimit" in public:
            public["setrecursionlimit"] = lambda limit: sys.setrecursionlimit(min(limit, settings.max_recursion))
        vars(self.stand_ins["sys"]).update(public)
        vars(self.stand_ins["timeit"]).update(default_timer=time.perf_counter, timeit=_timeit, repeat=_repeat)
        vars(self.stand_ins["doctest"]).update(testmod=_testmod)
        for name, public_names in settings.stand_ins.items():
            vars(self.stand_ins[name])["__all__"] = public_names
        self.names = {name: partial(_unavailable, name) for name in settings.own_names}
        self.names |= {"getattr": self.getattr, "setattr": self.setattr, "delattr": self.delattr}

    def put_up(self, namespace: dict) -> None:
        """In this child, for code that runs in `namespace`."""
        plain_import = builtins.__import__

        def import_module(name, names=None, *arguments, **options):
            stand_in = self.stand_ins.get(name) if names is namespace else None
            return stand_in or plain_import(name, names, *arguments, **options)

        vars(builtins)["__import__"] = import_module
        namespace.update(self.names)
        if "typing" in sys.modules:
            typing = vars(sys.modules["typing"])
            typing["get_type_hints"] = partial(_type_hints, typing["get_type_hints"])

    def check(self, value, name) -> None:
        if not isinstance(name, str):
            return  # Python's own matter
        special = name.startswith("__") and name.endswith("__") and name not in self.special
        if special or name in self.forbidden or (isinstance(value, types.ModuleType) and name.startswith("_")):
            raise AttributeError(f"the attribute {name!r} is not available")

    def getattr(self, value, name, *default):
        self.check(value, name)
        found = getattr(value, name, *default)
        if isinstance(value, types.ModuleType) and isinstance(found, types.ModuleType):
            raise AttributeError(f"module {name!r}, reached through another, is not available")
        return found

    def setattr(self, target, name, value):
        self.check(target, name)
        setattr(target, name, value)

    def delattr(self, target, name):
        self.check(target, name)
        delattr(target, name)


def _unavailable(name, *_arguments, **_options):
    raise NameError(f"{name!r} is not available before it is assigned")


def _timeit(stmt=None, setup=None, timer=time.perf_counter, number=1_000_000, globals=None):
    for function in (stmt, setup):
        if function is not None and not callable(function):
            raise TypeError("timeit takes functions here, not programs as strings")
    if setup:
        setup()
    started = timer()
    for _ in range(number if stmt else 0):
        stmt()
    return timer() - started


def _repeat(stmt=None, setup=None, timer=time.perf_counter, repeat=5, number=1_000_000, globals=None):
    return [_timeit(stmt, setup, timer, number) for _ in range(repeat)]


TestResults = namedtuple("TestResults", ("failed", "attempted"))


def _testmod(*_arguments, **_options):
    return TestResults(0, 0)


def _type_hints(plain, value, *arguments, **options):
    """For functools.singledispatch, which has annotations evaluated: strings that are more than names stay strings."""
    for annotation in getattr(value, "__annotations__", {}).values():
        if isinstance(annotation, str) and not set(annotation) <= NAME_CHARACTERS:
            raise TypeError(f"the annotation {annotation!r} is not available. Write the type out.")
    return plain(value, *arguments, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The cell


def execute(shown: tuple[int, int], source: bytes, namespace: dict) -> tuple[bytes, str]:
    """Run the code as a notebook cell, which shows a last expression's value: (letter of the last record, its text).

    `shown`: where that expression is. So the child needs no syntax tree, which would take as long to build as all the
    rest of a short call.

    Text is compiled, never bytes: those may name an encoding in a comment, and then be another program than the one
    that the host has checked.
    """
    start, end = shown
    try:
        body = source[:start].rstrip(b" \t\n\\;") if end else source
        program = compile(body.decode(), SOURCE_NAME, "exec", dont_inherit=True)
        value = None
        if end:
            lines_before = b"\n" * source.count(b"\n", 0, start)
            expression = b"%b(%b\n)" % (lines_before, source[start:end])
            value = compile(expression.decode(), SOURCE_NAME, "eval", dont_inherit=True)
        exec(program, namespace)
        if value is not None:
            sys.displayhook(eval(value, namespace))
    except SystemExit as error:
        if error.code not in (None, 0):
            return RAISED, f"SystemExit: {_shorten(str(error.code), MAX_MESSAGE_CHARS)}"
    except MemoryError as error:
        namespace.clear()  # what the code holds may leave no memory to say so
        return NO_MEMORY, describe(error, source.decode())
    except BaseException as error:
        return RAISED, describe(error, source.decode())
    return DONE, ""


_request = bytearray(MAX_REQUEST_BYTES)


def run_call(namespace: dict, random_states: list, guards: Guards, call: socket.socket) -> None:
    """Read the request from `call`, run it, send the records. The process ends after this.

    A request is a line and the source. In the line are the first and the last byte of a last expression whose value is
    to be shown (0 0: there is none), what the call needs (DRAWS, GUARDED), and the milliseconds of processor time that
    it may use.
    """
    global _call
    _call = call.fileno()
    size = call.recv_into(_request)
    if not size:
        return  # the host has no use for this child any more
    try:
        numbers, _, source = bytes(memoryview(_request)[:size]).partition(b"\n")
        start, end, needs, milliseconds = map(int, numbers.split())
        limit_time(milliseconds / 1000)
        if needs & DRAWS:
            seed(random_states)
        if needs & GUARDED:
            guards.put_up(namespace)
        letter, text = execute((start, end), source, namespace)
    except MemoryError:
        letter, text = NO_MEMORY, "MemoryError"
    except BaseException as error:  # the description itself failed, in an exception's own methods for example
        letter, text = RAISED, type(error).__name__
    if letter == NO_MEMORY and time.process_time() >= _cpu_seconds:
        cpu_time_is_up()  # the code had left no memory to call the handler with
    flush()
    os.write(_call, letter + text.encode("utf-8", "backslashreplace")[: MAX_RECORD_BYTES - 1])


def rehearse(guards: Guards) -> None:
    """Run calls here, of which nothing is kept but what Python notes down as it runs: which attribute was found where,
    which of its instructions it made special. Each child would note it anew, on pages of its own: 13 of them, for a short call.
    """
    global _call, _cpu_seconds
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for code in (b"0 0 0 1000000\nprint(*(x for x in range(3)))", b"0 4 0 1000000\nNone") * REHEARSALS:
        ours.send(code)
        run_call({}, [], guards, theirs)
        while ours.recv(MAX_RECORD_BYTES)[:1] != DONE:
            pass
        RECORDS[0].count = 0
    for end in (ours, theirs):
        end.close()
    for timer in (ITIMER_PROF, ITIMER_VIRTUAL):
        setitimer(timer, 0)
    _request[:], _call, _cpu_seconds = bytes(MAX_REQUEST_BYTES), -1, float("inf")
