"""RETOOL_SANDBOX=ray on a real cluster of several nodes: joins, leaves, and a node that is killed under load."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"

# A driver as vime's is one, in a process of its own, since RETOOL_SANDBOX is read when the plugin is imported.
DRIVER = """
import asyncio, json, os, sys, time
import ray
from ray.cluster_utils import Cluster

path = os.pathsep.join([EXAMPLE, *filter(None, sys.path)])
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
others = [nodes.add_node(num_cpus=1) for _ in range(OTHERS)]
ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
import tool_sandbox as t
from retool.sandbox import ray_pool

async def execute(code):
    return str(await t.tool_registry.execute_tool("code_interpreter", {"code": code}))

def report(**values):
    print(json.dumps(values), flush=True)

async def main():
    free = dict(ray.available_resources())
SCENARIO
asyncio.run(main())
t.shutdown()
ray.shutdown()
nodes.shutdown()
"""


def run_driver(scenario: str, others: int = 2) -> dict:
    """What the scenario reports, from a driver whose cluster has a head and so many other nodes."""
    code = DRIVER.replace("SCENARIO", textwrap.indent(textwrap.dedent(scenario), "    "))
    code = code.replace("EXAMPLE", repr(str(EXAMPLE))).replace("OTHERS", str(others))
    environment = {**os.environ, "RETOOL_SANDBOX": "ray", "PYTHONPATH": str(EXAMPLE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_calls_run_on_every_node_with_the_same_results_and_take_nothing_from_the_trainer():
    told = run_driver(
        """
        outputs = await asyncio.gather(*[execute(f"print({n} ** 2)") for n in range(200)])
        report(right=sum(output == f"Output:\\n{n * n}" for n, output in enumerate(outputs)))
        report(nodes=t.CLUSTER.nodes, limit=t.SEMAPHORE.free)
        after = ray.available_resources()
        report(taken={name: free[name] - after.get(name, 0) for name in ("CPU", "memory")})
        report(error=await execute("1 / 0"), refused=await execute("import os"))
        t.tool_registry.python_sandbox.timeout = 0.5
        report(timeout=await execute("print(1)\\nwhile True: pass"))
        t.tool_registry.python_sandbox.timeout = 60
        task = asyncio.create_task(execute("while True: pass"))
        await asyncio.sleep(1.5)
        task.cancel()
        report(cancelled=[type(result).__name__ for result in await asyncio.gather(task, return_exceptions=True)])
        """
    )
    assert told["right"] == 200 and told["nodes"] == 3 and told["limit"] == 3 * 32
    assert told["taken"] == {"CPU": 0.0, "memory": 0.0}
    assert "ZeroDivisionError" in told["error"] and "not allowed" in told["refused"]
    assert told["timeout"].startswith("Output:\n1\n\nError: timed out") and told["cancelled"] == ["CancelledError"]


def test_no_call_is_lost_when_a_node_is_killed_under_load_and_when_nodes_come_and_go():
    told = run_driver(
        """
        await execute("print(0)")
        report(before=t.CLUSTER.nodes)
        done = []
        async def right(n):
            done.append(await execute(f"import time\\ntime.sleep(0.05)\\nprint({n})"))
            return done[-1] == f"Output:\\n{n}"
        async def many(first, count):
            return sum(await asyncio.gather(*[right(n) for n in range(first, first + count)]))
        load = asyncio.create_task(many(0, 500))
        while len(done) < 50:
            await asyncio.sleep(0.01)
        unfinished = not load.done()
        await asyncio.to_thread(nodes.remove_node, others.pop(), False)
        report(under_load=unfinished, right=await asyncio.wait_for(load, 200))
        while t.CLUSTER.nodes != 2:
            await asyncio.sleep(0.5)
            await execute("print(0)")
        report(after=t.CLUSTER.nodes, limit=t.SEMAPHORE.free)
        others.append(nodes.add_node(num_cpus=1))  # in the main thread: it sets signal handlers
        while t.CLUSTER.nodes != 3:
            await asyncio.sleep(0.5)
            await execute("print(0)")
        report(joined=t.CLUSTER.nodes)
        load = asyncio.create_task(many(500, 200))
        await asyncio.sleep(0.3)
        for node in list(t.CLUSTER._nodes.values())[:2]:
            ray.kill(node.actor)
        report(right_again=await asyncio.wait_for(load, 200))
        """
    )
    assert told["before"] == 3 and told["under_load"] and told["right"] == 500
    assert told["after"] == 2 and told["limit"] == 2 * 32
    assert told["joined"] == 3 and told["right_again"] == 200


def test_ray_is_not_started_where_it_is_not_running_and_other_values_are_an_error():
    code = """
import asyncio, ray, tool_sandbox
try:
    asyncio.run(tool_sandbox.PythonSandbox().execute_code("print(1)"))
except tool_sandbox.SandboxError as error:
    print(error, ray.is_initialized())
"""
    environment = {**os.environ, "RETOOL_SANDBOX": "ray", "PYTHONPATH": str(EXAMPLE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "RETOOL_SANDBOX=ray, but this process is not connected to a Ray cluster False\n", done.stderr
    environment["RETOOL_SANDBOX"] = "rya"
    done = subprocess.run(
        [sys.executable, "-c", "import tool_sandbox"], env=environment, capture_output=True, text=True
    )
    assert "RETOOL_SANDBOX is 'rya'" in done.stderr.splitlines()[-1]
