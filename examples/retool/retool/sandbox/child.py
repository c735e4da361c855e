"""What a child of the worker does with its call: compiles the source, asks the policy, runs it as a notebook cell, and
sends what comes of it.

All that is ever done with the text of a model is done here, under every limit of the call. Runs inside the jail and
uses the standard library alone.
"""

import __future__

import builtins
import codecs
import contextlib
import gc
import importlib
import io
import os
import re
import struct
import sys
import time
import traceback
import types
import warnings
from collections import namedtuple
from signal import ITIMER_PROF, ITIMER_REAL, ITIMER_VIRTUAL, setitimer

import _socket as socket  # its C half alone: less to copy for each child
from retool.sandbox import policy, wire
from retool.sandbox.policy_tables import MAX_RECURSION, NAME_HINTS, STAND_INS
from retool.sandbox.wire import CPU_TIME_UP, DONE, ERRORS, MAX_RECORD_BYTES, NO_MEMORY, OUTPUT, RAISED

CHATTY_RECORDS = 16  # records of a stream after which it is flushed by a timer and no longer at each line
FLUSH_SECONDS = 0.05
RETRY_SECONDS = 0.001  # where the timer met a stream in the middle of a write
# How much later than by its own timer the kernel ends a call that is busy in C and lets no handler run.
GRACE_SECONDS = 0.25
MAX_TRACEBACK_CALLS = 8
MAX_CAUSES = 4  # that are shown of a chain of exceptions, the last ones
MAX_MESSAGE_CHARS = 2000
MAX_LINE_CHARS = 200
SOURCE_NAME = "<code>"

# What `re`, `traceback` and Python itself (for long integers) import late, each in some version. No path can be opened
# then, so it is loaded beforehand.
LATE_MODULES = ["unicodedata", "_sha2", "_pylong", "_colorize", "linecache", "tokenize"]
if sys.version_info >= (3, 12):
    LATE_MODULES.append("typing")  # for type parameters
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
    for name in (*settings.modules, *LATE_MODULES):
        with contextlib.suppress(ImportError):  # not on this Python: the code that imports it is told so
            importlib.import_module(name)
    if settings.libraries:
        load_libraries(settings.libraries)
        seed_in_children()
    for name in LATE_CODECS:
        codecs.lookup(name)
    if not settings.libraries:
        sys.path.clear()  # nothing there can be opened later; the import machinery shall not try
    sys.argv = [""]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # number theory prints long integers; the clock bounds what that costs
    # What the compiler finds odd in a program is no part of what it printed.
    warnings.filterwarnings("ignore", module=re.escape(SOURCE_NAME))
    rehearse()
    sys.setrecursionlimit(sys.getrecursionlimit() + OWN_FRAMES)


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


def seed_in_children() -> None:
    """The generators that libraries hold, as numpy and sympy do. Python seeds that of `random` itself."""
    random, numpy_random = sys.modules["random"], sys.modules.get("numpy.random")
    states = [value for value in gc.get_objects() if issubclass(type(value), random.Random)]

    def seed() -> None:
        for state in states:
            state.seed()
        if numpy_random:  # left to itself, it takes a millisecond to find some
            numpy_random.seed(struct.unpack("=8I", os.urandom(32)))

    os.register_at_fork(after_in_child=seed)


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
    try:
        flush()
    finally:
        os._exit(0)


def limit_time(seconds: float) -> None:
    """End this call when it has used so much processor time: by a handler, which flushes what was printed, and a
    little later by the kernel, where the handler has no chance to run. The host ends one that switches both off."""
    global _cpu_seconds
    _cpu_seconds = seconds
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
        shown.append(f"  line {number}, in {name}\n    {_shorten(text, MAX_LINE_CHARS)}")
    heading = ["Traceback (most recent call last):"] if shown else []
    message = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    message = message.replace(f'  File "{SOURCE_NAME}", line ', "  line ")
    return "\n".join([*heading, *shown, _shorten(message, MAX_MESSAGE_CHARS)])


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for modules of which a part is harmless


class _StandIn(types.ModuleType):
    """Its streams are Python's own, also when they are replaced."""

    def __getattr__(self, name):
        if self.__name__ == "sys" and name in ("stdout", "stderr"):
            return getattr(sys, name)
        hint = NAME_HINTS.get(name) or f"Available: {', '.join(sorted(STAND_INS[self.__name__]))}."
        raise AttributeError(f"'{self.__name__}.{name}' is not available. {hint}")

    def __setattr__(self, name, value):
        if self.__name__ == "sys" and name in ("stdout", "stderr"):
            setattr(sys, name, value)
        else:
            super().__setattr__(name, value)


