"""The jail: a worker that confines itself once, then forks one child for each call.

This is the only file of the sandbox that runs inside it. It uses the standard library alone. The host
(``tool_sandbox.py``) calls its ``main`` in a new ``python -I -S`` with next to no environment; the last argument is
the descriptor of the worker's end of the control socket.

    host -- control (SEQPACKET) --------------> worker   its settings, marshalled; answered by the text of a dict
         -- control: b"F" + descriptors ------> worker   fork a child for each, which owns this descriptor
         -- call (SEQPACKET, the descriptor) -> child    one record: three numbers (`run_call`), the source
         <- call ------------------------------ child    records: a letter, then bytes (below)
         <- call ------------------------------ worker   b"X" + exit status, after the child was reaped
         <- call ------------------------------ child    b"S" + text, where it could not confine itself
    host shuts its sending side of the call --> worker   the time is up: the child is told to flush its output
    host closes the call ---------------------> worker   the child's process group is killed
    host closes control, or dies -------------> worker   everything is killed, the worker ends

Records of a child: ``o`` output and ``e`` errors as they come, then one of ``D`` (ended well), ``E`` + text (ended
with an exception) and ``M`` + text (ran out of memory).

Invariants. A child is confined before it reads a byte of its request, so whatever runs there runs under every layer.
The source goes from the host to that child alone: the worker's memory, which later children inherit, never holds it. A
child holds one descriptor, its own call. The worker has one thread and runs nothing that came from a call.

Layers, in the order they are set up. W: once in the worker. C: in every child, where the layer also parts the child
from the worker and from its siblings; what it needs is built once in the worker.
    namespaces    W  pid, net, ipc, uts, cgroup, mount (and user, if the host is not root); the root is an empty tmpfs
    user          W  a user id of this worker's own, if the host is root
    capabilities  W  none, in any set; securebits locked
    no_new_privs  W  and not dumpable: nobody else of the same user can trace it or read its memory
    limits        WC address space, no core, no files, no processes
    landlock      C  no path below /, no TCP, no signal and no abstract socket across the border of the call
    seccomp       WC a list of allowed system calls in the worker; a short list of those that a child may not use

A worker that brings libraries along (numpy, ...) may read below the library directories, for what they import late; a
plain one has loaded everything beforehand, and no system call that takes a path is allowed at all.
"""

import builtins
import codecs
import contextlib
import ctypes
import gc
import importlib
import io
import marshal
import os
import resource
import select
import signal
import struct
import sys
import traceback
import types
from collections import namedtuple
from functools import partial

import _socket as socket  # its C half: with the other, and `selectors`, each fork would be slower by a thirtieth

# `random` would seed itself anew in each child, from 2500 random bytes; `seed` below does it at a third of the cost,
# and only for calls that may draw from it.
_register_at_fork, os.register_at_fork = os.register_at_fork, lambda **_: None
import random

os.register_at_fork = _register_at_fork

RECORD_BYTES = 16384  # the largest record of a child; the host reads one record per system call
REQUEST_BYTES = 1 << 16  # the largest that the host sends
MOST_FORKS = 64  # that the host may ask for at once; more would be closed unread, and their calls sent again
SETUP_FAILED = 70  # exit status of a child that could not confine itself; its source stays unread
CHATTY_RECORDS = 64  # records after which output is flushed by a timer and no longer at each line
FLUSH_SECONDS = 0.05
CHILD_NICE = 5  # at least; with 19, children pile up half done while others start: a tenth fewer calls a second
CHILD_DESCRIPTORS = 16  # numbers that a child may use; those of open descriptors may be higher
TRACEBACK_CALLS = 8
MESSAGE_CHARS = 2000
SOURCE_NAME = "<code>"

