"""What the host and the jail say to each other. Standard library alone: both sides import it.

    host -- control: FORK + descriptors ------> worker   for each child its ends of a call and of a leash
    host -- call: HEADER, source -------------> child    as `request` writes it
    host <- call: a letter, then bytes -------- child
    host -- leash: LOOK, TIME_UP, or closed --> worker
    host <- leash: STATUS, LOOK --------------- worker

A child has its call and nothing else: what comes over the leash, no program can have written.
"""

from __future__ import annotations

import struct

MAX_RECORD_BYTES = 32768  # the largest record of a child; the host reads one record per system call
MAX_REQUEST_BYTES = 1 << 16  # the largest record that the host sends
MAX_FORKS = 64  # that the host may ask for at once; more would be closed unread, and their calls sent again
MAX_CODE_BYTES = 60_000

FORK = b"F"  # a child for each pair of descriptors that comes with it

# The layers of the jail, as `worker.LAYERS` names them.
LAYERS = ("namespaces", "user", "capabilities", "no_new_privs", "limits", "landlock", "seccomp")

# Letters that records of a call start with. OUTPUT and ERRORS come as they are written, of the others one is the last.
OUTPUT, ERRORS = b"o", b"e"
DONE = b"D"  # the program ended well
EMPTY = b"N"  # there was no statement in it
RAISED = b"E"  # it ended with an exception, which the text describes
NO_MEMORY = b"M"  # the same, where the exception was a MemoryError
REFUSED = b"R"  # by the policy, for the reasons in the text
UNREADABLE = b"Y"  # Python could not compile it, for the reason in the text
NOT_CONFINED = b"S"  # the step and the error that kept the child from confining itself; its request stays unread

# On the leash.
STATUS = b"X"  # the exit status of the child, which was reaped
LOOK = b"P"  # asks for a descriptor of the child's process, and brings it
TIME_UP = b"T"  # tells the child to flush what it has printed, and to end

CPU_TIME_UP = 71  # exit status of a child that has used up its processor time

HEADER = struct.Struct("=Bd")  # of a request: what becomes of the program, and seconds of processor time
RUN, CHECK_AND_RUN, CHECK = range(3)


def request(mode: int, cpu_seconds: float, code: str) -> bytes:
    """The one record that the host sends to a call.

    Args:
        mode: RUN without the policy, CHECK_AND_RUN, or CHECK alone.
        cpu_seconds: of processor time, after which the call ends.
        code: the source.

    Raises:
        ValueError: the text says why the source is not one that Python could run.
    """
    try:
        source = code.encode() if len(code) <= MAX_CODE_BYTES else b""
    except UnicodeEncodeError:
        raise ValueError("the code holds characters that are not valid Unicode. Write them as escapes.") from None
    if not len(source) <= MAX_CODE_BYTES >= len(code):
        raise ValueError(f"the code is longer than {MAX_CODE_BYTES} bytes. Use a shorter program.")
    return HEADER.pack(mode, cpu_seconds) + source
