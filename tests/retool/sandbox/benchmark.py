"""Measures the sandbox against what it replaces, both in the same run, and fails when a target is missed.

    python tests/retool/sandbox/benchmark.py [--quick] [--libraries] [--nodes N]

Every figure stands beside its baseline and its target. `--quick` makes fewer calls and holds the figures against
looser targets, which a busy machine does not upset (for CI). `--libraries` adds the figures for numpy and sympy, which
must be installed. `--nodes` compares RETOOL_SANDBOX=ray on a cluster of so many nodes, all on this machine, with one
node and with the local sandbox. The exit status is 1 when a target is missed; a figure without one only informs.

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

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"
sys.path.insert(0, str(EXAMPLE))

import tool_sandbox
from retool.sandbox.pool import POOL
from tool_sandbox import PythonSandbox, ToolRegistry

IN_FLIGHT = 32
ONE_LINE = "print({number} + 1)"
# Functions, loops and texts as a model writes them, 98 lines.
NINETY_EIGHT_LINES = "\n".join(
    [
        "from math import gcd",
        *(
            f"def step_{n}(value, table={{}}):\n    # one of many small functions\n    for divisor in range(2, 9):\n"
            f"        if value % divisor == 0 and gcd(value, {n + 2}) == 1:\n            table[divisor] = value // divisor\n"
            f"    return value + {n}, f'{{value}} after step {n}'"
            for n in range(15)
        ),
        "total, texts = {number}, []",
        *(f"total, text = step_{n}(total)" for n in range(3)),
        "for n in range(3):\n    texts.append(text)",
        "print(total)",
    ]
)
OVER_1000_CHARACTERS = (
    "# {number}" + "\n# a remark, of which a model that thinks in its code writes many\n" * 20 + "print({number})"
)
LARGE_OUTPUT = "print('x' * 200_000, {number})"
MANY_LINES = "for line in range(20_000): print('a line', {number})"
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


FORK_COST = """
import os, resource
def spent(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime
for _ in range({count}):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
print((spent(resource.RUSAGE_SELF) + spent(resource.RUSAGE_CHILDREN)) / {count})
"""
NODES = """
import asyncio, os, sys
sys.path[:0] = [{example!r}, {tests!r}]
import ray
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "include_dashboard": False}})
for _ in range({nodes} - 1):
    nodes.add_node(num_cpus=1)
path = os.pathsep.join([{example!r}, *filter(None, sys.path)])
ray.init(address=nodes.address, log_to_driver=False, runtime_env={{"env_vars": {{"PYTHONPATH": path}}}})
import tool_sandbox
from benchmark import median_seconds, numbers, per_second, short_call
async def main():
    call = short_call(tool_sandbox.ToolRegistry())
    await numbers(200, 32, call)
    rate, one = await per_second(1500, 64, call), await median_seconds(200, call)
    tool_sandbox.CLUSTER.close()
    tool_sandbox.CLUSTER = None
    await numbers(200, 32, call)
    print(rate, one, await median_seconds(200, call))
asyncio.run(main())
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