# What `re`, `random`, `traceback` and Python itself (for long integers) import late, each in some version. No path can
# be opened then, so it is loaded beforehand.
LATE_MODULES = ("unicodedata", "_sha2", "_pylong", "_colorize", "linecache", "tokenize")
LATE_CODECS = (
    "ascii latin-1 utf-8 utf-8-sig utf-16 utf-16-le utf-16-be utf-32 utf-32-le utf-32-be utf-7 cp437 cp1252"
    " unicode_escape raw_unicode_escape punycode".split()
)


# What the host wants of this worker: the first record on the control socket. (Not a typing.NamedTuple: that module
# alone would make each fork slower by a thirtieth.)
Settings = namedtuple(
    "Settings",
    (
        "modules",  # to import beforehand: those that every call may use
        "libraries",  # to import beforehand: those of the calls that this worker is for
        "paths",  # directories in which the libraries are found
        "readable",  # directories that calls with libraries may read, for late imports
        "memory_bytes",  # what one call may add to the worker's own address space
        "user_id",  # for a host that is root
        "disabled",  # layers to leave out; for tests
    ),
)


# ---------------------------------------------------------------------------------------------------------------------
# System calls that Python does not wrap


class Missing(Exception):
    """A layer that this kernel or container refuses; the text says what was refused."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes, _libc.syscall.restype = [ctypes.c_long] * 6, ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 1, 4, 22, 24, 28
PR_SET_NO_NEW_PRIVS = 38
SECUREBITS_LOCKED = 0xEF  # root is no special user, a change of user grants nothing, and neither can be undone
SFD_NONBLOCK, SFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000


def _check(result: int, what: str) -> int:
    if result < 0:
        raise Missing(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, argument: int, address: int = 0) -> None:
    _check(_libc.prctl(option, argument, address, 0, 0), f"prctl {option}")


# ---------------------------------------------------------------------------------------------------------------------
# seccomp: which system calls exist for the worker and for a child

# Name: number on x86_64, number on aarch64 (None: no such call there).
CHILD_CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "poll": (7, None),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "select": (23, None), "pselect6": (270, 72), "ppoll": (271, 73),
    "sched_yield": (24, 124), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "setitimer": (38, 103), "getitimer": (36, 102), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "sendto": (44, 206), "recvfrom": (45, 207), "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98),
    "set_robust_list": (273, 99), "rseq": (334, 293), "restart_syscall": (219, 128), "getrandom": (318, 278),
    "uname": (63, 160), "sched_getaffinity": (204, 123),
}  # fmt: skip
WORKER_CALLS = {
    "clone": (56, 220), "fork": (57, None), "wait4": (61, 260), "waitid": (247, 95), "kill": (62, 129),
    "prctl": (157, 167), "setpgid": (109, 154), "setpriority": (141, 140), "prlimit64": (302, 261),
    "recvmsg": (47, 212), "shutdown": (48, 210), "close_range": (436, 436), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "landlock_restrict_self": (446, 446),
}  # fmt: skip
# For late imports; Landlock says of what. No fcntl and no ioctl: with them a call can have the kernel send signals to
# any process of its user, which Landlock stops from ABI 6 only.
LIBRARY_CALLS = {
    "open": (2, None), "openat": (257, 56), "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "pread64": (17, 67),
}  # fmt: skip
CLONE3 = {"clone3": (435, 435)}  # takes its flags where no filter can look; the C library falls back if it is missing

TMPFILE_BIT = 0o20000000  # of O_TMPFILE, whose other bit is O_DIRECTORY
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | TMPFILE_BIT
PROT_EXEC = 4
# Call: (number of an argument, bits that must not be set in it).
NO_NATIVE_CODE = {"mmap": (2, PROT_EXEC), "mprotect": (2, PROT_EXEC)}
NO_WRITING = {"open": (1, WRITING), "openat": (2, WRITING)}

AUDIT_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column in CALLS
X32_BIT = 0x40000000
RET_KILL, RET_ALLOW, RET_ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF opcodes


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _filter(machine: str, rules: list[tuple[dict, int]], forbidden_bits: dict, otherwise: int) -> _Program:
    """A filter that gives the calls of each table in `rules` the result beside it, and all others `otherwise`.

    Calls through another architecture's entry (32-bit int 0x80, x32) have other numbers, so they kill the process.
    """
    architecture, column = AUDIT_ARCHITECTURES[machine]
    code = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, RET_KILL), (LOAD, 0, 0, 0)]
    code += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, RET_KILL)]
    for calls, result in rules:
        for name, numbers in calls.items():
            number = numbers[column]
            if number is not None and name in forbidden_bits:
                argument, bits = forbidden_bits[name]
                code += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, 16 + 8 * argument), (JUMP_BITS, 0, 1, bits)]
                code += [(RETURN, 0, 0, RET_ERRNO | EPERM), (RETURN, 0, 0, result)]
            elif number is not None:
                code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, result)]
    code.append((RETURN, 0, 0, otherwise))
    return _Program(len(code), b"".join(struct.pack("=HBBI", *instruction) for instruction in code))


def _worker_filter(machine: str, reads_libraries: bool) -> _Program:
    rules = [(CHILD_CALLS, RET_ALLOW), (WORKER_CALLS, RET_ALLOW), (CLONE3, RET_ERRNO | ENOSYS)]
    bits = NO_NATIVE_CODE | NO_WRITING
    if reads_libraries:
        rules.append((LIBRARY_CALLS, RET_ALLOW))
        bits = NO_WRITING
    return _filter(machine, rules, bits, otherwise=RET_ERRNO | EPERM)


def _child_filter(machine: str) -> _Program:
    return _filter(machine, [(WORKER_CALLS, RET_ERRNO | EPERM)], {}, otherwise=RET_ALLOW)


def _installer(program: _Program) -> partial:
    """What a process calls to have the filter; 0: it has it."""
    install = partial(_libc.prctl, PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0)
    install.program = program  # lives as long as its address is in use
    return install


# ---------------------------------------------------------------------------------------------------------------------
# Landlock: which files, ports and processes exist for a child

# Rights of the first ABI and those that later ones added, by the ABI that brought them.
FILE_RIGHTS = {1: 0x1FFF, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
READ_RIGHTS = 1 << 2 | 1 << 3  # files, directories
TCP_BIND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 0b11, 0b11  # from ABI 4, from ABI 6
QUIET_FROM_ABI, QUIET = 7, 1  # denials are not written to the kernel's audit log


def _ruleset(readable: list[str]) -> tuple[int, int]:
    """(descriptor, ABI) of a ruleset that denies everything but reading below `readable`."""
    abi = _check(_libc.syscall(SYS_LANDLOCK_CREATE, 0, 0, 1, 0, 0), "Landlock")
    rights = sum(bits for since, bits in FILE_RIGHTS.items() if abi >= since)
    attributes = struct.pack("=Q", rights)
    if abi >= 4:
        attributes += struct.pack("=Q", TCP_BIND_CONNECT)
    if abi >= 6:
        attributes += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    memory = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _libc.syscall(SYS_LANDLOCK_CREATE, ctypes.addressof(memory), len(attributes), 0, 0, 0)
    _check(ruleset, "Landlock ruleset")
    for path in readable:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", READ_RIGHTS, parent))
        added = _libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, ctypes.addressof(rule), 0, 0)
        _check(added, f"Landlock rule for {path}")
        os.close(parent)
    return ruleset, abi


def _library_directories(paths: list[str]) -> list[str]:
    """Where the interpreter, the given packages and the shared objects that they have loaded so far live."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    directories = {os.path.dirname(name) for name in mapped} | {os.path.dirname(os.__file__), *paths}
    return sorted(name for name in directories if os.path.isdir(name))


