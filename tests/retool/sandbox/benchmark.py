"""Measures the sandbox against what it replaces, both in the same run, and fails when a target is missed.

    python tests/retool/sandbox/benchmark.py [--quick] [--libraries]

Every figure stands beside its baseline and its target. `--quick` makes fewer calls and holds the figures against
looser targets, which a busy machine does not upset (for CI). `--libraries` adds the figures for numpy and sympy, which
must be installed. The exit status is 1 when a target is missed.

The first baseline, `sys.executable file.py`, depends on what the interpreter's site directory loads at each start: ten
milliseconds of processor time for a clean one, several times that where .pth files import packages.
"""

import argparse
import asyncio
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "retool"))

from tool_sandbox import PythonSandbox, ToolRegistry

IN_FLIGHT = 32
SHORT = "# {number}\nfrom math import gcd\nprint(sum(1 for n in range(1, 30) if gcd(n, 30) == 1), 2 ** 31 % 7)"
SHORT_ANSWER = "8 2"
SPIN = (
    "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end:\n    pass\nprint({number})"
)
BARE_FORK = """
import os, statistics, time
times = []
for _ in range({count}):
    started = time.perf_counter()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"4")
        os._exit(0)
    os.close(writer)
    os.read(reader, 16)
    os.waitpid(child, 0)
    os.close(reader)
    times.append(time.perf_counter() - started)
print(statistics.median(times))
"""


class Figure(NamedTuple):
    """A line of the report."""

    name: str
    value: str
    baseline: str
    target: str
    reached: bool


def numbers(count: int, in_flight: int, call: Callable[[int], Awaitable[None]]) -> Awaitable[None]:
    """Await `call` for 0 ... count - 1, `in_flight` at a time."""
    remaining = iter(range(count))

    async def lane() -> None:
        for number in remaining:
            await call(number)

    return asyncio.gather(*[lane() for _ in range(in_flight)])


