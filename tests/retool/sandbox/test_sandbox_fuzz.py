"""Random programs, and random bytes on every way between host, worker and call.

Whatever comes, the host gives an observation of one of its outcomes or a SandboxError, in bounded time and size, and
the next call works. RETOOL_FUZZ_SEED and RETOOL_FUZZ_ROUNDS draw others and more than the ones that are always drawn.
"""

import ast
import asyncio
import contextlib
import io
import os
import random
import re
import socket
import textwrap
import time

import jail
import pytest
import tool_sandbox
from retool.metrics import OUTCOMES
from retool.sandbox import call, child, pool, wire
from retool.sandbox import worker as worker_module
from retool.sandbox.policy_tables import DEFAULT_MODULES
from retool.sandbox.results import Reply, observation
from watching import descendants, wait_for

SEED = int(os.environ.get("RETOOL_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("RETOOL_FUZZ_ROUNDS", "60"))
MOST = tool_sandbox.TOOL_CONFIGS["max_output_chars"]
LETTERS = [*(bytes([letter]) for letter in b"oeDNEMRYSXPTF?\0\xff"), b"X-9", b"X71", b"T0", b""]

pytestmark = pytest.mark.skipif(jail.COLUMN is None, reason="no table of system calls for this machine's architecture")


def seeds(name: str, rounds: int = ROUNDS):
    """Seeds of one test's rounds, each with the number that repeats it."""
    return [
        (f"{name} with RETOOL_FUZZ_SEED={SEED}, round {number}", f"{name}-{SEED}-{number}") for number in range(rounds)
    ]


def check(output: tool_sandbox.ToolOutput, label: str) -> None:
    assert output.outcome in OUTCOMES, label
    assert len(output) <= MOST, label
    output.encode()  # no half characters


def check_next_call(label: str) -> None:
    assert jail.run("print(6 * 7)") == "Output:\n42", label


# ---------------------------------------------------------------------------------------------------------------------
# What a call may send


async def converse(draw: random.Random) -> tool_sandbox.ToolOutput:
    """The observation of a call whose child is played here, with a worker that says what has become of it."""
    (ours, child_end), (leash, worker_end) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ab")
    for end in (ours, leash, child_end):
        end.setblocking(False)
    conversation = call._Conversation(pool.Call(ours, leash), Reply(keep=4 * MOST), timeout=60.0)
    running = asyncio.ensure_future(conversation.run())
    for _ in range(draw.randrange(8)):
        with contextlib.suppress(OSError):  # the host has heard enough, or does not read so fast
            child_end.send(draw.choice(LETTERS) + draw.randbytes(draw.choice([0, 0, 1, 7, 100, 5000])))
        if draw.random() < 0.2:
            await asyncio.sleep(0)
    if draw.random() < 0.3:
        child_end.shutdown(draw.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    if draw.random() < 0.3:
        await asyncio.sleep(0)
    child_end.close()
    with contextlib.suppress(OSError):
        worker_end.send(b"X%d" % draw.choice([0, 1, 70, 71, 72, 255, -6, -9, -11, -26, -64]))
    await running
    worker_end.close()
    return observation(conversation.reply, timeout=1.0, memory_bytes=2**28, most=draw.randrange(500, MOST))


def test_whatever_a_child_writes_is_an_observation_and_holds_nobody():
    async def all_of_them():
        for label, seed in seeds("records of a child", 50 * ROUNDS):
            check(await asyncio.wait_for(converse(random.Random(seed)), 60), label)

    asyncio.run(all_of_them())


RANDOM_SENDER = """
import random
draw = random.Random({seed!r})
call = own_descriptor()
for _ in range(draw.randrange(40)):
    letter = draw.choice({letters!r})
    size = draw.choice([0, 1, 7, 100, 16383, 16384, 16385, 40000])
    content = draw.randbytes(size) if draw.random() < 0.7 else ("π\\u2028\\x00\\x1b[31m" * size)[:size].encode()
    _libc.send(call, letter + content, len(letter + content), 0)
    if draw.random() < 0.3: print(draw.random(), file=draw.choice([sys.stdout, sys.stderr]))
ending = draw.randrange(6)
if ending == 0: os._exit(draw.randrange(256))
if ending == 1: raise draw.choice([ValueError, SystemExit, KeyboardInterrupt, MemoryError])(draw.random())
if ending == 2: os.closerange(0, 1000)
if ending == 3: ctypes.string_at(0)
"""


def test_random_records_from_a_call_harm_neither_host_nor_worker():
    for label, seed in seeds("records of a call", 2 * ROUNDS):
        output = jail.run(jail.with_helpers(RANDOM_SENDER.format(seed=seed, letters=LETTERS)))
        check(output, label)
        check_next_call(label)


INSIDE = "child, wire = (sys.modules['retool.sandbox.' + name] for name in ('child', 'wire'))\n"
WORKERS = "import gc\nfor worker in [o for o in gc.get_objects() if type(o).__name__ == 'Worker']:\n"
PASSED_OFF = {
    "not confined": "os.write(own_descriptor(), b'Slandlock: no')\nos._exit(70)",
    "not confined, and stays": "os.write(own_descriptor(), b'Slandlock: no')\nos.close(own_descriptor())\ntime.sleep(9)",
    "empty records": "for _ in range(9): _libc.send(own_descriptor(), b'', 0, 0)",
    "empty records without end": "while True: _libc.send(own_descriptor(), b'', 0, 0)",
    "an empty record, and stays": "_libc.send(own_descriptor(), b'', 0, 0)\ntime.sleep(9)",
    "every letter": "for n in range(256): os.write(own_descriptor(), bytes([n]) + b'x')\nos._exit(3)",
    "a worker's words": "for word in (b'X0', b'X70', b'X-9', b'P', b'T'): os.write(own_descriptor(), word)\nos._exit(9)",
    "another last letter": INSIDE + "wire.DONE = child.DONE = b'S'",
    "no end": "os._exit = lambda *_: None\nos.write = lambda *_: 0",
    "no end, and forks": "os._exit = lambda *_: None\nos.write = lambda *_: 0\nos.fork = lambda: 0",
    "no flush": INSIDE + "child.flush = lambda *_: time.sleep(9)",
    "a flush that fails": INSIDE + "child.flush = lambda *_: 1 / 0",
    "no streams": INSIDE + "sys.stdout.close()\nchild.STDOUT, child.STDERR = None, 5",
    "a description that ends": INSIDE + "child.describe = lambda *_: sys.exit(70)\n1 / 0",
    "an exception that ends": "class E(Exception):\n    def __str__(self): os._exit(70)\nraise E",
    "a nameless exception": "class M(type): __name__ = property(lambda _: 1 / 0)\nclass E(Exception, metaclass=M): pass\nraise E",
    "a group of groups": "e = ValueError()\nfor _ in range(9999): e = ExceptionGroup('g', [e])\nraise e",
    "the worker's leashes": WORKERS + "    for leash, _ in worker.calls.values(): reached_by(leash.send, b'X70')",
    "the worker's control": WORKERS + "    reached_by(worker.control.send, b'F')",
    "the worker's signals": WORKERS + "    for number in worker.calls: reached_by(worker.signal, number, 9)",
}
REACHED_BY = "def reached_by(function, *given):\n    try: got(function(*given))\n    except OSError: pass\n"


def test_what_passes_itself_off_as_a_failure_of_the_sandbox_is_an_observation():
    async def all_of_them():
        sandbox, remaining, told = jail.sandbox(timeout=1.0), iter(PASSED_OFF.items()), {}

        async def lane():
            for name, code in remaining:
                told[name] = await sandbox.execute_code(jail.with_helpers(REACHED_BY + code))

        await asyncio.gather(*[lane() for _ in range(8)])
        return told

    check_next_call("before")
    workers = pool.POOL.workers()
    for name, output in asyncio.run(all_of_them()).items():
        check(output, name)
        assert "GOT" not in output, name
    check_next_call("after what passes itself off")
    assert set(workers) <= set(pool.POOL.workers())


SWEEP = """
skipped = SKIPPED
done = []
for number in set(range(480)) - skipped:
    ctypes.set_errno(0)
    if _libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6) != -1 or ctypes.get_errno() not in (1, 38):
        done.append(number)
print(done)
"""


def test_no_system_call_is_there_but_those_of_the_table():
    """Each of the others is tried, with arguments that make no sense."""
    allowed = {numbers[jail.COLUMN] for numbers in worker_module.CHILD_CALLS.values()}
    uretprobe = {335, 336} if jail.COLUMN == 0 else set()  # no filter is asked; without a probe they end the caller
    done = jail.run(jail.with_helpers(SWEEP.replace("SKIPPED", repr(allowed | uretprobe))))
    assert done == "Output:\n[]"


# ---------------------------------------------------------------------------------------------------------------------
# What the host may send: the worker and the calls beside have to withstand it too


@pytest.fixture
def worker():
    made = pool.start_worker(jail.sandbox()._keys()[0])
    yield made
    made.close()


def answer(running: pool.Call, seconds: float = 20.0) -> bytes:
    """All that comes of a call until it has ended."""
    running.socket.settimeout(seconds)
    received = []
    with contextlib.suppress(ConnectionError):
        while record := running.socket.recv(65536):
            received.append(record)
    running.close()
    return b"|".join(received)


def test_random_requests_end_their_call_alone(worker):
    for label, seed in seeds("requests"):
        draw = random.Random(seed)
        request = draw.choice(
            [
                draw.randbytes(draw.randrange(1, 5000)),
                wire.HEADER.pack(draw.randrange(256), draw.uniform(-9, 99)) + b"print(1)",
                wire.HEADER.pack(0, 9.0) + draw.randbytes(draw.randrange(200)),
                wire.HEADER.pack(1, draw.choice([float("nan"), float("inf"), 1e300, 0.0])) + b"print(1)",
                wire.HEADER.pack(1, 9.0) + b"print(1)\xff",
                b"\n",
            ]
        )
        running = worker.take()
        running.socket.send(request)
        assert re.match(rb"(?s)(.*\|)?[oDEMNRY]", answer(running)), label
        check_worker(worker, label)


def check_worker(worker, label):
    good = worker.take()
    good.socket.send(jail.request("print(7)"))
    assert answer(good).startswith(b"o7\n|D"), label
    assert not worker.is_dead(), label


def test_random_bytes_to_the_worker_do_not_end_it(worker):
    for label, seed in seeds("control"):
        draw = random.Random(seed)
        worker.control.send(draw.randbytes(draw.randrange(1, 3000)))
        leashed = worker.take()
        leashed.leash.send(draw.choice([b"P", b"T", draw.randbytes(draw.randrange(1, 300))]))
        check_worker(worker, label)
        leashed.close()


def test_calls_that_are_closed_at_random_moments_leave_nothing(worker):
    draw = random.Random(SEED)
    process = worker.process.pid
    for _ in range(5 * ROUNDS):
        running = worker.take()
        if draw.random() < 0.7:
            running.socket.send(jail.request(f"print(1)\nimport time\ntime.sleep({draw.random() * 0.01})\nprint(2)"))
        if draw.random() < 0.3:
            draw.choice(running).shutdown(draw.choice([0, 1, 2]))
        time.sleep(draw.random() * 0.005)
        running.close()
    assert not worker.is_dead()
    assert wait_for(lambda: len(descendants(process, zombies=True)) <= 1 + len(worker.preforked), 10)


# ---------------------------------------------------------------------------------------------------------------------
# A worker gone mad

ROGUE = """
import os, random, socket, sys
draw = random.Random({seed!r})
control = socket.socket(fileno=int(sys.argv.pop()))
control.recv(1 << 16)
control.send({start!r})
kept = []
for _ in range(draw.choice([0, 1, 3, 30])):
    request, descriptors, _, _ = socket.recv_fds(control, 16, 64)
    if not request: break
    if draw.random() < 0.2: control.send(draw.randbytes(50))
    for descriptor in descriptors:
        call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptor)
        try:
            call.setblocking(draw.random() < 0.3)
            for _ in range(draw.randrange(6)):
                call.send(draw.choice({letters!r}) + draw.randbytes(draw.choice([0, 3, 20000])))
            if draw.random() < 0.5: call.recv(1000)
        except OSError: pass
        kept.append(call) if draw.random() < 0.5 else call.close()
if draw.random() < 0.5: os.abort()
"""


def run_with_rogue_worker(monkeypatch, seed: str, start: bytes) -> list:
    """What calls get from a worker that starts with `start` and goes on with anything."""
    monkeypatch.setattr(pool, "WORKER_START", ROGUE.format(seed=seed, start=start, letters=LETTERS))
    monkeypatch.setattr(pool, "MAX_START_SECONDS", 1.0)
    monkeypatch.setattr(call, "MAX_RESPONSE_SECONDS", 0.5)

    async def calls():
        sandbox = jail.sandbox(timeout=0.3)
        return await asyncio.gather(*[sandbox.execute_code("print(1)") for _ in range(3)], return_exceptions=True)

    return asyncio.run(calls())


@pytest.fixture
def no_workers():
    """Rogue workers neither meet those of other tests nor stay."""
    tool_sandbox.shutdown()
    before = len(os.listdir("/proc/self/fd"))
    yield
    tool_sandbox.shutdown()
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, 10), "descriptors remain"


def test_a_worker_that_sends_anything_is_an_observation_or_an_infrastructure_error(monkeypatch, no_workers):
    for label, seed in seeds("rogue worker", ROUNDS // 4):
        start = time.monotonic()
        for result in run_with_rogue_worker(monkeypatch, seed, b'{"missing": {}}'):
            if not isinstance(result, tool_sandbox.SandboxError):
                assert isinstance(result, tool_sandbox.ToolOutput), (label, result)
                check(result, label)
        assert time.monotonic() - start < 30, label
        tool_sandbox.shutdown()
    monkeypatch.undo()
    check_next_call("after rogue workers")


@pytest.mark.parametrize(
    "start",
    [b"", b"\xff\xfe", b"{", b"[]", b"1", b'"failure"', b"{}", b'{"missing": 5}', b'{"missing": null}', b"[" * 60000],
    ids=lambda start: repr(start[:20]),
)
def test_a_worker_that_starts_with_nonsense_is_an_infrastructure_error(monkeypatch, no_workers, start):
    results = run_with_rogue_worker(monkeypatch, "start", start)
    assert [type(result) for result in results] == [tool_sandbox.SandboxError] * 3
    monkeypatch.undo()
    check_next_call("after a worker that would not start")


# ---------------------------------------------------------------------------------------------------------------------
# Programs: what the jail shows is what Python itself would

ATOMS = ["a", "b", "7", "-3", "2.5", "'x\\ty'", "'π'", "[1, 2]", "(3,)", "{'k': 1}", "None", "True", "b'q'", "10**30"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "==", "<", "and", "or", "in", "is"]


def expression(draw: random.Random, depth: int = 2) -> str:
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(ATOMS)
    inner = [expression(draw, depth - 1) for _ in range(3)]
    return draw.choice(
        [
            f"({inner[0]} {draw.choice(OPERATORS)} {inner[1]})",
            f"str({inner[0]})",
            f"len({inner[0]})",
            f"[{inner[0]} for a in {inner[1]}]",
            f"({inner[0]} if {inner[1]} else {inner[2]})",
            f"f'{{{draw.choice('ab')}!r:>4}}|{{{{}}}}'",
            f"(lambda a: {inner[0]})({inner[1]})",
            f"({inner[0]},\n   {inner[1]})",
        ]
    )


def statement(draw: random.Random, depth: int = 2) -> str:
    value = expression(draw)
    if depth == 0 or draw.random() < 0.5:
        return draw.choice(
            [
                f"{draw.choice('ab')} = {value}",
                f"print({value})",
                value,
                f"print({value}, end='')",
                f"a = {value}; b = a  # {value[:5]!r}",
                f"'''text\n  {draw.choice(ATOMS)}\n'''",
                "",
                f"assert {value} or True",
                f"a = 1 + \\\n    {draw.choice(['1', '2'])}",
            ]
        )
    body = textwrap.indent("\n".join(statement(draw, depth - 1) for _ in range(draw.randint(1, 3))) + "\npass", "    ")
    return draw.choice(
        [
            f"if {value}:\n{body}\nelse:\n    print('else')",
            f"for a in range(3):\n{body}",
            f"try:\n{body}\nexcept TypeError as error:\n    print('caught', error)",
            f"def f(a):\n{body}\n    return a\nprint(f({value}))",
            f"class A:\n{body}\nprint(A.__name__)",
        ]
    )


def reference(code: str) -> tuple[str, str]:
    """(what is printed, the name of the exception) where plain Python runs it, a last expression shown."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names, printed, error = {"__name__": "__main__"}, io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(tree, "<code>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
                if value is not None:
                    print(repr(value))
        except Exception as raised:
            error = type(raised).__name__
    return printed.getvalue(), error


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_random_programs_do_what_they_do_in_plain_python():
    compared = failed = 0
    for label, seed in seeds("programs", 6 * ROUNDS):
        draw = random.Random(seed)
        code = "\n".join(["a, b = 5, [1]", *(statement(draw) for _ in range(draw.randint(1, 5)))])
        try:
            printed, error = reference(code)
        except (SyntaxError, ValueError):
            continue
        if len(printed) > MOST // 2 or not printed.isprintable() and "\x00" in printed:
            continue
        output = jail.run(code, policy=True)
        told = f"{label}:\n{code}\n---\n{output}"
        assert output.outcome == ("error" if error else "ok"), told
        if printed.strip("\n"):
            assert output.startswith("Output:\n" + printed.removesuffix("\n").rstrip()), told
        if error:
            assert f"\n{error}" in output, told
            failed += 1
        compared += 1
    assert compared > 3 * ROUNDS and failed > 0, "too few of the programs were of use"


TOKENS = (
    "def class if else for while try except with match case lambda return yield await async import from as global del"
    " = == := ( ) [ ] { } : , . ; + ** @ -> ... f' ' \" ''' \\ \n \t # 0x 1e9 1_0 __ _ é ｅ π"
    " \u2028 \x00 \ud800 \ufeff \f \r os math eval print __class__ getattr format x"
).split(" ")


def random_text(draw: random.Random) -> str:
    glue = draw.choice(["", " ", " ", "\n"])
    return glue.join(draw.choices(TOKENS, k=draw.randint(1, 30)))


def test_random_text_is_an_observation():
    for label, seed in seeds("texts", 5 * ROUNDS):
        draw = random.Random(seed)
        check(jail.run(random_text(draw), policy=True, timeout=5.0), label)
        check_next_call(label) if draw.random() < 0.1 else None


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_random_text_is_compiled_and_checked_without_a_failure():
    """By the child's own function, in this process, which can look at many more texts than calls can."""
    letters = set()
    for label, seed in seeds("compiled texts", 50 * ROUNDS):
        text = random_text(random.Random(seed)).encode("utf-8", "ignore").decode()
        letter, told = child.answer(wire.CHECK, text, {}, DEFAULT_MODULES)
        assert letter == wire.DONE or told, label
        letters.add(letter)
    assert letters == {wire.DONE, wire.REFUSED, wire.UNREADABLE}
