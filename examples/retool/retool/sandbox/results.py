"""What comes of a call: the records of its child, the observation they make, and the error where there can be none.

Invariant. No byte from the jail is trusted: a record is text to show or one of a few letters, and what is kept of it
is bounded here.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys

from retool.chat import shorten
from retool.observations import Parts, fit, memory_hint, slept, timed_out, word
from retool.sandbox import wire

MAX_OUTPUT_BYTES = 16 * 1024**2  # after this the call is ended
# Nor may a call send more records than this, each of which costs the host some microseconds. A child coalesces what is
# printed: a call that prints all of the above within its time sends fewer than a thousand.
MAX_RECORDS = 4096
# Of calls whose processor time was up: by themselves, or killed by the kernel where Python could not act on it.
_STACK_SIGNALS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
TIME_UP_STATUSES = (wire.CPU_TIME_UP, -signal.SIGVTALRM)


class SandboxError(RuntimeError):
    """An infrastructure error: the sandbox failed, not the model's code. There is no observation to train on."""

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        """As a plain RuntimeError: a driver of Ray that lacks this module could not read anything else, and would show
        its own trouble with that instead of this error."""
        return RuntimeError, (f"SandboxError: {self}",)


class ToolOutput(str):
    """An observation.

    Attributes:
        outcome: what it reports: "ok", "error" (an exception in the code), "syntax_error" (Python cannot compile it),
            "empty" (no statement, comments alone), "timeout", "memory", "too_long" (ended for printing without end),
            "crashed" (the interpreter died), "refused" (by the source policy), "invalid" (no usable arguments),
            "not_found" (no such tool).
        parts: what it is made of, from which `observations.word` makes it in another dialect; None where it is one
            text in all dialects.
        queued: seconds that the call waited for its place under the limit on concurrent calls.
        ran_seconds: seconds from then until its end.
    """

    outcome: str
    parts: Parts | None
    queued: float = 0.0
    ran_seconds: float = 0.0

    def __new__(cls, text: str, outcome: str = "ok", parts: Parts | None = None) -> ToolOutput:
        output = super().__new__(cls, text)
        output.outcome, output.parts = outcome, parts
        return output

    @classmethod
    def of(cls, parts: Parts, outcome: str) -> ToolOutput:
        return cls(word(parts, "tool_call"), outcome, parts)


_NOT_TEXT = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00\x1b]")  # what a terminal would act on, and NUL


def cleaned(text: str) -> str:
    """What a call wrote, without terminal codes and without the folders of this machine.

    Messages of Python and of libraries name files (`cannot import name ... from ...`, a module's repr): what is left
    of them are paths below the library's own folder.
    """
    text = _NOT_TEXT.sub("", text) if "\x1b" in text or "\0" in text else text
    return _folders(tuple(sys.path)).sub("", text) if "/" in text else text


@functools.lru_cache(maxsize=4)
def _folders(path: tuple[str, ...]) -> re.Pattern[str]:
    folders = {os.path.dirname(os.__file__), os.path.dirname(__file__), os.path.expanduser("~"), *path}
    folders |= {folder for folder in (sys.prefix, sys.base_prefix) if folder.count("/") > 2}
    folders |= {os.path.realpath(folder) for folder in folders if folder}
    named = sorted((folder.rstrip("/") for folder in folders if folder.count("/") > 1 or folder == "/root"), key=len)
    return re.compile("(?:" + "|".join(re.escape(folder) for folder in reversed(named)) + ")/")


class Capture:
    """The beginning and the end of a stream of bytes, in bounded memory.

    Attributes:
        size: bytes that came in, kept or not.
    """

    def __init__(self, keep: int):
        self.keep, self.size = keep, 0
        self.head, self.tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self.keep - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.keep:
            del self.tail[: -self.keep]

    def text(self, most: int) -> str:
        """At most `most` characters, among them a note of what is left out between head and tail."""
        dropped = self.size - len(self.head) - len(self.tail)
        if not dropped:
            return shorten(cleaned((self.head + self.tail).decode("utf-8", "replace")).removesuffix("\n"), most)
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return shorten(cleaned(f"{head}{tail}").removesuffix("\n"), most, also_dropped=dropped)


