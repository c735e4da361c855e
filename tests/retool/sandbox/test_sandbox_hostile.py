"""Programs that attack the call itself: bombs, floods, forged replies, crashes, refusals to end, traps, and spying.

The source policy is bypassed, all layers are on. Each program runs beside a neighbour that has to come through
unharmed, and beside other programs; it has to end in time with a clear outcome and never as an infrastructure error;
the next call has to work; and no process of any may remain. The bombs are bounded, so that not even a jail without
walls would fell the machine.
"""

import asyncio
import os
import re
import secrets
import time
from typing import NamedTuple

import jail
import pytest
import tool_sandbox
from retool.sandbox.pool import PREFORKED_CHILDREN
from watching import wait_for

pytestmark = pytest.mark.skipif(jail.COLUMN is None, reason="no table of system calls for this machine's architecture")

NEIGHBOUR = """
import time
total = 0
for step in range(20):
    total += sum(range(1000))
    time.sleep(0.01)
print("neighbour", total)
"""
UNHARMED = "Output:\nneighbour 9990000"
LATE_SECONDS = 10.0  # how much later than its limit a call may end on a machine that is busy with other things
ENDS, ENDLESS = 20.0, 0.5  # limits: of programs that end by themselves, and of those that do not


class Hostile(NamedTuple):
    name: str
    outcomes: str  # those that are right, separated by blanks
    code: str
    contains: str = ""  # in the observation
    timeout: float = ENDS


def endless(name: str, code: str, outcomes: str = "timeout", contains: str = "") -> Hostile:
    return Hostile(name, outcomes, code, contains, ENDLESS)