# ---------------------------------------------------------------------------------------------------------------------
# Layers that are set up once, in the worker


def enter_namespaces(control: socket.socket) -> None:
    """Leave the host's namespaces: the caller goes on as first process of its own, a waiting parent stays behind."""
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if user != 0:
        flags |= CLONE_NEWUSER
    _check(_libc.unshare(flags), "unshare")
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    inner = os.fork()
    if inner:
        control.close()  # its end of file is how the host learns that the worker died
        os.waitpid(inner, 0)
        os._exit(0)


def hide_files() -> None:
    """Make an empty, read-only tmpfs the root; nothing is loaded from files after this."""
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, b"size=4k,nr_inodes=2"), "mount tmpfs")
    os.chdir("/tmp")
    os.chroot(".")
    os.chdir("/")


def change_user(user_id: int, readable: list[str]) -> None:
    """Become `user_id` for good, unless it could not read what this worker still has to read."""
    if os.getuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.seteuid(user_id)
        try:
            for path in readable:
                os.listdir(path)
        except OSError as error:
            os.seteuid(0)
            os.setresgid(0, 0, 0)
            raise Missing(f"still root, {error.filename} cannot be read by others") from None
        os.seteuid(0)
        os.setresuid(user_id, user_id, user_id)
    except OSError as error:
        raise Missing(f"still root, {error}") from None


