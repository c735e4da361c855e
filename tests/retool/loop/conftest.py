"""What several files of the loop's tests share: a rollout over a scripted engine, and a tool in the sandbox's
place."""

import asyncio
from types import SimpleNamespace

import pytest
import tool_sandbox
from scripted import Rollout, printed


@pytest.fixture
def rollout(monkeypatch):
    made = Rollout(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def tool(monkeypatch):
    """The sandbox's place taken by a function that notes its calls; `tool.answer` is what is printed, or may raise."""
    seen = SimpleNamespace(codes=[], answer="42", concurrent=0)

    async def execute_code(code):
        seen.codes.append(code)
        answer = seen.answer(code) if callable(seen.answer) else seen.answer
        return printed(await answer if asyncio.iscoroutine(answer) else answer)

    monkeypatch.setattr(tool_sandbox.tool_registry.python_sandbox, "execute_code", execute_code)
    return seen
