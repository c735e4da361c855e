"""The sandbox inside Ray's workers, where vime runs it: they are nice 15, and may be killed or cancelled at any
time."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from watching import wait_for

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"
CALLS = 48
EXPECTED = [f"Output:\n{n * n}" for n in range(CALLS)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """A copy, so that its sandboxes are told from any other on this machine by where they come from."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("plugin") / "retool", ignore=ignored)


@pytest.fixture(scope="module")
def cluster(plugin, ray_cluster):
    ray.init(
        address=ray_cluster,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(plugin), *filter(None, sys.path)])}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def sandboxes(plugin):
    """Finds the processes of the plugin's sandboxes: they have its folder among their arguments."""
    folder = os.fsencode(plugin)

    def find(ticks: int = 0) -> set[int]:
        """Those that used so much of a processor."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    used = (entry / "stat").read_text().rpartition(") ")[2].split()[11:13]
                    if folder in (entry / "cmdline").read_bytes().split(b"\0") and sum(map(int, used)) >= ticks:
                        found.add(int(entry.name))
        return found

    return find


async def squares() -> list[str]:
    from tool_sandbox import tool_registry

    calls = [tool_registry.execute_tool("code_interpreter", {"code": f"print({n} ** 2)"}) for n in range(CALLS)]
    return [str(output) for output in await asyncio.gather(*calls)]


async def last_for_ever() -> None:
    from tool_sandbox import PythonSandbox

    await PythonSandbox(600, "256MB").execute_code("while True:\n    pass")


class Host:
    """An actor as vime's rollout manager is one; its methods are coroutines on the actor's own loop."""

    async def about(self) -> tuple[int, int]:
        return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)

    async def squares(self) -> list[str]:
        return await squares()

    async def last_for_ever(self) -> None:
        await last_for_ever()


def test_calls_work_in_an_actor(cluster):
    host = ray.remote(Host).remote()
    _, niceness = ray.get(host.about.remote())
    assert niceness >= 15
    assert ray.get(host.squares.remote(), timeout=120) == EXPECTED
    ray.kill(host)


def test_calls_work_in_a_task(cluster):
    assert ray.get(ray.remote(lambda: asyncio.run(squares())).remote(), timeout=120) == EXPECTED


def last_for_ever_in_a_task(report) -> None:
    report.append_process.remote(os.getpid())
    asyncio.run(last_for_ever())


class Report:
    """Where a task says which process it is."""

    def __init__(self):
        self.processes = []

    def append_process(self, process: int) -> None:
        self.processes.append(process)

    def all(self) -> list[int]:
        return self.processes


@pytest.mark.parametrize("way", ["kill -9", "cancel", "force"])
def test_nothing_is_left_of_a_task_that_ends_with_a_call_in_flight(cluster, sandboxes, way):
    before = sandboxes(ticks=20)  # a worker of Ray is used again, with its pre-forked children
    report = ray.remote(Report).options(num_cpus=0).remote()
    task = ray.remote(last_for_ever_in_a_task).options(max_retries=0).remote(report)
    wait_for(lambda: ray.get(report.all.remote()))
    wait_for(lambda: sandboxes(ticks=20) - before)
    if way == "kill -9":
        os.kill(ray.get(report.all.remote())[0], signal.SIGKILL)
    else:
        ray.cancel(task, force=way == "force")
    with pytest.raises(ray.exceptions.RayError):
        ray.get(task, timeout=60)
    wait_for(lambda: not sandboxes(ticks=20) - before)
    ray.kill(report)


def test_an_infrastructure_error_reaches_a_driver_that_does_not_have_the_plugin(cluster):
    """As a RuntimeError that says what happened: only the worker's side can import the plugin's own type."""

    def failing():
        from tool_sandbox import SandboxError

        raise SandboxError("no worker")

    with pytest.raises(RuntimeError, match="SandboxError: no worker"):
        ray.get(ray.remote(failing).options(max_retries=0).remote(), timeout=60)


@pytest.mark.parametrize("way", ["ray.kill", "kill -9", "cancel"])
def test_nothing_is_left_of_an_actor_that_ends_with_calls_in_flight(cluster, sandboxes, way):
    before = sandboxes()
    host = ray.remote(Host).remote()
    process, _ = ray.get(host.about.remote())
    assert ray.get(host.squares.remote(), timeout=120) == EXPECTED
    busy = sandboxes(ticks=20)  # the worker, maybe
    calls = [host.last_for_ever.remote() for _ in range(4)]
    wait_for(lambda: len(sandboxes(ticks=20) - busy) >= 4)
    if way == "cancel":
        for call in calls:
            ray.cancel(call)
        for call in calls:
            with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
                ray.get(call, timeout=60)
        wait_for(lambda: not sandboxes(ticks=20) - busy)
        assert ray.get(host.squares.remote(), timeout=120) == EXPECTED
    if way == "kill -9":
        os.kill(process, signal.SIGKILL)
    else:
        ray.kill(host)
    wait_for(lambda: not sandboxes() - before)