def drop_capabilities() -> None:
    """Empty every capability set; securebits and the bounding set only where there was something to lose."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    _libc.prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED, 0, 0, 0)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, none), "capset")


def at_most(name: int, value: int) -> int:
    """`value`, or the hard limit that this process was started under: a limit can be lowered, never raised."""
    hard = resource.getrlimit(name)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def limit_resources(memory_bytes: int) -> None:
    """What children inherit. The address space counts from what the worker itself has mapped."""
    with open("/proc/self/statm", "rb") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = at_most(resource.RLIMIT_AS, mapped + memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in ("CORE", "FSIZE", "MEMLOCK", "MSGQUEUE"):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (0, 0))


def give_way() -> None:
    """To the trainer and its loop: in a shortage of memory, and when a child wakes up. No layer, so only a wish."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


# What a child calls: `steps` and, when its descriptors are closed (Landlock's ruleset is one), `last_steps`. They are
# pairs of a name and a call, bound to its arguments once, as what a child looks up is pages to copy. A call that
# raises, or returns something else than nothing or 0, ends the child, which says the name.
Confinement = namedtuple("Confinement", ("steps", "last_steps", "ruleset"))


def confine(settings: Settings, missing: dict[str, str]) -> Confinement:
    """Set up the worker's own layers and bind the children's; `missing` gets a reason for each that does not hold."""

    def layer(name, step, *arguments):
        if name in missing:
            return None
        try:
            return step(*arguments)
        except (Missing, OSError) as error:
            missing[name] = str(error)
            return None

    layer("no_new_privs", _prctl, PR_SET_NO_NEW_PRIVS, 1)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)  # no call of the filter's, so not later
    if "no_new_privs" in missing:  # they need it
        missing.update(dict.fromkeys({"landlock", "seccomp"} - missing.keys(), "no_new_privs is missing"))
    give_way()
    readable = _library_directories(settings.readable) if settings.libraries else []
    ruleset, abi = layer("landlock", _ruleset, readable) or (None, 0)
    layer("limits", limit_resources, settings.memory_bytes)
    if not settings.libraries:
        layer("namespaces", hide_files)
    layer("user", change_user, settings.user_id, readable)
    layer("capabilities", drop_capabilities)
    if os.getpid() == 1:  # of a namespace: the parent that waits outside is what the host kills. Not before the user
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # has changed, which clears it
    _prctl(PR_SET_DUMPABLE, 0)  # hides /proc/self from this process too, so not earlier
    machine = os.uname().machine
    if machine not in AUDIT_ARCHITECTURES:
        missing.setdefault("seccomp", f"no table of system calls for {machine}")
    if "seccomp" not in missing:
        filter_calls = _installer(_worker_filter(machine, reads_libraries=bool(readable) and ruleset is not None))
        layer("seccomp", lambda: _check(filter_calls(), "seccomp"))
    steps = [("setpgid", partial(os.setpgid, 0, 0))]
    # A child gives way to the trainer and its loop, yet is never starved. Ray's workers are nicer than this already,
    # and nobody but root may take niceness back.
    if niceness < CHILD_NICE:
        steps.append(("setpriority", partial(os.setpriority, os.PRIO_PROCESS, 0, CHILD_NICE)))
    if os.getpid() != 1:  # else it ends with the worker, the first process of its namespace, in any case
        steps.append(("PDEATHSIG", partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)))
        steps.append(("getppid", partial(_is_orphan, os.getpid())))
    if "limits" not in missing:
        descriptors = at_most(resource.RLIMIT_NOFILE, CHILD_DESCRIPTORS)
        for name, most in (("NPROC", 0), ("NOFILE", descriptors)):
            limit = getattr(resource, f"RLIMIT_{name}")
            steps.append((f"RLIMIT_{name}", partial(resource.setrlimit, limit, (most, most))))
    if ruleset is not None:
        flags = QUIET if abi >= QUIET_FROM_ABI else 0
        steps.append(("landlock", partial(_libc.syscall, SYS_LANDLOCK_RESTRICT, ruleset, flags, 0, 0, 0)))
    last_steps = [] if "seccomp" in missing else [("seccomp", _installer(_child_filter(machine)))]
    return Confinement(steps, last_steps, ruleset)


