"""Many calls of every kind, and nothing grows: memory, descriptors, processes, files, time per call.

RETOOL_SOAK_CALLS sets how many (100000 for a real soak). The numbers are printed: run with -s to see them.
"""

import asyncio
import contextlib
import gc
import os
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jail
import pytest
from retool.sandbox.pool import FIRST_PRIVATE_USER
from watching import wait_for

CALLS = int(os.environ.get("RETOOL_SOAK_CALLS", "3000"))
IN_FLIGHT = 16
PHASES = 10
PAGE = os.sysconf("SC_PAGE_SIZE")

# (weight, code, outcomes): mostly what a model writes, with every way for a call to go wrong among it.
KINDS = [
    (60, "print(sum(x * x for x in range(100)))", "ok"),
    (10, "import math, random\nrandom.random()\nmath.comb(50, 25)", "ok"),
    (5, "print('x' * 20000)", "ok"),
    (5, "1 / 0", "error"),
    (3, "x = bytearray(2**40)", "memory"),
    (3, "import os\nos._exit(3)", "crashed"),
    (2, "import ctypes\nctypes.string_at(0)", "crashed"),
    (2, "def f(:", "syntax_error"),
    (2, "while True: print('x' * 10000)", "too_long timeout"),
    (2, "x = []\nwhile True: x.append(bytearray(10**6))", "memory timeout"),
    (1, "while True: pass", "timeout"),
    (1, "import time\ntime.sleep(60)", "timeout"),
    (3, "x = 1\n" + "# a long source\n" * 1000 + "print(x)", "ok"),
    (3, f"import {jail.LIBRARY}\nprint({jail.LIBRARY}.__name__)", "ok"),  # in a worker with libraries
    (5, None, ""),  # cancelled at a random moment
]


class Levels(NamedTuple):
    """What must not grow, of the host and of all processes below it."""

    host_kib: int
    worker_kib: int
    host_descriptors: int
    worker_descriptors: int
    processes: int
    files: int
    tasks: int

    @classmethod
    def now(cls) -> "Levels":
        gc.collect()
        workers = resting_workers()
        return cls(
            host_kib=resident_kib(os.getpid()),
            worker_kib=sum(map(resident_kib, workers)),
            host_descriptors=len(os.listdir("/proc/self/fd")),
            worker_descriptors=sum(map(descriptors, workers)),
            processes=len(workers),
            files=sum(map(len, map(os.listdir, (tempfile.gettempdir(), jail.SANDBOX_FILES)))) + files_of_workers(),
            tasks=len(os.listdir("/proc/self/task")),
        )


def files_of_workers() -> int:
    """Where anyone may make files, those that belong to a worker's own user."""
    found = 0
    for folder in filter(os.path.isdir, ("/tmp", "/var/tmp", "/dev/shm")):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                found += entry.stat(follow_symlinks=False).st_uid >= FIRST_PRIVATE_USER
    return found


def resident_kib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE // 1024
    except OSError:
        return 0


def descriptors(pid: int) -> int:
    """0 where this user may not look into the process."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def resting_workers() -> set[int]:
    """The processes that stay: below this one, without children that end by themselves in a moment."""
    jail.prefork_all()
    wait_for(lambda: len(jail.below()) == jail.resting_processes(), 10)
    return jail.below()


async def one_call(draw: random.Random) -> str:
    _, code, outcomes = draw.choices(KINDS, [kind[0] for kind in KINDS])[0]
    sandbox = jail.sandbox(timeout=0.5 if "timeout" in outcomes else jail.SECONDS, memory="128MB", library=True)
    if code is None:
        task = asyncio.create_task(sandbox.execute_code("import time\nprint(1)\ntime.sleep(60)"))
        await asyncio.sleep(draw.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ""
    output = await sandbox.execute_code(code)
    assert output.outcome in outcomes.split(), (code, output)
    return output.outcome


async def many_calls(calls: int, seed: int) -> float:
    """Seconds that a plain call takes in the median, while all kinds of calls are in flight."""
    draw, started, plain = random.Random(seed), 0, []

    async def lane() -> None:
        nonlocal started
        while started < calls:
            started += 1
            begin = time.perf_counter()
            if await one_call(draw) == "ok":
                plain.append(time.perf_counter() - begin)

    await asyncio.gather(*[lane() for _ in range(IN_FLIGHT)])
    return sorted(plain)[len(plain) // 2]


def report(calls: int, levels: Levels, median: float) -> None:
    print(f"{calls:>8} calls  {median * 1000:7.2f} ms  " + "  ".join(f"{k}={v}" for k, v in levels._asdict().items()))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_nothing_grows(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))  # so that only files of this process count
    asyncio.run(many_calls(max(200, CALLS // PHASES), seed=0))  # whatever is made once is there after this
    first = Levels.now()
    medians, levels = [], first
    print()
    for phase in range(PHASES):
        medians.append(asyncio.run(many_calls(CALLS // PHASES, seed=phase + 1)))
        levels = Levels.now()
        report((phase + 1) * CALLS // PHASES, levels, medians[-1])
    assert levels.host_descriptors <= first.host_descriptors
    assert levels.worker_descriptors <= first.worker_descriptors
    assert levels.processes <= first.processes
    assert levels.files <= first.files
    assert levels.tasks <= first.tasks + 1
    # What a leak of a kilobyte a call would add, at the least; a fixed sum covers the allocator's own ways.
    assert levels.host_kib - first.host_kib < 8192 + CALLS // 4
    assert levels.worker_kib - first.worker_kib < 8192 + CALLS // 4
    assert min(medians[-3:]) < 3 * min(medians[:3])  # generous: the machine does other things meanwhile
