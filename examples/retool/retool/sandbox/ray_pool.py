"""Calls on every node of the Ray cluster that vime already runs on: RETOOL_SANDBOX=ray.

    execute_tool -> execute_code -> run --- Ray ---> SandboxHost, one actor per node -> call.run, the node's sandbox

Contract: `run` is `call.run`, with the same limits and the same results. A lost actor or node costs a retry elsewhere,
never a call; a call may therefore run twice, which its code cannot tell. Nothing starts Ray where it is not running.

The actors take no CPU, no GPU and no memory of what Ray hands out, so that no placement of the trainer changes. They
have names, so that all processes of a job share one per node, and end with the process that made them: the others make
new ones. Nodes that join or leave are seen within REFRESH_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from retool.sandbox import call, pool
from retool.sandbox.pool import POOL, WorkerKey
from retool.sandbox.results import Reply, SandboxError

REFRESH_SECONDS = 2.0
MAX_LOST_SECONDS = 180.0  # that a call is sent again for, where actors and nodes are lost
RETRY_SECONDS = 0.2
MAX_FAILED_NODES = 3  # whose sandbox fails at a call, until the failure is the call's
NAMESPACE = "retool-sandbox"


class SandboxHost:
    """What runs on a node: an actor whose methods are coroutines on a loop of its own."""

    async def run(self, key: tuple[Any, ...], request: bytes, timeout: float, keep: int) -> Reply | str:
        """`call.run`; an infrastructure error comes back as its text, since the caller decides what becomes of it."""
        try:
            return await call.run(WorkerKey(*key), request, timeout, keep)
        except SandboxError as error:
            return str(error)

    async def preload(self, key: tuple[Any, ...]) -> None:
        POOL.start(WorkerKey(*key))


class _Node:
    """A node's actor, and how many calls of this process it has."""

    def __init__(self, actor: Any, cores: float):
        self.actor, self.cores, self.calls = actor, max(1.0, cores), 0


class Cluster:
    """The nodes as this process knows them. Safe in all threads and on all loops.

    Args:
        on_change: called with the number of nodes when it changes.
    """

    def __init__(self, on_change: Callable[[int], None] = lambda nodes: None):
        self.on_change = on_change
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._nodes: dict[str, _Node] = {}  # by Ray's identifier
        self._refreshed = float("-inf")

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    def refresh(self) -> None:
        """Follow joins and leaves. Blocks for some milliseconds.

        Raises:
            SandboxError: Ray is not running in this process.
        """
        import ray

        if not ray.is_initialized():
            raise SandboxError("RETOOL_SANDBOX=ray, but this process is not connected to a Ray cluster")
        with self._refreshing:
            if time.monotonic() - self._refreshed < REFRESH_SECONDS:
                return
            known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            alive = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in known if node["Alive"]}
            new = {name: _Node(_actor(name), cores) for name, cores in alive.items() if name not in self._nodes}
            with self._lock:
                self._nodes = {name: node for name, node in self._nodes.items() if name in alive} | new
                count = len(self._nodes)
            self._refreshed = time.monotonic()
            self.on_change(count)

    async def follow(self) -> None:
        """`refresh`, if it is time, without holding the loop."""
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            await asyncio.to_thread(self.refresh)

    @contextlib.contextmanager
    def least_loaded(self, avoided: set[_Node]) -> Iterator[_Node | None]:
        """A node that has few calls for its cores, one of `avoided` only where there is no other; None: there is
        none."""
        with self._lock:
            nodes = [node for node in self._nodes.values() if node not in avoided] or list(self._nodes.values())
            node = min(nodes, key=lambda node: (node.calls / node.cores, random.random()), default=None)
            if node:
                node.calls += 1
        try:
            yield node
        finally:
            if node:
                with self._lock:
                    node.calls -= 1

    def forget(self, node: _Node) -> None:
        """Its actor is lost: have another made if the node is still there."""
        with self._lock:
            self._nodes = {name: known for name, known in self._nodes.items() if known is not node}
        self._refreshed = float("-inf")

    async def run(self, key: WorkerKey, request: bytes, timeout: float, keep: int) -> Reply:
        """`call.run`, on the node with the least to do.

        Raises:
            SandboxError: Ray is not running here, the sandboxes of several nodes failed, or nodes were lost for
                minutes.
        """
        from ray.exceptions import RayError

        deadline = time.monotonic() + MAX_LOST_SECONDS
        # A node that is cut off answers nothing, and Ray takes its time to say so.
        longest = 2 * (timeout + call.longest_wait(timeout) + pool.MAX_START_SECONDS)
        failed: set[_Node] = set()
        reason = "no node is there"
        while True:
            await self.follow()
            with self.least_loaded(failed) as node:
                if node:
                    try:
                        answer = await _answer(node.actor.run.remote(tuple(key), request, timeout, keep), longest)
                    except (RayError, TimeoutError, asyncio.TimeoutError) as error:
                        self.forget(node)
                        reason = (
                            f"its actor was lost: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                        )
                    else:
                        if isinstance(answer, Reply):
                            return answer
                        failed.add(node)
                        reason = str(answer)
            if len(failed) >= min(MAX_FAILED_NODES, max(1, self.nodes)) or time.monotonic() > deadline:
                raise SandboxError(f"a call could not be run on any node: {reason}")
            await asyncio.sleep(RETRY_SECONDS)

    def preload(self, key: WorkerKey) -> None:
        """Have every node start the worker of `key`; returns at once."""
        self.refresh()
        with self._lock:
            actors = [node.actor for node in self._nodes.values()]
        for actor in actors:
            actor.preload.remote(tuple(key))

    def close(self) -> None:
        """End the actors; the next call makes new ones."""
        import ray

        with self._lock:
            nodes, self._nodes = self._nodes, {}
        self._refreshed = float("-inf")
        for node in nodes.values() if ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                ray.kill(node.actor)


async def _answer(reference: Any, seconds: float) -> Any:
    """What the call comes to; it is cancelled with the task that awaits it."""
    import ray

    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise


def _actor(node: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(SandboxHost)
        .options(
            name=f"retool-sandbox-{node}",
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote()
    )