def _take(steps: list[tuple], call: int) -> None:
    """Every step, or the end of this child, with a record that names the step and its error."""
    for name, step in steps:
        try:
            if not step():
                continue
            reason = os.strerror(ctypes.get_errno())
        except (OSError, ValueError) as error:
            reason = str(error)
        os.write(call, f"S{name}: {reason}".encode())
        os._exit(SETUP_FAILED)


def _is_orphan(worker: int) -> bool:
    """Whether the worker died before its child could ask for a signal then: nobody would end this call."""
    return os.getppid() != worker


# ---------------------------------------------------------------------------------------------------------------------
# One call, in its child


class _Records(io.RawIOBase):
    """The raw end of a text stream: each write becomes one record of the call."""

    def __init__(self, letter: bytes):
        self.letter, self.call, self.count = letter, -1, 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        chunk = bytes(data[: RECORD_BYTES - 1])
        os.write(self.call, self.letter + chunk)
        self.count += 1
        if self.count == CHATTY_RECORDS:
            signal.setitimer(signal.ITIMER_REAL, FLUSH_SECONDS, FLUSH_SECONDS)
        return len(chunk)


def _text_stream(letter: bytes) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_Records(letter), 8192)
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True)


# Made once: new stream objects in each child would cost it a tenth of a millisecond.
STDOUT, STDERR = _text_stream(b"o"), _text_stream(b"e")


def _flush(*_signal) -> None:
    """Send what is buffered. A line costs a record of its own only up to CHATTY_RECORDS; then this runs by timer."""
    for stream in (STDOUT, STDERR):
        try:
            if stream.line_buffering and stream.buffer.raw.count >= CHATTY_RECORDS:
                stream.reconfigure(line_buffering=False)
            stream.flush()
        except (RuntimeError, ValueError, OSError):
            pass  # interrupted in the middle of a write: the next tick sends it


