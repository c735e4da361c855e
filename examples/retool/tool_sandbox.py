"""What the model's calls of tools come to: which tools there are, which code may run, and what the model is told of
it.

    host process (any event loops, in any threads)            |  jail (``retool/sandbox/worker.py``, no privileges)
                                                              |
    ToolRegistry.execute_tool     takes SEMAPHORE, once       |
      PythonSandbox.execute_code  finds the worker            |
        pool: workers             pre-forked children         |
            control, a leash per child ---------------------- | --> worker: confined once, forks, kills, reaps
        call: source, records of output --------------------- | --> child: confined, compiles, checks, runs, exits

With RETOOL_SANDBOX=ray, `execute_code` hands the call to a node of the Ray cluster instead, whose own pool runs it.

Contract. Whatever the model's code does is an observation: a text (``ToolOutput``) that says what was printed or went
wrong. Whatever the sandbox does wrong is an infrastructure error (``SandboxError``), never an observation, since a
model must not be trained on it. Cancelling the task that awaits a call ends the call at once. Nothing starts at
import; workers start at the first call, are shared by all loops and threads of the process, and end with it, even if
it is killed. Linux only.

Invariants. No code of the model's is parsed, compiled, matched or walked outside the jail. The limit on concurrent
calls is taken in ``ToolRegistry.execute_tool`` and nowhere else. No byte from the jail is trusted: a record is text to
show or one of a few letters, and what a call may send, hold and last is bounded. The host waits for no process while a
loop runs: closing a call's sockets is what kills its child.

Why this way, with numbers: docs/design.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from retool.chat import CODE_INTERPRETER, CODE_TOOL, SYSTEM_PROMPT, code_interpreter_spec, neutralize, shorten
from retool.observations import Parts, fit
from retool.sandbox import call, policy_tables, ray_pool, wire
from retool.sandbox.pool import POOL, WorkerKey, worker_key, worker_keys
from retool.sandbox.results import Reply, SandboxError, ToolOutput, observation
from retool.sandbox.semaphore import ProcessSemaphore
from retool.sandbox.wire import LAYERS

__all__ = [
    "CODE_INTERPRETER",
    "CODE_TOOL",
    "LAYERS",
    "SEMAPHORE",
    "SYSTEM_PROMPT",
    "TOOL_CONFIGS",
    "PythonSandbox",
    "SandboxError",
    "ToolOutput",
    "ToolRegistry",
    "neutralize",
    "shorten",
    "shutdown",
    "tool_registry",
]

TOOL_CONFIGS: dict[str, Any] = {
    "max_turns": 20,
    "max_tool_calls": 16,
    "tool_concurrency": 32,
    # Seconds: what ends at all ends in a part of this, and a batch waits for its slowest sample. What a call waits for
    # a processor does not count, since a busy machine must not make its work look too slow.
    "python_timeout": 10.0,
    # What one call may map beside the interpreter. With all calls at their limit it is 32 GB of the machine's memory.
    "python_memory_limit": "1GB",
    # Digits are a token each: 4000 characters are about half of the published response budget of 8192 tokens.
    "max_output_chars": 4000,
    # Modules that code may import beside the default set, also libraries: RETOOL_ALLOWED_MODULES=numpy,sympy. They are
    # named in the tool's description, in RL and SFT alike.
    "allowed_modules": tuple(filter(None, re.split(r"[\s,]+", os.environ.get("RETOOL_ALLOWED_MODULES", "")))),
    # Of the last episodes, how many may be lost to failures of the engine or the sandbox before the run is stopped.
    "max_failure_rate": 0.5,
    # What a wrong answer gains by each call whose code ran, in score; 0 leaves right and wrong alone.
    "tool_bonus": 0.05,
    # By what a group of samples is seen to differ, so that it is trained on: "accuracy", or "score" as vime has it. In
    # a group without a right answer only the reward for calling the tool differs, and normalization makes it full
    # size.
    "advantage_spread": "accuracy",
    # What becomes of a sample that uses up its budget of tokens: "wrong", scored as any other; "mask", not trained on;
    # or a number: as fewer tokens of the budget are left than that, its score falls, by 1 in the end (DAPO).
    "overlong": "wrong",
}

SEMAPHORE = ProcessSemaphore(TOOL_CONFIGS["tool_concurrency"])
os.register_at_fork(after_in_child=SEMAPHORE.after_fork)


def _scale_concurrency(nodes: int) -> None:
    if isinstance(SEMAPHORE, ProcessSemaphore):
        SEMAPHORE.resize(TOOL_CONFIGS["tool_concurrency"] * max(1, nodes))


def _cluster() -> ray_pool.Cluster | None:
    """Where calls run: None, in this process's own sandbox; else on all nodes of the Ray cluster."""
    where = os.environ.get("RETOOL_SANDBOX", "local")
    if where not in ("local", "ray"):
        raise ValueError(
            f"RETOOL_SANDBOX is {where!r}: calls run 'local', in this process's sandbox, or on nodes of 'ray'"
        )
    return ray_pool.Cluster(on_change=_scale_concurrency) if where == "ray" else None