def stand_ins() -> dict:
    """By name."""
    made = {name: _StandIn(name) for name in STAND_INS}
    kept = {name: getattr(sys, name) for name in STAND_INS["sys"] - {"stdout", "stderr"} if hasattr(sys, name)}
    kept |= {"getrecursionlimit": _recursion_limit, "setrecursionlimit": _set_recursion_limit}
    vars(made["sys"]).update(kept)
    vars(made["timeit"]).update(default_timer=time.perf_counter, timeit=_timeit, repeat=_repeat)
    vars(made["doctest"]).update(testmod=_testmod)
    for name, public in STAND_INS.items():
        vars(made[name])["__all__"] = sorted(public)
    return made


def use_stand_ins(namespace: dict) -> None:
    """For what code in `namespace` imports."""
    modules = stand_ins()

    def import_module(name, names=None, *arguments, **options):
        stand_in = modules.get(name) if names is namespace else None
        return stand_in or _plain_import(name, names, *arguments, **options)

    vars(builtins)["__import__"] = import_module


_plain_import = builtins.__import__
# Below the program's, which are none of its recursion: from the start of the worker to `execute`.
OWN_FRAMES = 7


def _recursion_limit():
    return sys.getrecursionlimit() - OWN_FRAMES


def _set_recursion_limit(limit):
    sys.setrecursionlimit(min(limit, MAX_RECURSION) + OWN_FRAMES)


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


# ---------------------------------------------------------------------------------------------------------------------
# Compiling: a program is one or two statements' codes to execute, and a last expression whose value is shown

FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
MAX_TRIES = 4  # to find where the last statement begins, until the tree is asked


def compile_program(source: str) -> tuple[list, types.CodeType | None]:
    """As a notebook cell, whose last expression is shown: (codes to execute in turn; one to evaluate and show, or
    None).

    It is looked for at the end: the lines from the last one on that could begin a statement are compiled as an
    expression, and what is before them by itself. If both can be compiled, that is where the last statement begins,
    since a line that begins a program of its own after a whole program is not part of another statement.

    Text is compiled, never bytes: those may name an encoding in a comment.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `compile` does for the whole source.
    """
    start = len(source) + 1
    for _ in range(MAX_TRIES):
        start = _last_start(source, start - 1)
        if start < 0:
            break
        if program := _split(source, start):
            return program
    code = _compiled(source, 0, "exec")
    if start < 0:
        empty = all(not line.strip() or line.lstrip().startswith("#") for line in source.split("\n"))
        return [code] * (not empty), None
    import _ast  # only here: the classes of its nodes are a tenth of the memory that each fork would share

    tree = compile(source, SOURCE_NAME, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, _ast.Module)
    *before, last = tree.body
    if not isinstance(last, _ast.Expr):
        return [code], None
    line = 0  # the last on which something else may be
    if before:
        end = before[-1].end_lineno or 0
        line = end if end < last.lineno else before[-1].lineno - 1
    start = sum(len(text) + 1 for text in source.split("\n")[:line])
    return _split(source, start) or ([code], None)


def _last_start(source: str, end: int) -> int:
    """Where the last line begins, of those that begin up to `end`, that could begin a statement; -1: none could."""
    while end >= 0:
        start = source.rfind("\n", 0, end) + 1
        if source[start : start + 1] not in _NO_START:  # an empty one is in any text
            return start
        end = start - 1
    return -1


_NO_START = "# \t\f\n)]}\\"


def _split(source: str, start: int):
    """The program whose last statements begin on the line at `start`; None if no statement begins there."""
    lines = source.count("\n", 0, start)
    try:
        codes, shown = _last_statements(source[start:], lines, 0)
        if not start:
            return codes, shown
        before = _compiled(source[:start], 0, "exec")
        if flags := before.co_flags & FUTURE_FLAGS:
            codes, shown = _last_statements(source[start:], lines, flags)
        return [before, *codes], shown
    except SyntaxError:
        return None


def _last_statements(text: str, lines: int, flags: int):
    try:
        return [], _compiled(text, lines, "eval", flags)
    except SyntaxError:
        pass
    if program := _split_line(text, lines, flags):
        return program
    code = _compiled(text, lines, "exec", flags)
    if "*" in text:  # `*a, b` is no expression to `eval`
        try:
            return [], _compiled(f"({text}\n)", lines, "eval", flags)
        except SyntaxError:
            pass
    return [code], None


def _split_line(text: str, lines: int, flags: int):
    """The program of a line of several simple statements, the last an expression; None of any other text."""
    end = len(text)
    for _ in range(MAX_TRIES):
        end = text.rfind(";", 0, end)
        if end < 0:
            return None
        try:
            _compiled("if 1:" + text[:end], lines, "exec", flags)  # else it may be the body of a compound statement
            shown = _compiled(text[end + 1 :].strip(" \t\f\n\\"), lines + text.count("\n", 0, end), "eval", flags)
            return [_compiled(text[:end], lines, "exec", flags)], shown
        except SyntaxError:
            continue
    return None


def _compiled(text: str, lines: int, mode: str, flags: int = 0):
    """`lines`: how many there are before the text."""
    return compile("\n" * lines + text, SOURCE_NAME, mode, flags, dont_inherit=True)