async def programs(quick: bool) -> list[Figure]:
    """Throughput of programs of several shapes, beside a bare interpreter process for each."""
    registry, figures = ToolRegistry(), []
    shapes = [
        ("one line", ONE_LINE, 10.0),
        ("98 lines", NINETY_EIGHT_LINES, 5.0),
        ("over 1000 characters", OVER_1000_CHARACTERS, None),
        ("200 KB of output", LARGE_OUTPUT, 1.0),
        ("200 KB in 20,000 lines", MANY_LINES, 1.0),
    ]
    for name, code, target in shapes:
        count = 60 if quick else 300

        async def ours(number: int, code: str = code) -> None:
            # A brace of the program's own is no field of the template.
            result = await registry.execute_tool("code_interpreter", {"code": code.replace("{number}", str(number))})
            assert result.outcome == "ok", result

        async def bare(number: int, code: str = code) -> None:
            source = code.replace("{number}", str(number))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", source, stdout=asyncio.subprocess.PIPE
            )
            await process.communicate()
            assert process.returncode == 0

        await numbers(64, IN_FLIGHT, ours)
        pairs = []
        for _ in range(1 if quick else 5):
            pairs.append((await per_second(count // 3, IN_FLIGHT, bare), await per_second(count, IN_FLIGHT, ours)))
        ratio = statistics.median(rate / baseline for baseline, rate in pairs)
        baseline, rate = (statistics.median(column) for column in zip(*pairs, strict=True))
        least = None if target is None else target * (0.25 if quick else 1)
        figures.append(
            Figure(
                f"{name}, {IN_FLIGHT} in flight / python -I -S",
                f"{rate:.0f} calls/s",
                f"{baseline:.0f}/s, {ratio:.1f} times",
                "-" if least is None else f">= {least:g} times",
                least is None or ratio >= least,
            )
        )
    return figures


def processor_seconds(process: int) -> float:
    """Of a worker's tree: itself, the children that it has, and those that it has reaped."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if int(entry.name) == process or int(fields[1]) == process:
                ticks += sum(map(int, fields[11:15]))
                if int(entry.name) != process:
                    ticks += sum(
                        sum(map(int, (child / "stat").read_text().rpartition(") ")[2].split()[11:13]))
                        for child in Path("/proc").iterdir()
                        if child.name.isdigit() and _parent(child) == int(entry.name)
                    )
    return ticks / os.sysconf("SC_CLK_TCK")


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


async def processor_time(quick: bool) -> list[Figure]:
    """What a call costs all processes together, beside a fork of a fresh interpreter."""
    registry, count = ToolRegistry(), 400 if quick else 2000
    await numbers(64, IN_FLIGHT, short_call(registry))
    (worker,) = POOL.workers()
    forks = subprocess.run(
        [sys.executable, "-I", "-S", "-c", FORK_COST.format(count=count)], capture_output=True, check=True
    )
    fork = float(forks.stdout)
    host, tree = time.process_time(), processor_seconds(worker.process.pid)
    await numbers(count, IN_FLIGHT, short_call(registry))
    host, tree = (time.process_time() - host) / count, (processor_seconds(worker.process.pid) - tree) / count
    value = f"{(host + tree) * 1e3:.2f} ms"
    against = (
        f"{host * 1e3:.2f} ms of it the host's; a bare fork {fork * 1e3:.2f} ms, {(host + tree) / fork:.1f} times"
    )
    return [Figure("processor time of a short call", value, against, "-", True)]


async def burst(quick: bool) -> list[Figure]:
    """256 calls at once on a sandbox that rests, all but the limit on concurrent calls waiting in line."""
    registry, size, times = ToolRegistry(), 256, []
    await numbers(20, 1, short_call(registry))
    for _ in range(1 if quick else 5):
        await asyncio.sleep(0.5)
        started = time.perf_counter()
        await numbers(size, size, short_call(registry))
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    return [Figure("burst of 256 from idle", f"{seconds * 1e3:.0f} ms", f"{size / seconds:.0f} calls/s", "-", True)]


def proportional_megabytes(process: int) -> float:
    """Of a process and all below it, shared pages counted once."""
    total, below = 0.0, [process]
    while below:
        entry = Path(f"/proc/{below.pop()}")
        try:
            rollup = dict(line.split(":") for line in (entry / "smaps_rollup").read_text().splitlines()[1:])
            total += int(rollup["Pss"].split()[0]) / 1024
            for task in (entry / "task").iterdir():
                below += map(int, (task / "children").read_text().split())
        except (OSError, KeyError):
            continue
    return total


async def memory(*modules: str) -> Figure:
    sandbox = PythonSandbox(30, "2GB")
    sandbox.allowed_modules |= set(modules)
    tool_sandbox.shutdown()
    line = f"import {', '.join(modules)}\n" if modules else ""
    await sandbox.execute_code(line + "print(1)")
    await asyncio.sleep(0.5)
    (worker,) = POOL.workers()
    megabytes, children = proportional_megabytes(worker.process.pid), len(worker.preforked)
    name = f"memory of a worker with {' and '.join(modules) or 'no library'}"
    return Figure(name, f"{megabytes:.0f} MB", f"{children} pre-forked children in it", "-", True)


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


async def first_library_call(quick: bool) -> list[Figure]:
    """After the workers were started beforehand, as at the start of a rollout."""
    sandbox, figures = PythonSandbox(30, "2GB"), []
    sandbox.allowed_modules |= {"numpy", "sympy"}
    for module in ("numpy", "sympy"):
        times = []
        for _ in range(1 if quick else 5):
            tool_sandbox.shutdown()
            sandbox.preload()
            while len(POOL.workers()) < 3:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            started = time.perf_counter()
            result = await sandbox.execute_code(f"import {module}\nprint({module}.__name__)")
            times.append(time.perf_counter() - started)
            assert result == f"Output:\n{module}", result
        seconds, most = statistics.median(times), 0.06 if quick else 0.01
        name = f"first call with {module} after preload"
        figures.append(Figure(name, f"{seconds * 1e3:.1f} ms", "", f"< {most * 1e3:g} ms", seconds < most))
    return figures


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


async def plain_memory(quick: bool) -> list[Figure]:
    return [await memory()]


async def library_memory(quick: bool) -> list[Figure]:
    return [await memory("numpy"), await memory("numpy", "sympy")]


def on_nodes(count: int) -> None:
    """Calls a second on a cluster of one and of `count` nodes, and what a call costs more than in the local
    sandbox."""
    rates = {}
    for nodes in (1, count):
        code = NODES.format(nodes=nodes, example=os.fspath(EXAMPLE), tests=os.fspath(Path(__file__).parent))
        environment = {**os.environ, "RETOOL_SANDBOX": "ray"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rates[nodes], one, local = map(float, done.stdout.split()[-3:])
        print(
            f"{nodes} node(s): {rates[nodes]:.0f} calls/s, {one * 1e3:.2f} ms a call, {local * 1e3:.2f} ms in the local sandbox"
        )
    print(f"{count} nodes on {len(os.sched_getaffinity(0))} cores: {rates[count] / rates[1]:.2f} times one node")


async def measure(quick: bool, with_libraries: bool) -> list[Figure]:
    parts = [throughput, programs, latency, busy_cores, event_loop_lag, processor_time, burst, plain_memory]
    parts += [libraries, first_library_call, library_memory] if with_libraries else []
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
    parser.add_argument("--nodes", type=int, help="measure a Ray cluster of so many nodes instead")
    options = parser.parse_args()
    if options.nodes:
        on_nodes(options.nodes)
        return 0
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, {sys.executable} {sys.version.split()[0]}")
    figures = asyncio.run(measure(options.quick, options.libraries))
    missed = [figure.name for figure in figures if not figure.reached]
    print(f"{len(missed)} of {len(figures)} targets missed: {', '.join(missed)}" if missed else "all targets reached")
    return 1 if missed else 0


if __name__ == "__main__":
    logging.getLogger("retool.sandbox").setLevel("ERROR")
    sys.exit(main())