MEMORY = [
    Hostile("memory-one-block", "memory", "x = bytearray(2**40)", "MemoryError"),
    Hostile("memory-blocks", "memory", "x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
    endless("memory-small-objects", "x = []\nwhile True: x.append([0] * 10)", "memory timeout crashed"),
    endless("memory-dictionary", "d = {}\nwhile True: d[len(d)] = str(len(d))", "memory timeout crashed"),
    Hostile("memory-string-doubling", "memory", "s = 'x'\nwhile True: s += s", "MemoryError"),
    Hostile("memory-repetition", "memory", "'x' * 10**12", "MemoryError"),
    endless("memory-huge-integer", "x = 2 ** 10**10\nprint(x.bit_length())", "memory timeout crashed"),
    endless(
        "memory-nested-generators",
        "def g(n):\n    yield from g(n + 1)\nimport sys\nsys.setrecursionlimit(10**9)\nlist(g(0))",
        "memory timeout crashed error",
    ),
    endless(
        "memory-caught-again-and-again",
        "x = []\nwhile True:\n    try: x.append(bytearray(10**6))\n    except MemoryError: pass",
    ),
    endless(
        "memory-caught-in-the-way",
        "x = []\ntry:\n    while True: x.append([])\nexcept MemoryError:\n    while True: pass",
    ),
    Hostile(
        "memory-from-the-c-library",
        "ok",
        """
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = 0
while libc.malloc(10**6): blocks += 1
print(blocks < 300)
""",
        "True",
    ),
    Hostile(
        "memory-shared-mapping",
        "ok",
        """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
pages = 0
while libc.mmap(None, ctypes.c_size_t(10**7), 3, 0x21, -1, ctypes.c_long(0)) != 2**64 - 1: pages += 1
print(pages < 30)
""",
        "True",
    ),
    endless(
        "memory-recursion-in-repr", "x = []\nfor _ in range(10**7): x = [x]\nrepr(x)", "error crashed memory timeout"
    ),
    endless(
        "memory-recursion-of-classes",
        "class A: pass\nwhile True: A = type('A', (A,), {})",
        "memory timeout crashed error",
    ),
]
PROCESSES = [
    Hostile(
        "fork-bomb",
        "ok",
        """
forks = 0
for _ in range(6):
    try:
        os.fork()
        forks += 1
    except OSError: pass
print("forks", forks)
""",
        "forks 0",
    ),
    Hostile(
        "thread-bomb",
        "ok",
        """
import _thread
started = 0
for _ in range(50):
    try:
        _thread.start_new_thread(time.sleep, (1,))
        started += 1
    except RuntimeError: pass
print('started', started)
""",
        "started 0",
    ),
    Hostile(
        "daemon",
        "error",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\nos._exit(0)",
        "PermissionError",
    ),
    Hostile("descriptor-bomb", "error", "while True: os.dup(own_descriptor())", "PermissionError"),
]
FLOODS = [
    endless("flood-print", "while True: print('x' * 10000)", "too_long timeout"),
    endless("flood-short-lines", "while True: print('x')", "too_long timeout"),
    endless("flood-errors", "while True: print('x' * 10000, file=sys.stderr)", "too_long timeout"),
    endless("flood-own-descriptor", "while True: os.write(own_descriptor(), b'o' + b'x' * 16000)", "too_long timeout"),
    endless("flood-of-one-byte-records", "while True: os.write(own_descriptor(), b'o')", "too_long timeout"),
    endless("flood-of-unknown-records", "while True: os.write(own_descriptor(), b'?' * 5000)", "too_long timeout"),
    endless("flood-of-huge-records", "while True: os.write(own_descriptor(), b'o' * 150000)", "too_long timeout"),
    Hostile("flood-in-the-last-expression", "ok error memory too_long", "'x' * 10**8"),
    Hostile("flood-in-an-exception", "error memory", "raise ValueError('x' * 10**7)", "ValueError"),
    Hostile("flood-in-system-exit", "error memory", "raise SystemExit('x' * 10**7)", "SystemExit"),
    Hostile(
        "flood-before-a-crash",
        "crashed too_long",
        "for _ in range(100): os.write(own_descriptor(), b'o' * 16000)\nos._exit(3)",
    ),
]
FORGERIES = [
    Hostile(
        "forged-end", "ok", "print('said', flush=True)\nos.write(own_descriptor(), b'D')\nwhile True: pass", "said"
    ),
    *(
        endless(
            f"forged-word-of-the-worker-{word}",
            f"os.write(own_descriptor(), b'{word}')\nwhile True: pass",
            contains=word[1:],
        )
        for word in ("X0", "X-9", "X72", "T0", "P")
    ),
    endless("forged-failure-to-confine", "os.write(own_descriptor(), b'Sseccomp')\nwhile True: pass"),
    endless(
        "forged-starvation",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nfor word in (b'T0', b'X72', b'X-9'):"
        " os.write(own_descriptor(), word)\ntime.sleep(1.5)\nos._exit(72)",
        contains="slept",
    ),
    Hostile("forged-error", "error", "os.write(own_descriptor(), b'Eforged')\nwhile True: pass", "forged"),
    Hostile("forged-memory-error", "memory", "os.write(own_descriptor(), b'M')\nwhile True: pass"),
    Hostile(
        "forged-end-that-is-no-text",
        "error",
        "os.write(own_descriptor(), b'E' + bytes(range(128, 256)))\nwhile True: pass",
    ),
    Hostile("forged-end-many-times", "ok", "for _ in range(1000): os.write(own_descriptor(), b'D')"),
    Hostile("forged-request", "ok", "os.write(own_descriptor(), b'F')\nprint('still')", "still"),
    endless("forged-empty-record", "_libc.send(own_descriptor(), b'', 0, 0)\nwhile True: pass"),
    Hostile(
        "forged-output-that-is-no-text",
        "ok",
        "os.write(own_descriptor(), b'o' + bytes(range(256)))\nprint('end')",
        "end",
    ),
    Hostile(
        "crash-in-the-middle-of-a-line", "crashed", "sys.stdout.write('half')\nsys.stdout.flush()\nos._exit(0)", "half"
    ),
    Hostile("truncated-character", "ok", "os.write(own_descriptor(), 'oπ'.encode()[:-1])", "\ufffd"),
    Hostile(
        "forged-to-every-descriptor",
        "ok error",
        """
for number in range(1024):
    for record in (b'Eforged', b'D', b'X0', b'oforged'):
        try: os.write(number, record)
        except OSError: pass
""",
    ),
    Hostile(
        "read-of-every-descriptor",
        "ok",
        """
for number in open_descriptors():
    if number != own_descriptor():
        print('read', number, os.read(number, 100))
print('end')
""",
        "Output:\nend",
    ),
    endless("read-of-own-descriptor", "os.read(own_descriptor(), 1000)"),
    Hostile("shut-down-own-socket", "error ok", "print(_libc.shutdown(own_descriptor(), 2))"),
    Hostile("close-own-descriptor", "crashed", "os.close(own_descriptor())\nprint('lost')"),
    Hostile("close-every-descriptor", "crashed", "os.closerange(0, 1024)\nprint('lost')"),
    endless("close-and-go-on", "os.closerange(0, 1024)\nwhile True: pass"),
]
ENDINGS = [
    Hostile("exit-at-once", "crashed", "os._exit(7)", "exit status 7"),
    Hostile("exit-at-once-as-if-well", "crashed", "os._exit(0)", "ended by itself"),
    Hostile("exit-as-if-not-confined", "crashed", "os._exit(70)"),
    Hostile("abort", "crashed", "os.abort()"),
    Hostile("segfault", "crashed", "ctypes.string_at(0)", "SIGSEGV"),
    Hostile("segfault-by-a-jump", "crashed", "ctypes.CFUNCTYPE(None)(1)()", "crashed"),
    Hostile(
        "segfault-by-bytecode",
        "crashed ok error",
        "def f(): pass\nf.__code__ = f.__code__.replace(co_code=b'\\x7c\\xff' * 50, co_nlocals=0)\nf()",
    ),
    endless(
        "segfault-by-recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "crashed memory timeout error",
    ),
    endless(
        "segfault-by-recursion-in-c",
        "sys.setrecursionlimit(10**9)\nclass A: __repr__ = lambda s: repr(s)\nrepr(A())",
        "crashed memory timeout error",
    ),
    endless(
        "segfault-handled", "signal.signal(signal.SIGSEGV, lambda *_: None)\nctypes.string_at(0)", "timeout crashed"
    ),
    Hostile("kill-itself", "error crashed memory", "os.kill(os.getpid(), 9)"),
    Hostile("illegal-system-call", "crashed", "ctypes.CDLL(None).syscall(0x40000000)", "SIGSYS"),
    Hostile("system-exit-text", "error", "sys.exit('reason')", "SystemExit: reason"),
    Hostile("system-exit-well", "ok", "print('before')\nsys.exit(0)", "before"),
    Hostile(
        "system-exit-object", "error", "class Code:\n    def __str__(self): raise ValueError\nraise SystemExit(Code())"
    ),
    endless(
        "system-exit-object-that-hangs",
        "class Code:\n    def __str__(self):\n        while True: pass\nraise SystemExit(Code())",
    ),
    endless(
        "system-exit-that-compares-for-ever",
        """
class Code:
    def __eq__(self, other):
        while True: pass
    __hash__ = None
raise SystemExit(Code())
""",
    ),
    Hostile("keyboard-interrupt", "error", "raise KeyboardInterrupt('no')", "KeyboardInterrupt"),
    Hostile("generator-exit", "error", "raise GeneratorExit", "GeneratorExit"),
    Hostile("base-exception", "error", "class Mine(BaseException): pass\nraise Mine('mine')", "Mine: mine"),
    Hostile(
        "exception-without-text",
        "error",
        "class Mine(Exception):\n    def __str__(self): raise self\nraise Mine",
        "Mine",
    ),
    endless(
        "exception-whose-text-hangs",
        "class Mine(Exception):\n    def __str__(self):\n        while True: pass\nraise Mine",
    ),
    Hostile("exception-with-a-huge-name", "error", "raise type('E' * 10**6, (Exception,), {})('x')"),
    Hostile(
        "exception-of-a-hostile-class",
        "error crashed",
        """
class Meta(type):
    __name__ = property(lambda cls: 1 / 0)
    __qualname__ = property(lambda cls: 1 / 0)
class Mine(Exception, metaclass=Meta):
    __module__ = property(lambda self: 1 / 0)
raise Mine
""",
    ),
    Hostile(
        "exceptions-in-a-circle",
        "error",
        """
a, b = ValueError('a'), ValueError('b')
a.__context__ = a.__cause__ = b
b.__context__ = b.__cause__ = a
raise a
""",
        "ValueError",
    ),
    Hostile(
        "exception-group",
        "error",
        """
e = ValueError('inner')
for _ in range(500): e = ExceptionGroup('g', [e]) if hasattr(__builtins__, 'ExceptionGroup') else e
raise e
""",
    ),
    Hostile(
        "exception-deep", "error", "def f(n):\n    if n: f(n - 1)\n    else: raise ValueError('deep')\nf(900)", "deep"
    ),
    Hostile(
        "exception-syntax-error-of-its-own",
        "error",
        "e = SyntaxError('x')\ne.lineno, e.text, e.offset, e.filename = -(10**30), object(), 'x', {}\nraise e",
    ),
    Hostile(
        "repr-that-raises", "error", "class A:\n    def __repr__(self): raise ValueError('no repr')\nA()", "no repr"
    ),
    Hostile("repr-that-is-no-text", "error", "class A:\n    def __repr__(self): return 1\nA()"),
    endless("repr-that-hangs", "class A:\n    def __repr__(self):\n        while True: pass\nA()"),
    endless(
        "repr-without-end",
        "class A:\n    def __repr__(self):\n        while True: print('x' * 1000)\nA()",
        "timeout too_long",
    ),
    endless("del-at-the-end", "class A:\n    def __del__(self):\n        while True: pass\na = A()", "ok timeout"),
    Hostile(
        "exit-handler",
        "ok",
        "import atexit\natexit.register(lambda: os.write(own_descriptor(), b'olate'))\nprint('end')",
        "Output:\nend",
    ),
    endless(
        "ignored-signals",
        """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    ),
    endless("blocked-signals", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass"),
    endless(
        "timers-off",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nfor timer in (1, 2): signal.setitimer(timer, 0)\nwhile True: pass",
        contains="used 0.5 s of processor time",
    ),
    endless(
        "signal-handler-that-hangs",
        "def hang(*_):\n    while True: pass\nsignal.signal(signal.SIGUSR1, hang)\nwhile True: pass",
    ),
    endless(
        "signal-storm",
        "signal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(0, 1e-6, 1e-6)\nwhile True: pass",
    ),
    Hostile(
        "signal-without-handler",
        "crashed",
        "signal.signal(signal.SIGALRM, signal.SIG_DFL)\nsignal.setitimer(0, 0.01)\ntime.sleep(30)",
        "SIGALRM",
    ),
    endless("endless-loop", "while True: pass"),
    endless("endless-sleep", "time.sleep(10**8)"),
    endless("endless-in-c", "sum(range(10**12))"),
    endless("endless-power", "x = 10 ** 10**9", "timeout memory crashed"),
    endless("endless-regular-expression", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"),
    endless("endless-exception-handling", "while True:\n    try: raise ValueError\n    except BaseException: pass"),
    endless("endless-finally", "try:\n    while True: pass\nfinally:\n    while True: pass"),
    endless("endless-string-conversion", "str(10 ** 10**7)", "timeout ok"),
]
TAMPERING = [
    Hostile("stdout-replaced", "ok", "sys.stdout = None\nprint('lost')"),
    Hostile("stdout-closed", "ok error", "sys.stdout.close()\nprint('lost')"),
    Hostile("stdout-detached", "ok error crashed", "sys.stdout.detach()\nprint('lost')"),
    Hostile(
        "stdout-of-its-own",
        "ok error",
        """
class Out:
    def write(self, text): raise OSError
    flush = write
old, sys.stdout = sys.stdout, Out()
old.write('kept')
""",
        "kept",
    ),
    Hostile("stdout-that-writes-elsewhere", "ok error crashed", "sys.stdout.buffer.raw.call = -1\nprint('lost')"),
    Hostile(
        "stdout-without-records",
        "ok error crashed",
        "type(sys.stdout.buffer.raw).write = lambda *_: 10**9\nprint('lost')",
    ),
    Hostile("display-replaced", "ok", "sys.displayhook = lambda value: print('mine', value)\n5", "mine 5"),
    endless("display-that-hangs", "def hang(value):\n    while True: pass\nsys.displayhook = hang\n5"),
    Hostile("exit-replaced", "ok error crashed", "os._exit = lambda code: print('not yet', flush=True)\nprint('end')"),
    Hostile("write-replaced", "crashed ok error", "os.write = lambda *_: 1 / 0\nprint('lost')"),
    Hostile("timer-replaced", "ok error", "signal.setitimer = None\nfor n in range(1000): print(n)"),
    Hostile(
        "builtins-replaced",
        "ok error crashed",
        """
import builtins
for name in dir(builtins):
    if name != 'setattr' and not name.startswith('__'): setattr(builtins, name, None)
1 / 0
""",
    ),
    Hostile("modules-emptied", "ok error crashed", "sys.modules.clear()\n1 / 0"),
    Hostile(
        "modules-replaced",
        "ok error crashed",
        "for name in list(sys.modules): sys.modules[name] = None\nraise ValueError",
    ),
    Hostile(
        "globals-of-the-worker",
        "ok error crashed",
        "frame = sys._getframe()\nwhile frame:\n    frame.f_globals.clear()\n    frame = frame.f_back",
    ),
    Hostile(
        "traceback-replaced",
        "error crashed",
        "import traceback\ntraceback.walk_tb = traceback.format_exception_only = None\n1 / 0",
    ),
    Hostile(
        "recursion-limit-too-low",
        "ok error crashed",
        "sys.setrecursionlimit(5)\ndef f(n): return n and f(n - 1)\nf(100)",
    ),
    endless("trace-function", "def trace(*_): return trace\nsys.settrace(trace)\nwhile True: pass"),
    endless("profile-function-that-hangs", "def profile(*_):\n    while True: pass\nsys.setprofile(profile)\nlen('')"),
    Hostile(
        "garbage-collector-without-end",
        "ok error memory crashed",
        "import gc\ngc.set_threshold(1)\nx = [[] for _ in range(1000)]\nprint(len(x))",
    ),
    Hostile(
        "codecs-replaced", "ok error crashed", "import codecs\ncodecs.lookup = codecs.register = None\nprint('π')"
    ),
    Hostile(
        "main-module-gone",
        "ok error crashed",
        "del sys.modules['__main__']\nimport dataclasses\n@dataclasses.dataclass\nclass A: x: int\nprint(A(1))",
    ),
]
PROGRAMS = [*MEMORY, *PROCESSES, *FLOODS, *FORGERIES, *ENDINGS, *TAMPERING]


@pytest.fixture(scope="module")
def many_descriptors():
    """A host that has as many files open as a trainer has: numbers of inherited descriptors are high then."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    jail.missing_layers()  # starts a worker that was not there
    yield
    for descriptor in opened:
        os.close(descriptor)


class Ended(NamedTuple):
    """What became of a program, of the neighbour that was started with it, and of the next call."""

    output: tool_sandbox.ToolOutput
    seconds: float
    neighbour: str
    next_call: str


@pytest.fixture(scope="module")
def ended(many_descriptors) -> dict[str, Ended | BaseException]:
    """By the program's name, after all of them have run, eight calls at a time."""

    async def run(hostile: Hostile, places: asyncio.Semaphore) -> Ended:
        async with places:
            neighbour = asyncio.create_task(jail.sandbox(timeout=ENDS + LATE_SECONDS).execute_code(NEIGHBOUR))
            await asyncio.sleep(0)
            start = time.monotonic()
            output = await jail.sandbox(timeout=hostile.timeout).execute_code(jail.with_helpers(hostile.code))
            seconds = time.monotonic() - start
            return Ended(output, seconds, await neighbour, await jail.sandbox().execute_code("print(6 * 7)"))

    async def all_of_them() -> list:
        places = asyncio.Semaphore(4)
        return await asyncio.gather(*[run(hostile, places) for hostile in PROGRAMS], return_exceptions=True)

    return dict(zip((hostile.name for hostile in PROGRAMS), asyncio.run(all_of_them()), strict=True))


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.name)
def test_call_ends_and_nothing_else_is_harmed(hostile, ended):
    result = ended[hostile.name]
    if isinstance(result, BaseException):
        raise result
    assert result.output.outcome in hostile.outcomes.split(), result.output
    assert hostile.contains in result.output
    assert len(result.output) <= tool_sandbox.TOOL_CONFIGS["max_output_chars"]
    assert result.seconds < hostile.timeout + LATE_SECONDS
    assert result.neighbour == UNHARMED
    assert result.next_call == "Output:\n42"


def test_no_process_of_theirs_remains(ended):
    check_next_call()
    assert wait_for(lambda: len(jail.below()) <= jail.resting_processes(), 10)


def check_next_call():
    assert jail.run("print(6 * 7)") == "Output:\n42"


def test_many_hostile_calls_at_once_harm_neither_each_other_nor_their_neighbours():
    names = (
        "flood-print",
        "memory-blocks",
        "endless-loop",
        "segfault",
        "forged-end",
        "ignored-signals",
        "exit-at-once",
    )
    programs = [hostile for hostile in PROGRAMS if hostile.name in names] * 2

    async def everything():
        neighbours = [jail.sandbox(timeout=90).execute_code(NEIGHBOUR) for _ in range(6)]
        attacks = [jail.sandbox(timeout=ENDLESS).execute_code(jail.with_helpers(hostile.code)) for hostile in programs]
        return await asyncio.gather(*neighbours, *attacks)

    results = asyncio.run(everything())
    assert results[:6] == [UNHARMED] * 6
    for hostile, output in zip(programs, results[6:], strict=True):
        assert output.outcome in {*hostile.outcomes.split(), "timeout"}, (hostile.name, output)
    check_next_call()


# ---------------------------------------------------------------------------------------------------------------------
# Processes that are to outlive their call, against one layer each

DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("GOT")
"""


@pytest.mark.parametrize("layer", ["seccomp", "limits"])
def test_no_process_outlives_its_call(layer):
    missing = jail.missing_layers()
    if layer in missing:
        pytest.skip(f"{layer} is not to be had here: {missing[layer]}")
    output = jail.run(jail.with_helpers(DAEMON), disabled=jail.alone(layer))
    assert output.outcome == "error" and "GOT" not in output
    assert wait_for(lambda: len(jail.below()) <= jail.resting_processes(), 10)


@pytest.mark.parametrize("ending", ["", "os._exit(0)", "while True: pass"], ids=["returns", "exits", "runs"])
def test_the_worker_ends_what_is_left_of_a_calls_group(ending):
    """Where neither filter nor limits keep a call from having children."""
    code = f"if os.fork() == 0: time.sleep(60)\nprint('forked', flush=True)\n{ending}"
    output = jail.run(jail.with_helpers(code), disabled=("seccomp", "limits"), timeout=ENDLESS)
    assert "forked" in output
    assert wait_for(lambda: len(jail.below()) <= jail.resting_processes(), 10)


# ---------------------------------------------------------------------------------------------------------------------
# What an earlier call leaves to a later one

# Looks for the pattern of a secret in all memory near any object, and must find the one that it plants itself.
SCAN = """
import gc, re
pattern = re.compile(b"M4RK[-][0-9a-f]{32}")
own = ("M4RK" + "-" + "f" * 32).encode()
futex, found, planted = ctypes.c_long(NUMBERS["futex"]), set(), [bytes(own) for _ in range(3)]
no_time, wait = buffer(16), ctypes.c_long(128)
def mapped(page):
    # Waits, for no time at all, as long as the word there has a value that it does not have: EFAULT without memory.
    _libc.syscall(futex, ctypes.c_void_p(page), wait, ctypes.c_long(0x5EED5EED), no_time, None, ctypes.c_long(0))
    return ctypes.get_errno() != 14
pages = {address >> 12 for address in map(id, gc.get_objects())} | {id(own) >> 12, id(_libc) >> 12}
near = sorted({page + step for page in pages for step in range(-64, 64)})
runs = [page for page in near if mapped(page << 12)]
previous = b""
for page in runs:
    content = ctypes.string_at(page << 12, 4096)
    found.update(match for match in pattern.findall(previous[-64:] + content))
    previous = content
print("own", own in found, "pages", len(runs), "others", sorted(found - {own}))
for item in gc.get_objects():
    if isinstance(item, (str, bytes)) and re.search("M4RK[-]0", str(item)): print("object", item)
frame = sys._getframe()
while frame:
    if re.search("M4RK[-]0", repr(frame.f_locals)[:10**6]): print("frame", frame)
    frame = frame.f_back
"""


def test_nothing_of_an_earlier_call_is_in_the_memory_of_a_later_one():
    marks = [f"M4RK-0{secrets.token_hex(16)[1:]}" for _ in range(8)]

    async def calls():
        for mark in marks[:4]:
            assert await jail.sandbox().execute_code(f"x = '{mark}'\nprint(x)") == f"Output:\n{mark}"
        beside = [jail.sandbox().execute_code(f"import time\nx = '{mark}'\ntime.sleep(1)") for mark in marks[4:]]
        scan = jail.sandbox().execute_code(jail.with_helpers(SCAN))
        return (await asyncio.gather(scan, *beside))[0]

    output = asyncio.run(calls())
    found = re.fullmatch(r"Output:\nown True pages (\d+) others \[\]", output)
    assert found, output
    assert int(found[1]) > 500  # a few megabytes: most of an interpreter's own memory


CHANGES = {
    "a module's function": ("import math\nmath.sqrt = lambda x: 0", "import math\nprint(math.sqrt(16))", "4.0"),
    "a builtin": ("import builtins\nbuiltins.len = lambda x: -1", "print(len('abc'))", "3"),
    "a class": ("""
import fractions
fractions.Fraction.__str__ = lambda self: 'evil'
""", """
import fractions
print(fractions.Fraction(1, 2))
""", "1/2"),
    "the modules": ("import sys\nsys.modules['math'] = None", "import math\nprint(math.pi)", "3.141592653589793"),
    "the decimal context": ("""
import decimal
decimal.getcontext().prec = 3
""", """
import decimal
print(decimal.Decimal(1) / 3)
""", "0.3333333333333333333333333333"),
    "the recursion limit": ("""
import sys
sys.setrecursionlimit(50)
""", """
import sys
print(sys.getrecursionlimit() >= 1000)
""", "True"),
    "a signal handler": ("""
import signal
signal.signal(15, lambda *_: None)
""", """
import signal
print(signal.getsignal(15) == signal.SIG_DFL)
""", "True"),
    "a timer": ("""
import signal
signal.setitimer(0, 0.05, 0.05)
""", """
import signal
print(signal.getitimer(0))
""", "(0.0, 0.0)"),
    "the environment": ("""
import os
os.environ['RETOOL_X'] = '1'
""", """
import os
print('RETOOL_X' in os.environ)
""", "False"),
    "a global name": ("leak = 1", "print('leak' in globals())", "False"),
    "the output": ("import sys\nsys.stdout.write('unfinished')\nimport os\nos._exit(0)", "print('mine')", "mine"),
    "a cache": ("""
import re
re.compile('leak-[a-z]')
""", """
import re
print(len([k for k in re._cache if 'leak' in str(k)]))
""", "0"),
    "the class registry": ("""
class Leak: pass
keep = Leak()
""", "print([c.__name__ for c in object.__subclasses__() if c.__name__ == 'Leak'])", "[]"),
}  # fmt: skip


@pytest.mark.parametrize("change, look, shown", CHANGES.values(), ids=CHANGES)
def test_what_a_call_changes_is_undone_in_the_next(change, look, shown):
    for _ in range(2 * PREFORKED_CHILDREN):  # those forked before the change, and those after
        jail.run(change)
        assert jail.run(look) == f"Output:\n{shown}"


def test_random_states_differ_between_calls():
    code = "import random, os\nprint(random.random(), random.Random().random(), os.urandom(8).hex())"
    outputs = [jail.run(code) for _ in range(12)]
    assert len({part for output in outputs for part in output.split()[1:]}) == 36
