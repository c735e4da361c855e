"""The jail: a worker that confines itself once, then forks one child for each call.

This module and ``child.py``, which runs a call in its child, are what runs inside the jail, with the policy and the
words of the wire (``wire.py``); all use the standard library alone. The host (``pool.py``) calls ``main`` in a new
``python -I -S`` with next to no environment; the last argument is the descriptor of the worker's end of the control
socket.

    host -- control (SEQPACKET) --------------> worker   its settings, marshalled; answered by the text of a dict
         -- control: FORK + descriptors ------> worker   for each child its ends of a call and of a leash
         -- call (SEQPACKET) -----------------> child    one record: a header and the source
         <- call ------------------------------ child    records: a letter, then bytes
         -- leash (SEQPACKET): LOOK ----------> worker   answered by LOOK with a descriptor of the child's process
         -- leash: TIME_UP -------------------> worker   the child is told to flush and to end
         <- leash ----------------------------- worker   STATUS + exit status, after the child was reaped
    host closes the leash --------------------> worker   the child's process group is killed
    host closes control, or dies -------------> worker   everything is killed, the worker ends

Invariants. A child is confined before it reads a byte of its request, so whatever runs there runs under every layer.
The source goes from the host to that child alone: the worker's memory, which later children inherit, never holds it. A
child holds one descriptor, its own call, and never a leash, so whatever comes over a leash is the worker's word. The
worker has one thread and runs nothing that came from a call.

The layers of the jail, where each holds and what it needs, are the table `LAYERS`, which `confine` walks.

A worker that brings libraries along (numpy, ...) may read below the library directories, for what they import late; a
plain one has loaded everything beforehand, and no system call that takes a path is allowed at all.
"""

import contextlib
import ctypes
import gc
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
from collections.abc import Callable
from functools import partial
from os import closerange

import _socket as socket  # its C half alone: less to copy for each child
from retool.sandbox import child
from retool.sandbox.wire import LOOK, MAX_FORKS, MAX_REQUEST_BYTES, NOT_CONFINED, STATUS, TIME_UP

SETUP_FAILED = 70  # exit status of a child that could not confine itself; its source stays unread
CHILD_NICE = 5  # at least; with 19, children pile up half done while others start: a tenth fewer calls a second
MAX_STACK_BYTES = 64 * 1024**2  # for deep recursion; the kernel keeps some 128 MB free for a stack to grow
MAX_CHILD_DESCRIPTORS = 16  # numbers that a child may use; those of open descriptors may be higher

