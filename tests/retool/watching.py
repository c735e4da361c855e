"""Looking at processes from outside, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


def wait_for(condition: Callable[[], object], seconds: float = 120) -> bool:
    """True as soon as the condition holds; AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:g} seconds"
        time.sleep(0.05)
    return True


class Process(NamedTuple):
    parent: int
    group: int
    state: str


def processes(zombies: bool = False) -> dict[int, Process]:
    """All that there are on this machine."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it has ended meanwhile
            if zombies or state != "Z":
                found[int(entry.name)] = Process(int(parent), int(group), state)
    return found


def descendants(root: int, zombies: bool = False) -> set[int]:
    table, found = processes(zombies), {root}
    while more := {pid for pid, process in table.items() if process.parent in found} - found:
        found |= more
    return found - {root}


def group_of(group: int) -> set[int]:
    return {pid for pid, process in processes().items() if process.group == group}


def alive(pid: int) -> bool:
    return pid in processes()


def assert_ended(pids: set[int]) -> None:
    wait_for(lambda: not pids & processes().keys(), 30)