def describe_syntax(error: SyntaxError, source: str) -> str:
    """As Python shows it; of a long line, what is around the column."""
    lines = source.split("\n")
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    if re.match(r"\s*(?:[%!]\s*\w|%%|\w[\w.]*\?+$)", line[:MAX_LINE_CHARS]):
        return (
            f"line {error.lineno}: {line.strip()[:MAX_LINE_CHARS]!r} is a command of notebooks, which is not available"
            " here, and no Python (SyntaxError). Write plain Python; only the modules that are there can be imported."
        )
    shown = ""
    if line.strip():
        column = max(0, min((error.offset or 1) - 1, len(line)))
        begin = max(len(line) - len(line.lstrip()), min(column - MAX_LINE_CHARS // 2, len(line) - MAX_LINE_CHARS))
        end = begin + MAX_LINE_CHARS
        before, after = "... " * (begin >= MAX_LINE_CHARS // 4), " ..." * (end < len(line))
        width = (error.end_offset or 0) - (error.offset or 0) if error.end_lineno == error.lineno else 1
        marks = "^" * max(1, min(width, end - column))
        shown = f"\n    {before}{line[begin:end].rstrip()}{after}\n    {' ' * (len(before) + column - begin)}{marks}"
    place = f"line {error.lineno}{shown}\n" if error.lineno else ""
    return f"{place}{type(error).__name__}: {_shorten(str(error.msg), MAX_MESSAGE_CHARS)}"


# ---------------------------------------------------------------------------------------------------------------------
# The call


def execute(codes: list, shown: types.CodeType | None, source: str, namespace: dict) -> tuple[bytes, str]:
    """(Letter of the last record, its text)."""
    try:
        for code in codes:
            exec(code, namespace)
        if shown:
            sys.displayhook(eval(shown, namespace))
    except SystemExit as error:
        if error.code not in (None, 0):
            return RAISED, f"SystemExit: {_shorten(str(error.code), MAX_MESSAGE_CHARS)}"
    except MemoryError as error:
        namespace.clear()  # what the code holds may leave no memory to say so
        return NO_MEMORY, describe(error, source)
    except BaseException as error:
        text = describe(error, source)
        if type(error) is NameError:
            text += "\nEvery call starts afresh: define it in this call."
        return RAISED, text
    return DONE, ""


def answer(mode: int, source: str, namespace: dict, allowed: frozenset[str]) -> tuple[bytes, str]:
    """Compile, check and run; `allowed` are the modules that the policy goes by."""
    try:
        codes, shown = compile_program(source)
    except SyntaxError as error:
        return wire.UNREADABLE, describe_syntax(error, source)
    except ValueError as error:
        return wire.UNREADABLE, f"{error}." + (" Remove the null characters." if "\0" in source else "")
    except (RecursionError, MemoryError):
        return wire.UNREADABLE, "the code is nested too deeply. Use a loop or a list."
    if mode == wire.RUN:
        vars(builtins)["__import__"] = _plain_import
    else:
        every = [*codes, shown] if shown else codes
        if refusal := policy.refusal(every, allowed):
            return wire.REFUSED, refusal
    if mode == wire.CHECK:
        return DONE, ""
    if not codes and not shown:
        return wire.EMPTY, ""
    return execute(codes, shown, source, namespace)


def run_call(namespace: dict, allowed: frozenset[str], call: socket.socket) -> None:
    """Read the request from `call`, run it, send the records. The process ends after this."""
    global _call
    _call = call.fileno()
    request = call.recv(wire.MAX_REQUEST_BYTES)
    if not request:
        return  # the host has no use for this child any more
    try:
        mode, seconds = wire.HEADER.unpack_from(request)
        limit_time(seconds)
        letter, text = answer(mode, request[wire.HEADER.size :].decode(), namespace, allowed)
    except MemoryError:
        letter, text = NO_MEMORY, "MemoryError"
    except BaseException as error:  # the description itself failed, in an exception's own methods for example
        letter, text = RAISED, type(error).__name__
    if letter == NO_MEMORY and time.process_time() >= _cpu_seconds:
        cpu_time_is_up()  # the code had left no memory to call the handler with
    flush()
    os.write(_call, letter + text.encode("utf-8", "backslashreplace")[: MAX_RECORD_BYTES - 1])


def rehearse() -> None:
    """Run some calls in the worker. What Python sets up at a first compilation, and notes down as it runs, each child
    would else do anew, on pages of its own: a short call would cost twice as much."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(20):  # more than the times after which Python makes an instruction special
        ours.send(wire.request(wire.CHECK_AND_RUN, 1000, "import math\nx = [n for n in range(3)]\nprint(math.pi)"))
        run_call({}, frozenset({"math"}), theirs)
        while ours.recv(MAX_RECORD_BYTES)[:1] == OUTPUT:
            pass
        RECORDS[0].count = 0
    for end in (ours, theirs):
        end.close()
    for timer in (ITIMER_PROF, ITIMER_VIRTUAL):
        setitimer(timer, 0)