# What the host wants of this worker: the first record on the control socket.
Settings = namedtuple(
    "Settings",
    (
        "modules",  # to import beforehand: those that every call may use
        "libraries",  # to import beforehand: those of the calls that this worker is for
        "paths",  # directories in which the libraries are found
        "readable",  # directories that calls with libraries may read, for late imports
        "memory_bytes",  # what one call may add to the worker's own address space
        "user_id",  # for a host that is root
        "layers_off",  # to leave out; for tests
        "allowed",  # modules that the policy lets a program import
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
    "sendmsg": (46, 211), "pidfd_open": (434, 434),
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
    rules: list[tuple[dict, int]] = [(CHILD_CALLS, RET_ALLOW), (WORKER_CALLS, RET_ALLOW), (CLONE3, RET_ERRNO | ENOSYS)]
    bits = NO_NATIVE_CODE | NO_WRITING
    if reads_libraries:
        rules.append((LIBRARY_CALLS, RET_ALLOW))
        bits = NO_WRITING
    return _filter(machine, rules, bits, otherwise=RET_ERRNO | EPERM)


def _child_filter(machine: str) -> _Program:
    return _filter(machine, [(WORKER_CALLS, RET_ERRNO | EPERM)], {}, otherwise=RET_ALLOW)


_PROGRAMS: list[_Program] = []


def _installer(program: _Program) -> partial:
    """What a process calls to have the filter; 0: it has it."""
    _PROGRAMS.append(program)  # lives as long as its address is in use
    return partial(_libc.prctl, PR_SET_SECCOMP, 2, ctypes.addressof(program), 0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Landlock: which files, ports and processes exist for a child

# Rights of the first ABI and those that later ones added, by the ABI that brought them.
FILE_RIGHTS = {1: 0x1FFF, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
READ_FILE = 1 << 2
READ_RIGHTS = READ_FILE | 1 << 3  # files, directories
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
        rights = READ_RIGHTS if os.path.isdir(path) else READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, parent))
        added = _libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, ctypes.addressof(rule), 0, 0)
        _check(added, f"Landlock rule for {path}")
        os.close(parent)
    return ruleset, abi


def _library_directories(paths: list[str]) -> list[str]:
    """Where the interpreter, the given packages and the shared objects that they have loaded so far live."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    directories = {os.path.dirname(name) for name in mapped} | {os.path.dirname(os.__file__), *paths}
    return sorted(name for name in directories if os.path.exists(name))


# ---------------------------------------------------------------------------------------------------------------------
# The layers of the jail


class Confinement:
    """What the steps of the table share. They leave here what a child has to take before it reads its request.

    Attributes:
        missing: layers that do not hold, and why.
        steps, last_steps: of a child, before and after its descriptors are closed (Landlock's ruleset is one). By
            name, in order, calls bound to their arguments. One that raises, or returns something else than nothing or
            0, ends the child, which says the name.
        epoll, ended: what the worker waits on; readable when a child has ended.
    """

    epoll: select.epoll
    ended: int

    def __init__(self, control: socket.socket, settings: Settings):
        self.control, self.settings = control, settings
        self.missing = {name: "switched off" for name in settings.layers_off}
        self.readable: list[str] = []
        self.ruleset: int | None = None
        self.steps: dict[str, Callable[[], object]] = {}
        self.last_steps: dict[str, Callable[[], object]] = {}


def confine(confinement: Confinement) -> None:
    """Set up every layer that this machine has; `confinement.missing` gets a reason for each that does not hold."""
    for layer in LAYERS:
        lacks = [need for need in layer.needs if need in confinement.missing]
        if layer.name in confinement.missing:
            continue
        if lacks:
            confinement.missing[layer.name] = f"{lacks[0]} is missing"
            continue
        try:
            layer.step(confinement)
        except (Missing, OSError) as error:
            if not layer.name:
                raise
            confinement.missing[layer.name] = str(error)


def enter_namespaces(confinement: Confinement) -> None:
    """Leave the host's namespaces: the caller goes on as first process of its own, a parent that only waits stays."""
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
        confinement.control.close()  # its end of file is how the host learns that the worker died
        os.waitpid(inner, 0)
        os._exit(0)


def hide_files(confinement: Confinement) -> None:
    """Make an empty, read-only tmpfs the root, unless libraries have to be found; nothing else is loaded after
    this."""
    if confinement.settings.libraries:
        return
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    _check(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, b"size=4k,nr_inodes=2"), "mount tmpfs")
    os.chdir("/tmp")
    os.chroot(".")
    os.chdir("/")


def preload(confinement: Confinement) -> None:
    child.preload(confinement.settings)


def listen(confinement: Confinement) -> None:
    """Open what the worker waits on, which its filter of system calls will not let it do.

    A descriptor becomes readable when a child ends; a Python handler would have to be undone in each child. What the
    host ignores or blocks is inherited: children of a host that ignores SIGCHLD would leave no exit status, and those
    of one that blocks SIGALRM or SIGUSR1 would never flush.
    """
    signal.signal(signal.SIGALRM, child.flush)
    signal.signal(signal.SIGUSR1, child.wall_time_is_up)
    signal.signal(signal.SIGPROF, child.cpu_time_is_up)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
    signals = struct.pack("=Q", 1 << (signal.SIGCHLD - 1)).ljust(128, b"\0")
    confinement.ended = _check(_libc.signalfd(-1, signals, SFD_NONBLOCK | SFD_CLOEXEC), "signalfd")
    confinement.epoll = select.epoll()
    confinement.epoll.register(confinement.control, select.EPOLLIN)
    confinement.epoll.register(confinement.ended, select.EPOLLIN)


def forbid_new_privileges(_confinement: Confinement) -> None:
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def give_way(confinement: Confinement) -> None:
    """To the trainer and its loop: in a shortage of memory, and when a child wakes up. No layer, so only a wish.

    A child gives way by niceness too, yet is never starved. Ray's workers are nicer than this already, and nobody but
    root may take niceness back.
    """
    confinement.steps["setpgid"] = partial(os.setpgid, 0, 0)
    if os.getpriority(os.PRIO_PROCESS, 0) < CHILD_NICE:
        confinement.steps["setpriority"] = partial(os.setpriority, os.PRIO_PROCESS, 0, CHILD_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def restrict_files(confinement: Confinement) -> None:
    """Build Landlock's ruleset here, for children to take on."""
    if confinement.settings.libraries:
        confinement.readable = _library_directories(confinement.settings.readable)
    confinement.ruleset, abi = _ruleset(confinement.readable)
    flags = QUIET if abi >= QUIET_FROM_ABI else 0
    restrict = partial(_libc.syscall, SYS_LANDLOCK_RESTRICT, confinement.ruleset, flags, 0, 0, 0)
    confinement.steps["landlock"] = restrict


def at_most(name: int, value: int) -> int:
    """`value`, or the hard limit that this process was started under: a limit can be lowered, never raised."""
    hard = resource.getrlimit(name)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def limit_resources(confinement: Confinement) -> None:
    """What children inherit. The address space counts from what the worker itself has mapped."""
    with open("/proc/self/statm", "rb") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = at_most(resource.RLIMIT_AS, mapped + confinement.settings.memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    stack, hard = at_most(resource.RLIMIT_STACK, MAX_STACK_BYTES), resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    for name in ("CORE", "FSIZE", "MEMLOCK", "MSGQUEUE"):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (0, 0))
    for name, most in (("NPROC", 0), ("NOFILE", at_most(resource.RLIMIT_NOFILE, MAX_CHILD_DESCRIPTORS))):
        number = getattr(resource, f"RLIMIT_{name}")
        confinement.steps[f"RLIMIT_{name}"] = partial(resource.setrlimit, number, (most, most))


def change_user(confinement: Confinement) -> None:
    """Become a user of this worker's own for good, unless it could not read what this worker still has to read."""
    if os.getuid() != 0:
        return
    user_id = confinement.settings.user_id
    try:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.seteuid(user_id)
        try:
            for path in confinement.readable:
                os.listdir(path) if os.path.isdir(path) else os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            os.seteuid(0)
            os.setresgid(0, 0, 0)
            raise Missing(f"still root, {error.filename} cannot be read by others") from None
        os.seteuid(0)
        os.setresuid(user_id, user_id, user_id)
    except OSError as error:
        raise Missing(f"still root, {error}") from None


def drop_capabilities(_confinement: Confinement) -> None:
    """Empty every capability set; securebits and the bounding set only where there was something to lose."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    _libc.prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED, 0, 0, 0)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, none), "capset")


def end_with_parent(confinement: Confinement) -> None:
    """Each child with the worker, and the worker with the process that waits outside its namespace, which is what the
    host kills. After the change of user, which clears the wish."""
    if os.getpid() == 1:  # of a namespace: its children end with it in any case
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    confinement.steps["PDEATHSIG"] = partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    confinement.steps["getppid"] = partial(_is_orphan, os.getpid())


def _is_orphan(worker: int) -> bool:
    """Whether the worker died before its child could ask for a signal then: nobody would end this call."""
    return os.getppid() != worker


def hide_memory(_confinement: Confinement) -> None:
    """From other processes of the same user. Hides /proc/self from this one too, so not earlier."""
    _prctl(PR_SET_DUMPABLE, 0)


def filter_calls(confinement: Confinement) -> None:
    machine = os.uname().machine
    if machine not in AUDIT_ARCHITECTURES:
        raise Missing(f"no table of system calls for {machine}")
    reads_libraries = bool(confinement.readable) and confinement.ruleset is not None
    _check(_installer(_worker_filter(machine, reads_libraries))(), "seccomp")
    confinement.last_steps["seccomp"] = _installer(_child_filter(machine))


# name: as the host knows it (``wire.LAYERS``). where: W, once in the worker; C, in every child, where the layer also
# parts the child from the worker and from its siblings; what it needs is built once in the worker. needs: layers
# without which it is void or refused. step: sets it up. In the order in which they are set up; rows without a name are
# no layers, but have their place in this order.
Layer = namedtuple("Layer", ("name", "where", "needs", "step"))
LAYERS = (
    Layer("namespaces", "W", (), enter_namespaces),  # pid, net, ipc, uts, cgroup, mount; user, if the host is not root
    Layer("", "W", (), preload),
    Layer("", "W", (), listen),
    Layer("no_new_privs", "W", (), forbid_new_privileges),
    Layer("", "WC", (), give_way),
    Layer("landlock", "C", ("no_new_privs",), restrict_files),  # no path, no TCP, no signal across the call's border
    Layer("limits", "WC", (), limit_resources),  # address space, no core, no files, no processes
    Layer("namespaces", "W", (), hide_files),
    Layer("user", "W", (), change_user),  # a user id of this worker's own, if the host is root
    Layer("capabilities", "W", (), drop_capabilities),
    Layer("", "WC", (), end_with_parent),
    Layer("", "W", (), hide_memory),
    Layer("seccomp", "WC", ("no_new_privs",), filter_calls),  # the calls that are allowed; fewer of them in a child
)


def take_steps(steps: dict[str, Callable[[], object]], call: int) -> None:
    """Every step, or the end of this child, with a record that names the step and its error."""
    for name, step in steps.items():
        try:
            if not step():
                continue
            reason = os.strerror(ctypes.get_errno())
        except (OSError, ValueError) as error:
            reason = str(error)
        os.write(call, NOT_CONFINED + f"{name}: {reason}".encode())
        os._exit(SETUP_FAILED)


# ---------------------------------------------------------------------------------------------------------------------
# The worker


def leave_little_to_copy() -> None:
    """For a fork, and for what is written after it."""
    gc.collect()
    gc.freeze()  # a collection in a child shall not write to every page it shares with the worker
    if hasattr(_libc, "malloc_trim"):  # in other C libraries than glibc there is less to give back
        _libc.malloc_trim(0)


def receive_calls(control: socket.socket) -> tuple[bytes, list[tuple[socket.socket, socket.socket]]]:
    """A request, empty at the end, and the calls that it is for, each with its leash."""
    request, ancillary, _, _ = control.recvmsg(16, socket.CMSG_SPACE(2 * MAX_FORKS * struct.calcsize("i")))
    ends = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = struct.unpack(f"{len(data) // struct.calcsize('i')}i", data)
            ends += [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number) for number in numbers]
    return request, list(zip(ends[::2], ends[1::2], strict=True))


class Worker:
    """The loop that forks, kills and reaps; it is never blocked by a call and never looks into one."""

    def __init__(self, confinement: Confinement):
        self.confinement, self.control = confinement, confinement.control
        self.epoll, self.ended = confinement.epoll, confinement.ended
        # Where calls run: dataclasses and typing look names up there.
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        child.use_stand_ins(vars(main_module))
        self.run_call = partial(child.run_call, vars(main_module), confinement.settings.allowed)
        # By descriptor: the worker's end of a leash, the child's process id.
        self.calls: dict[int, tuple[socket.socket, int]] = {}
        self.descriptors: dict[int, int] = {}  # by process id
        self.highest_own = max(self.epoll.fileno(), self.control.fileno(), self.ended, confinement.ruleset or 0)

    def serve(self) -> None:
        """Until the host closes the control socket or dies."""
        while True:
            events = dict(self.epoll.poll())
            forks, ended = events.pop(self.control.fileno(), 0), events.pop(self.ended, 0)
            for descriptor in events:  # before a number can be used again by what follows
                self.host_moved(descriptor)
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

    def fork(self, calls: list[tuple[socket.socket, socket.socket]]) -> None:
        """A child for each call. All forks come first: after each, every page that the worker writes to is copied."""
        highest = max([self.highest_own, *self.calls, *[end.fileno() for ends in calls for end in ends]])
        become_child, run_call = self.become_child, self.run_call
        processes = []
        for call, _ in calls:
            try:
                process = os.fork()
            except OSError:  # no memory, or no room under a container's limit on processes
                process = None
            if process == 0:
                try:
                    become_child(call.fileno(), highest)
                    run_call(call)
                    os._exit(0)
                finally:
                    os._exit(SETUP_FAILED)
            processes.append(process)
        for (call, leash), process in zip(calls, processes, strict=True):
            call.close()  # where there is no child, this resets the call: the host tries again
            if process is None:
                leash.close()
                continue
            self.calls[leash.fileno()] = leash, process
            self.descriptors[process] = leash.fileno()
            self.epoll.register(leash, select.EPOLLIN)

    def become_child(self, call: int, highest: int) -> None:
        """Every page that this writes to is copied for the child, so it is short."""
        take_steps(self.confinement.steps, call)
        closerange(0, call)
        closerange(call + 1, highest + 1)
        take_steps(self.confinement.last_steps, call)

    def host_moved(self, descriptor: int) -> None:
        """The host asks for something, or has closed a leash, or died."""
        leash, process = self.calls[descriptor]
        try:
            request = leash.recv(16, socket.MSG_DONTWAIT)
        except OSError:
            request = b""
        if request == TIME_UP:
            self.signal(descriptor, signal.SIGUSR1)
        elif request == LOOK:
            self.show(leash, process)
        else:
            self.epoll.unregister(descriptor)
            self.signal(descriptor, signal.SIGKILL)

    @staticmethod
    def show(leash: socket.socket, process: int) -> None:
        """Hand the host a descriptor of the child's process, or none where this kernel has none to give."""
        rights = []
        with contextlib.suppress(OSError, AttributeError):
            rights.append(os.pidfd_open(process))
        with contextlib.suppress(OSError):
            packed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", number)) for number in rights]
            leash.sendmsg([LOOK], packed, socket.MSG_DONTWAIT)
        for number in rights:
            os.close(number)

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
            leash, _ = self.calls.pop(descriptor)
            with contextlib.suppress(OSError):  # the host had closed it
                self.epoll.unregister(descriptor)
            with contextlib.suppress(OSError):  # the host has its answer
                leash.send(STATUS + b"%d" % os.waitstatus_to_exitcode(status), socket.MSG_DONTWAIT)
            leash.close()


def main() -> None:
    os.environ.pop("LD_LIBRARY_PATH", None)  # the loader has read it, and calls are not told of the host's folders
    control = socket.socket(fileno=int(sys.argv.pop()))
    settings = Settings(**marshal.loads(control.recv(MAX_REQUEST_BYTES)))
    try:
        confinement = Confinement(control, settings)
        confine(confinement)
        worker = Worker(confinement)
        leave_little_to_copy()
    except BaseException:
        control.send(repr({"failure": traceback.format_exc()[-4000:]}).encode("utf-8", "backslashreplace"))
        raise
    control.send(repr({"missing": confinement.missing}).encode("utf-8", "backslashreplace"))
    worker.serve()
    os._exit(0)