async def per_second(count: int, in_flight: int, call: Callable[[int], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await numbers(count, in_flight, call)
    return count / (time.perf_counter() - started)


async def median_seconds(count: int, call: Callable[[int], Awaitable[None]]) -> float:
    times = []
    for number in range(count):
        started = time.perf_counter()
        await call(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def short_call(registry: ToolRegistry) -> Callable[[int], Awaitable[None]]:
    async def call(number: int) -> None:
        result = await registry.execute_tool("code_interpreter", {"code": SHORT.format(number=number)})
        assert result == f"Output:\n{SHORT_ANSWER}", result

    return call


def process_call(folder: str, *options: str) -> Callable[[int], Awaitable[None]]:
    """What the sandbox is compared with: an interpreter for each call, the source in a file."""

    async def call(number: int) -> None:
        path = os.path.join(folder, f"{number}.py")
        with open(path, "w") as file:
            file.write(SHORT.format(number=number))
        process = await asyncio.create_subprocess_exec(sys.executable, *options, path, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert output.decode() == SHORT_ANSWER + "\n", output

    return call


async def throughput(quick: bool) -> list[Figure]:
    rounds, registry = 1 if quick else 3, ToolRegistry()
    ours, plain, bare = [], [], []
    await numbers(64, IN_FLIGHT, short_call(registry))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):  # interleaved, so that what else the machine does meets all three
            plain.append(await per_second(60 if quick else 150, IN_FLIGHT, process_call(folder)))
            bare.append(await per_second(100 if quick else 300, IN_FLIGHT, process_call(folder, "-I", "-S")))
            ours.append(await per_second(500 if quick else 2000, IN_FLIGHT, short_call(registry)))
    rate, plain_rate, bare_rate = map(statistics.median, (ours, plain, bare))
    figures = []
    for name, baseline, target, loose in (
        ("plain interpreter", plain_rate, 20, 2.5),
        ("python -I -S", bare_rate, 4, 1.5),
    ):
        least = loose if quick else target
        value, against = f"{rate:.0f} calls/s", f"{baseline:.0f}/s, {rate / baseline:.1f} times"
        title = f"short calls, {IN_FLIGHT} in flight / {name}"
        figures.append(Figure(title, value, against, f">= {least:g} times", rate >= least * baseline))
    return figures


async def latency(quick: bool) -> list[Figure]:
    registry, count = ToolRegistry(), 100 if quick else 500
    await numbers(20, 1, short_call(registry))
    ours, forks = [], []
    for _ in range(3):
        command = [sys.executable, "-I", "-S", "-c", BARE_FORK.format(count=count)]
        forks.append(float(subprocess.run(command, capture_output=True, check=True).stdout))
        ours.append(await median_seconds(count, short_call(registry)))
    seconds, fork = statistics.median(ours), statistics.median(forks)
    most = 10 if quick else 1.3
    against = f"{fork * 1e3:.2f} ms a bare fork, {seconds / fork:.2f} times"
    return [
        Figure(
            "one call after another, median", f"{seconds * 1e3:.2f} ms", against, f"<= {most}", seconds <= most * fork
        )
    ]


async def busy_cores(quick: bool) -> list[Figure]:
    """Calls of 50 ms of processor time: what share of what the cores can do is done."""
    count, seconds, cores = 60 if quick else 200, 0.05, len(os.sched_getaffinity(0))
    sandbox = PythonSandbox(60, "1GB")

    async def call(number: int) -> None:
        assert await sandbox.execute_code(SPIN.format(seconds=seconds, number=number)) == f"Output:\n{number}"

    def cores_can_do() -> float:
        code = SPIN.format(seconds=seconds * count / cores, number=0)
        started = time.perf_counter()
        workers = [
            subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.DEVNULL) for _ in range(cores)
        ]
        for worker in workers:
            worker.wait()
        return count / (time.perf_counter() - started)

    await numbers(4, 4, call)
    rates = []
    for _ in range(1 if quick else 3):
        possible = await asyncio.to_thread(cores_can_do)
        rates.append((await per_second(count, IN_FLIGHT, call), possible))
    rate, possible = max(rates, key=lambda pair: pair[0] / pair[1])
    least = 0.6 if quick else 0.95
    against = f"{possible:.1f}/s on {cores} cores, {rate / possible:.0%}"
    return [
        Figure(
            "calls of 50 ms of processor time",
            f"{rate:.1f} calls/s",
            against,
            f">= {least:.0%}",
            rate >= least * possible,
        )
    ]


async def event_loop_lag(quick: bool) -> list[Figure]:
    """The longest that the loop was late while 200 busy calls and 20 sleeping ones were in flight."""
    registry = ToolRegistry()
    sleeping = [f"# {number}\nimport time\ntime.sleep(1)\nprint(1)" for number in range(20)]
    busy = [SPIN.format(seconds=0.05, number=number) for number in range(200)]

    async def call(code: str) -> None:
        result = await registry.execute_tool("code_interpreter", {"code": code})
        assert result.outcome == "ok", result

    async def worst(codes: list[str]) -> float:
        lags = []

        async def watch() -> None:
            while True:
                started = time.perf_counter()
                await asyncio.sleep(0.001)
                lags.append(time.perf_counter() - started - 0.001)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*[call(code) for code in codes])
        watcher.cancel()
        return max(lags)

    await call("print(1)")
    alone = await worst(sleeping[:1])
    lag = await worst(busy + sleeping)
    most = 0.25 if quick else 0.02
    name, against = "event loop's worst lag, 220 in flight", f"{alone * 1e3:.1f} ms with one sleeping call"
    return [Figure(name, f"{lag * 1e3:.1f} ms", against, f"< {most * 1e3:g} ms", lag < most)]


async def libraries(quick: bool) -> list[Figure]:
    plain, widened = PythonSandbox(30, "2GB"), PythonSandbox(30, "2GB")
    widened.allowed_modules |= {"numpy", "sympy"}
    count, figures = 30 if quick else 100, []

    def call(sandbox: PythonSandbox, line: str) -> Callable[[int], Awaitable[None]]:
        async def run(number: int) -> None:
            assert await sandbox.execute_code(f"{line}\nprint({number})") == f"Output:\n{number}"

        return run

    cases = [
        ("neither", widened, "import math", 0.5),
        ("numpy", widened, "import numpy", 5),
        ("sympy", widened, "import sympy", 15),
    ]
    for _, sandbox, line, _ in cases:
        await numbers(5, 1, call(sandbox, line))
    for name, sandbox, line, target in cases:
        rounds = []
        for _ in range(3):
            without = await median_seconds(count, call(plain, "import math"))
            rounds.append((await median_seconds(count, call(sandbox, line)) - without, without))
        more, without = sorted(rounds)[1]
        most = 6 * target if quick else target
        value, against = f"{more * 1e3:+.2f} ms", f"{without * 1e3:.2f} ms without"
        figures.append(Figure(f"a call that imports {name}", value, against, f"< {most:g} ms more", more * 1e3 < most))
    return figures


async def measure(quick: bool, with_libraries: bool) -> list[Figure]:
    parts = [throughput, latency, busy_cores, event_loop_lag] + ([libraries] if with_libraries else [])
    figures = []
    for part in parts:
        for figure in await part(quick):
            verdict = "ok    " if figure.reached else "MISSED"
            print(f"{verdict} {figure.name:48} {figure.value:>16} {figure.target:>14}   {figure.baseline}", flush=True)
            figures.append(figure)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls, only robust targets")
    parser.add_argument("--libraries", action="store_true", help="also measure calls that import numpy and sympy")
    options = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, {sys.executable} {sys.version.split()[0]}")
    figures = asyncio.run(measure(options.quick, options.libraries))
    missed = [figure.name for figure in figures if not figure.reached]
    print(f"{len(missed)} of {len(figures)} targets missed: {', '.join(missed)}" if missed else "all targets reached")
    return 1 if missed else 0


if __name__ == "__main__":
    logging.getLogger("retool.sandbox").setLevel("ERROR")
    sys.exit(main())
