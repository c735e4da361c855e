"""What the host and the worker's own file both have to know of the wire between them.

The worker imports nothing of the project, so it has these names a second time, under the same names; a test holds the
two equal.

    host -- call: a line of numbers, source -----> child      as `request` writes them
    host -- control: FORK + descriptors ---------> worker
    host <- call: a letter, then bytes ----------- child, worker
"""

from __future__ import annotations

MAX_RECORD_BYTES = 32768  # the largest record of a child; the host reads one record per system call
MAX_REQUEST_BYTES = 1 << 16  # the largest record that the host sends
MAX_FORKS = 64  # that the host may ask for at once; more would be closed unread, and their calls sent again

FORK = b"F"  # host to worker: a child for each descriptor that comes with it

# The layers of the jail, as `worker.LAYERS` names them.
LAYERS = ("namespaces", "user", "capabilities", "no_new_privs", "limits", "landlock", "seccomp")

# Letters that records of a call start with.
OUTPUT, ERRORS = b"o", b"e"  # as they come
DONE = b"D"  # the code ended well
RAISED = b"E"  # it ended with an exception, which the text describes
NO_MEMORY = b"M"  # the same, where the exception was a MemoryError
STATUS = b"X"  # the child's exit status, from the worker
USED = (
    b"T"  # milliseconds of processor time that the child has used, from the worker, when the wall clock's limit is up
)
NOT_CONFINED = b"S"  # the step and the error that kept the child from confining itself; its source stays unread

# Exit statuses of a child that was told to end: its processor time is up; the wall clock's limit is up, and it had not
# once waited for anything but the processor.
CPU_TIME_UP, STARVED = 71, 72

# What a call needs, as bits of a number in its request: random states of its own; what the source policy counts on to
# be looked at while the code runs.
DRAWS, GUARDED = 1, 2


def request(shown: tuple[int, int], needs: int, cpu_seconds: float, code: str) -> bytes:
    """The one record that the host sends to a call.

    Args:
        shown: first and last byte of a last expression whose value is to be shown; (0, 0): there is none.
        needs: DRAWS where the code may draw random numbers, GUARDED where its review says so.
        cpu_seconds: of processor time, after which the call ends.
        code: the source.
    """
    return b"%d %d %d %d\n%b" % (*shown, needs, round(cpu_seconds * 1000), code.encode())