def _time_is_up(*_signal) -> None:
    _flush()
    os._exit(0)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def describe(error: BaseException, source: str) -> str:
    """A short traceback in the code's own line numbers; frames of libraries are left out, deep recursion is cut."""
    lines = source.split("\n")
    calls = [
        (frame.f_code.co_name, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == SOURCE_NAME
    ]
    shown = []
    for position, (name, number) in enumerate(calls):
        if len(calls) > TRACEBACK_CALLS and TRACEBACK_CALLS // 2 <= position < len(calls) - TRACEBACK_CALLS // 2:
            if position == TRACEBACK_CALLS // 2:
                shown.append(f"  ... {len(calls) - 2 * (TRACEBACK_CALLS // 2)} more calls ...")
            continue
        text = lines[number - 1].strip() if number and number <= len(lines) else ""
        shown.append(f"  line {number}, in {name}\n    {_shorten(text, 200)}")
    heading = ["Traceback (most recent call last):"] if shown else []
    message = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    message = message.replace(f'  File "{SOURCE_NAME}", line ', "  line ")
    return "\n".join([*heading, *shown, _shorten(message, MESSAGE_CHARS)])


def execute(shown: tuple[int, int], source: bytes, namespace: dict) -> tuple[bytes, str]:
    """Run the code as a notebook cell, which shows a last expression's value: (letter of the last record, its text).

    `shown`: where that expression is. So the child needs no syntax tree, which would take as long to build as all the
    rest of a short call.

    Text is compiled, never bytes: those may name an encoding in a comment, and then be another program than the one
    that the host has checked.
    """
    start, end = shown
    try:
        body = source[:start].rstrip(b" \t\n\\;") if end else source
        program = compile(body.decode(), SOURCE_NAME, "exec", dont_inherit=True)
        value = None
        if end:
            lines_before = b"\n" * source.count(b"\n", 0, start)
            expression = b"%b(%b\n)" % (lines_before, source[start:end])
            value = compile(expression.decode(), SOURCE_NAME, "eval", dont_inherit=True)
        exec(program, namespace)
        if value is not None:
            sys.displayhook(eval(value, namespace))
    except SystemExit as error:
        if error.code not in (None, 0):
            return b"E", f"SystemExit: {_shorten(str(error.code), MESSAGE_CHARS)}"
    except MemoryError as error:
        namespace.clear()  # what the code holds may leave no memory to say so
        return b"M", describe(error, source.decode())
    except BaseException as error:
        return b"E", describe(error, source.decode())
    return b"D", ""


def run_call(call: socket.socket, namespace: dict, random_states: list) -> None:
    """Read the request from `call`, run it, send the records. The process ends behind this.

    A request is a line and the source. In the line are the first and the last byte of a last expression whose value is
    to be shown (0 0: there is none), and whether the code may draw random numbers (0 or 1).
    """
    request = call.recv(REQUEST_BYTES)
    if not request:
        return  # the host has no use for this child any more
    STDOUT.buffer.raw.call = STDERR.buffer.raw.call = call.fileno()
    try:
        numbers, _, source = request.partition(b"\n")
        start, end, draws = map(int, numbers.split())
        if draws:
            seed(random_states)
        letter, text = execute((start, end), source, namespace)
    except MemoryError:
        letter, text = b"M", "MemoryError"
    except BaseException as error:  # the description itself failed, in an exception's own methods for example
        letter, text = b"E", type(error).__name__
    _flush()
    os.write(call.fileno(), letter + text.encode("utf-8", "backslashreplace")[: RECORD_BYTES - 1])


# ---------------------------------------------------------------------------------------------------------------------
# The worker


def preload(settings: Settings) -> None:
    """Import everything that calls may need, and warm up what is slow when used for the first time."""
    sys.stdin, sys.stdout, sys.stderr = None, STDOUT, STDERR
    sys.path.extend(settings.paths)
    for name in (*settings.modules, *LATE_MODULES, *settings.libraries):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # not there, or not on this Python: the code that imports it is told so
        for attribute in dir(module) if name in settings.libraries else ():
            try:
                getattr(module, attribute)  # numpy and scipy import their parts when they are first asked for
            except Exception:
                pass  # the library's own matter
    for name in LATE_CODECS:
        codecs.lookup(name)
    if not settings.libraries:
        sys.path.clear()  # nothing there can be opened later; the import machinery shall not try
    builtins.exit = builtins.quit = sys.exit
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # number theory prints long integers; the clock bounds what that costs
    execute((0, 0), b"print(*(x for x in ()), end='')", {})
    execute((0, 4), b"None", {})


POOL_BYTES, POOL_HEADER_BYTES = 1 << 14, 48  # of CPython's allocator, which has pools for each size of small objects


def fill_pools() -> list:
    """Objects that fill up the half-used pools. What a child makes is then side by side in new ones, and not all over
    memory: a tenth fewer pages to copy."""
    filling = []
    for size in range(16, 513, 16):
        make = object if size == 16 else partial(complex, 1, 1) if size == 32 else partial(bytes, size - 33)
        for _ in range(4 * POOL_BYTES // size):  # an end, should another allocator have no such pools
            filling.append(make())
            if id(filling[-1]) % POOL_BYTES == POOL_HEADER_BYTES:
                break
    return filling


def leave_little_to_copy() -> list:
    """For a fork, and for what is written after it. The result has to be kept."""
    gc.collect()
    filling = fill_pools()
    gc.freeze()  # a collection in a child shall not write to every page it shares with the worker
    if hasattr(_libc, "malloc_trim"):  # in other C libraries than glibc there is less to give back
        _libc.malloc_trim(0)
    return filling


def random_states() -> list:
    """Every generator that Python code holds, for children to seed."""
    return [state for state in gc.get_objects() if isinstance(state, random.Random)]


def seed(states: list) -> None:
    """Give this child random states of its own."""
    for state in states:
        random.Random.seed(state, int.from_bytes(os.urandom(32), "little"))
    if "numpy.random" in sys.modules:
        numbers = struct.unpack("=8I", os.urandom(32))  # left to itself, numpy takes a millisecond to find some
        sys.modules["numpy.random"].seed(numbers)


def child_signals() -> int:
    """A descriptor that becomes readable when a child ends; a Python handler would have to be undone in each child.

    What the host ignores or blocks is inherited: children of a host that ignores SIGCHLD would leave no exit status,
    and those of one that blocks SIGALRM or SIGUSR1 would never flush."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    signals = struct.pack("=Q", 1 << (signal.SIGCHLD - 1)).ljust(128, b"\0")
    return _check(_libc.signalfd(-1, signals, SFD_NONBLOCK | SFD_CLOEXEC), "signalfd")


def receive_calls(control: socket.socket) -> tuple[bytes, list[socket.socket]]:
    """A request, empty at the end, and the calls that it is for."""
    request, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(MOST_FORKS * struct.calcsize("i")))
    calls = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = struct.unpack(f"{len(data) // struct.calcsize('i')}i", data)
            calls += [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number) for number in numbers]
    return request, calls


class Worker:
    """The loop that forks, kills and reaps; it is never blocked by a call and never looks into one."""

    def __init__(self, control: socket.socket):
        self.control = control
        # Where calls run: dataclasses and typing look names up there.
        self.main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        self.random_states = random_states()
        # By descriptor: the worker's copy of it, the child's process id.
        self.calls: dict[int, tuple[socket.socket, int]] = {}
        self.descriptors: dict[int, int] = {}  # by process id
        signal.signal(signal.SIGALRM, _flush)
        signal.signal(signal.SIGUSR1, _time_is_up)
        self.ended = child_signals()
        self.epoll = select.epoll()
        self.epoll.register(control, select.EPOLLIN)
        self.epoll.register(self.ended, select.EPOLLIN)

    def serve(self, confinement: Confinement) -> None:
        """Until the host closes the control socket or dies."""
        self.confinement = confinement
        own = self.epoll.fileno(), self.control.fileno(), self.ended, confinement.ruleset or 0
        self.highest_own = max(own)
        while True:
            events = dict(self.epoll.poll())
            forks, ended = events.pop(self.control.fileno(), 0), events.pop(self.ended, 0)
            for descriptor, event in events.items():  # before a number can be used again by what follows
                self.host_moved(descriptor, event)
            if ended:
                os.read(self.ended, 4096)
                self.reap()
            if forks:
                request, calls = receive_calls(self.control)
                if not request:
                    break
                self.fork(calls)
        for descriptor in self.calls:
            self.signal(descriptor, signal.SIGKILL)

    def fork(self, calls: list[socket.socket]) -> None:
        """A child for each call. All forks come first: after each, every page that the worker writes to is copied."""
        highest = max([self.highest_own, *self.calls, *[call.fileno() for call in calls]])
        processes = []
        for call in calls:
            try:
                process = os.fork()
            except OSError:  # no memory, or no room under a container's limit on processes
                process = None
            if process == 0:
                try:
                    self.become_child(call.fileno(), highest)
                    run_call(call, self.main_module.__dict__, self.random_states)
                    os._exit(0)
                finally:
                    os._exit(SETUP_FAILED)
            processes.append(process)
        for call, process in zip(calls, processes, strict=True):
            if process is None:
                call.close()  # which resets the call: the host tries again
                continue
            self.calls[call.fileno()] = call, process
            self.descriptors[process] = call.fileno()
            self.epoll.register(call, select.EPOLLRDHUP)

    def become_child(self, call: int, highest: int) -> None:
        """Every page that this writes to is copied for the child, so it is short."""
        _take(self.confinement.steps, call)
        os.closerange(0, call)
        os.closerange(call + 1, highest + 1)
        _take(self.confinement.last_steps, call)

    def host_moved(self, descriptor: int, event: int) -> None:
        """The host closed a call (or died), or has shut its sending side to say that the time is up."""
        if event & select.EPOLLHUP:
            self.epoll.unregister(descriptor)
            self.signal(descriptor, signal.SIGKILL)
        else:
            self.epoll.modify(descriptor, 0)
            self.signal(descriptor, signal.SIGUSR1)

    def signal(self, descriptor: int, number: int) -> None:
        process = self.calls[descriptor][1]
        try:
            os.killpg(process, number)
        except ProcessLookupError:
            os.kill(process, number)  # its group does not exist yet

    def reap(self) -> None:
        """Collect ended children, end what is left of their groups, and tell the host how they ended."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            try:
                os.killpg(ended.si_pid, signal.SIGKILL)  # the number is not free for others before the wait below
            except ProcessLookupError:
                pass
            _, status = os.waitpid(ended.si_pid, 0)
            descriptor = self.descriptors.pop(ended.si_pid, None)
            if descriptor is None:
                continue  # an orphan that came to the first process of the namespace
            call, _ = self.calls.pop(descriptor)
            try:
                self.epoll.unregister(descriptor)
            except OSError:
                pass  # the host had closed it
            self.tell_status(call, os.waitstatus_to_exitcode(status))
            call.close()

    @staticmethod
    def tell_status(call: socket.socket, status: int) -> None:
        """Nothing if it died with its request unread: closing then resets the call, and the host tries again."""
        try:
            if status != 0:
                call.shutdown(socket.SHUT_RD)  # no request can come in after this look
                try:
                    if call.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        return
                except BlockingIOError:
                    pass
            call.send(b"X%d" % status, socket.MSG_DONTWAIT)
        except OSError:
            pass  # the host has its answer, or is not reading


def main() -> None:
    control = socket.socket(fileno=int(sys.argv.pop()))
    settings = Settings(**marshal.loads(control.recv(REQUEST_BYTES)))
    try:
        missing = {name: "switched off" for name in settings.disabled}
        if "namespaces" not in missing:
            try:
                enter_namespaces(control)
            except (Missing, OSError) as error:
                missing["namespaces"] = str(error)
        preload(settings)
        worker = Worker(control)
        confinement = confine(settings, missing)
        worker.filling = leave_little_to_copy()
    except BaseException:
        control.send(repr({"failure": traceback.format_exc()[-4000:]}).encode("utf-8", "backslashreplace"))
        raise
    control.send(repr({"missing": missing}).encode("utf-8", "backslashreplace"))
    worker.serve(confinement)
    os._exit(0)