CLUSTER = _cluster()


class PythonSandbox:
    """Runs model-written Python.

    `allowed_modules` may be widened. A call whose source names a library runs under a worker that has loaded it,
    others pay nothing for it. Such a worker may read below the library directories, for late imports, and its calls
    can tell by a path whether a file is there, and its size. A library that evaluates strings, as sympy does, gives up
    the source policy; the jail is the same.
    """

    def __init__(
        self,
        timeout: float = TOOL_CONFIGS["python_timeout"],
        memory_limit: int | str = TOOL_CONFIGS["python_memory_limit"],
        layers_off: Iterable[str] = (),
    ):
        """
        Args:
            timeout: seconds that a call may compute, sleep, or wait for anything but a processor.
            memory_limit: what a call may add to the worker's memory, in bytes or as "1GB".
            layers_off: layers of the jail to leave out, of `LAYERS`. For tests, which try each layer alone.

        Raises:
            ValueError: the memory limit cannot be read, or TOOL_CONFIGS["allowed_modules"] names a module that is not
                there.
        """
        for name in TOOL_CONFIGS["allowed_modules"]:
            _check_installed(name)
        self.timeout = float(timeout)
        self.memory_bytes = _memory_bytes(memory_limit)
        self.allowed_modules = {*policy_tables.DEFAULT_MODULES, *TOOL_CONFIGS["allowed_modules"]}
        self._layers_off = tuple(layers_off)

    async def execute_code(self, code: str) -> ToolOutput:
        """The observation for this code.

        Raises:
            SandboxError: the sandbox failed.
        """
        most, mode = TOOL_CONFIGS["max_output_chars"], wire.CHECK_AND_RUN
        if getattr(self._check_code_safety, "__func__", None) is not PythonSandbox._check_code_safety:
            safe, message = self._check_code_safety(code)
            if not safe:
                return ToolOutput.of(fit(Parts(notice=f"not allowed: {message}"), most), "refused")
            mode = wire.RUN
        try:
            reply = await self._run(mode, code, keep=4 * most)
        except ValueError as error:
            return ToolOutput.of(fit(Parts(notice=f"not allowed: {error}"), most), "refused")
        return observation(reply, self.timeout, self.memory_bytes, most)

    async def _run(self, mode: int, code: str, keep: int) -> Reply:
        """`SandboxError`; `ValueError`: it is no source that Python could read."""
        code = code.removeprefix("\ufeff")
        if "\r" in code:
            code = code.replace("\r\n", "\n").replace("\r", "\n")  # as Python itself reads it
        request = wire.request(mode, self.timeout, code)
        key = worker_key(self._keys(), code)
        return await (CLUSTER.run if CLUSTER else call.run)(key, request, self.timeout, keep)

    def _keys(self) -> tuple[WorkerKey, ...]:
        return worker_keys(frozenset(self.allowed_modules), self.memory_bytes, self._layers_off)

    def preload(self) -> None:
        """Have the workers started that calls will need, libraries loaded; returns at once. Calls do not depend on
        it."""
        for key in self._keys():
            CLUSTER.preload(key) if CLUSTER else POOL.start(key)

    def _check_code_safety(self, code: str) -> tuple[bool, str]:
        """Whether the code may run, of which a child of its own is asked; blocks for some milliseconds.

        A test or a user may replace this on an instance; it is looked up for each call, on its loop. A syntax error is
        not a safety matter: nothing runs, and the observation is Python's own message.

        Returns:
            (True, ""), or (False, what is refused and what may be used instead).
        """
        most = TOOL_CONFIGS["max_output_chars"]
        try:
            with ThreadPoolExecutor(1) as thread:  # in this one a loop may be running
                reply = thread.submit(asyncio.run, self._run(wire.CHECK, code, keep=most)).result()
        except (ValueError, SandboxError, RuntimeError) as error:
            return False, str(error)
        told = observation(reply, self.timeout, self.memory_bytes, most)
        if told.outcome in ("ok", "syntax_error"):
            return True, ""
        return False, told.removeprefix("Error: ").removeprefix("not allowed: ")