_LAST = {wire.DONE, wire.EMPTY, wire.RAISED, wire.NO_MEMORY, wire.REFUSED, wire.UNREADABLE}


class Reply:
    """What has come of a call so far.

    Attributes:
        final: letter and text of the child's last record.
        exit_status: from the worker, if the child ended without such a record; negative: the signal.
        ended: "timeout" or "too_long", where the host ended the call.
        cpu_seconds: processor time that the call had used when its time was up.
    """

    def __init__(self, keep: int):
        self.output, self.errors = Capture(keep), Capture(keep)
        self.final: tuple[bytes, str] | None = None
        self.exit_status = 0
        self.ended = ""
        self.cpu_seconds = 0.0
        self.records = 0

    def add(self, record: bytes) -> bool:
        """Take in a record; True where nothing more is of interest."""
        letter, data = record[:1], record[1:]
        self.records += 1
        if letter == wire.OUTPUT:
            self.output.add(data)
        elif letter in _LAST:
            self.final = letter, data.decode("utf-8", "replace")
            return True
        else:
            self.errors.add(data)
        if self.output.size + self.errors.size > MAX_OUTPUT_BYTES or self.records > MAX_RECORDS:
            self.ended = "too_long"
            return True
        return False


def observation(reply: Reply, timeout: float, memory_bytes: int, most: int) -> ToolOutput:
    """What the model is told of a call that has ended.

    Args:
        reply: of a call that has ended.
        timeout: the call's limit, in seconds.
        memory_bytes: the call's limit.
        most: characters of the observation.
    """
    outcome, exception, notice = _ending(reply, timeout, memory_bytes)
    notice = shorten(cleaned(notice), most // 2)
    errors = reply.errors.text(most // 4) if reply.errors.size else None
    parts = fit(
        Parts(None, errors, cleaned(exception), notice), most, reply.output.text if reply.output.size else None
    )
    return ToolOutput.of(parts, outcome)


def _ending(reply: Reply, timeout: float, memory_bytes: int) -> tuple[str, str, str]:
    """(outcome, exception, notice) of `Parts`."""
    if reply.ended == "too_long":
        return "too_long", "", f"ended after printing more than {MAX_OUTPUT_BYTES} bytes. Print only what is needed."
    if reply.final:
        letter, text = reply.final
        if letter == wire.NO_MEMORY:
            return "memory", text, memory_hint(memory_bytes)
        if letter == wire.REFUSED:
            return "refused", "", f"not allowed: {text}"
        outcomes = {wire.RAISED: "error", wire.UNREADABLE: "syntax_error", wire.EMPTY: "empty", wire.DONE: "ok"}
        return outcomes[letter], text, ""
    if reply.exit_status in TIME_UP_STATUSES or (reply.ended == "timeout" and reply.cpu_seconds > timeout / 2):
        return "timeout", "", timed_out(timeout)
    if reply.ended == "timeout":
        return "timeout", "", slept(timeout)
    if reply.exit_status == -signal.SIGKILL:
        return "memory", "", f"MemoryError: the call was killed, out of memory. {memory_hint(memory_bytes)}"
    if reply.exit_status in _STACK_SIGNALS:
        name = _signal_name(-reply.exit_status)
        return (
            "crashed",
            "",
            f"the interpreter crashed ({name}), as it does in a recursion that is too deep. Use a loop.",
        )
    if reply.exit_status < 0:
        return "crashed", "", f"the interpreter crashed ({_signal_name(-reply.exit_status)})."
    return "crashed", "", f"the interpreter ended by itself (exit status {reply.exit_status})."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