def _check_installed(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ValueError(
            f"RETOOL_ALLOWED_MODULES (TOOL_CONFIGS['allowed_modules']) names {module!r}, which cannot be imported by "
            f"{sys.executable}: install it there, or leave it out"
        )


def _memory_bytes(limit: int | str) -> int:
    """4294967296, "4GB" and "4096 MB" are the same; units are powers of 1024."""
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", limit, re.IGNORECASE)
    if not match:
        raise ValueError(f"memory limit {limit!r} is not a number of bytes, nor one with KB, MB, GB or TB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


ToolHandler = Callable[[dict[str, Any]], Awaitable[str]]


class ToolRegistry:
    """The tools that the model is told of.

    Attributes:
        tools: the specs by name, in the order in which the prompt shows them.
        python_sandbox: what runs the calls of `code_interpreter`.
    """

    def __init__(self) -> None:
        self.tools: dict[str, dict[str, Any]] = {}
        self._handlers: dict[str, ToolHandler | None] = {}
        self.python_sandbox = PythonSandbox()
        self.register_tool(CODE_TOOL, code_interpreter_spec(TOOL_CONFIGS["allowed_modules"]), self._run_code)

    def register_tool(self, name: str, spec: dict[str, Any], handler: ToolHandler | None = None) -> None:
        """Add or replace a tool.

        Args:
            name: as the model calls it.
            spec: what the prompt shows of it; its function has the same name.
            handler: awaited with the arguments, returns the observation. An exception that it raises is an
                infrastructure error: what the model did wrong, the handler reports in the text it returns. Without a
                handler the tool is shown but answered as not found.

        Raises:
            ValueError: the spec is for another name.
        """
        if spec.get("function", {}).get("name") != name:
            raise ValueError(
                f"tool {name!r} has a spec for {spec.get('function', {}).get('name')!r}: give both one name"
            )
        self.tools[name] = spec
        self._handlers[name] = handler

    def get_tool_specs(self) -> list[dict[str, Any]]:
        """The specs as the prompt shows them, in order."""
        return list(self.tools.values())

    async def execute_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """The observation for one call, under the limit on concurrent calls.

        Raises:
            SandboxError: the sandbox or the tool's handler failed.
        """
        handler = self._handlers.get(name)
        if handler is None:
            known = ", ".join(tool for tool in self.tools if self._handlers[tool])
            return ToolOutput(f"Error: tool {name!r} was not found. Available: {known}.", "not_found")
        if not isinstance(arguments, dict):
            return ToolOutput(f"Error: the arguments of {name!r} must be a JSON object.", "invalid")
        asked = time.monotonic()
        async with SEMAPHORE:
            started = time.monotonic()
            try:
                result = await handler(arguments)
            except SandboxError:
                raise
            except Exception as error:
                raise SandboxError(f"the handler of tool {name!r} failed: {error!r}") from error
        if not isinstance(result, str):
            raise SandboxError(f"the handler of tool {name!r} returned {type(result).__name__}, not a string")
        output = result if isinstance(result, ToolOutput) else ToolOutput(result)
        output.queued, output.ran_seconds = started - asked, time.monotonic() - started
        return output

    async def _run_code(self, arguments: dict[str, Any]) -> str:
        if "code" not in arguments:
            return ToolOutput('Error: the argument "code" is missing. Put the program into it.', "invalid")
        code = arguments["code"]
        if not isinstance(code, str):
            return ToolOutput(f'Error: the argument "code" must be a string, not {type(code).__name__}.', "invalid")
        if not code.strip():
            return ToolOutput('Error: the argument "code" is empty. Put the program into it.', "invalid")
        return await self.python_sandbox.execute_code(code)


tool_registry = ToolRegistry()


def shutdown() -> None:
    """End every process that the sandbox has started; the next call starts anew. Blocks for some milliseconds.

    Calls in flight end with a SandboxError. For tests; at the exit of the process it happens by itself.
    """
    if CLUSTER:
        CLUSTER.close()
    POOL.close()
