"""What the sandbox's attack, fuzz and soak tests share: running code in the real jail, and watching it from outside.

`run` is one call without the source policy, with any layer switched off. `Outside` is everything that such a call must
not reach: files, a process, sockets, System V objects and secrets in all of them, with a look from outside at whether
any was touched. Programs get the addresses of all this as `facts`, since an attacker may know them.
"""

import asyncio
import atexit
import contextlib
import ctypes
import os
import platform
import resource
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tool_sandbox
from retool.sandbox import pool, wire
from retool.sandbox.pool import POOL
from watching import descendants

SECONDS = 20.0  # for calls that end by themselves in milliseconds: generous, so that a busy machine changes no result
MEMORY = "256MB"
SANDBOX_FILES = Path(tool_sandbox.__file__).parent
NONE_HOLDS = tuple(tool_sandbox.LAYERS)
LIBRARY = "retool_test_library"  # its calls run in a worker that may read libraries; this module makes it

# A layer that is tested alone keeps those without which it is void: both filters need no_new_privs, and whoever has
# every capability leaves a chroot and raises limits.
COMPANIONS = {
    "landlock": {"no_new_privs"},
    "seccomp": {"no_new_privs"},
    "namespaces": {"user", "capabilities"},
    "limits": {"user", "capabilities"},
}
# The program loader, which can start programs that may not be executed themselves.
LOADER = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


def _make_library() -> None:
    """A package outside the standard library, on this process's path, with a part that is imported late."""
    folder = tempfile.mkdtemp(prefix="retool-library-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(folder, LIBRARY)
    package.mkdir()
    os.chmod(folder, 0o755)
    (package / "__init__.py").write_text("def late():\n    from . import part\n    return part.VALUE\n")
    (package / "part.py").write_text("VALUE = 42\n")
    sys.path.append(folder)


_make_library()


def alone(layer: str) -> tuple[str, ...]:
    """The layers to switch off so that `layer` has to hold by itself."""
    kept = {layer} | COMPANIONS.get(layer, set())
    return tuple(name for name in tool_sandbox.LAYERS if name not in kept)


def sandbox(timeout: float = SECONDS, memory=MEMORY, policy: bool = False, library: bool = False, disabled=()):
    """A PythonSandbox; without `policy` all code goes to the jail."""
    made = tool_sandbox.PythonSandbox(timeout, memory, layers_off=disabled)
    if library:
        made.allowed_modules.add(LIBRARY)
    if not policy:
        made._check_code_safety = lambda code: (True, "")
    return made


def run(code: str, disabled: tuple[str, ...] = (), library: bool = False, **options) -> tool_sandbox.ToolOutput:
    if library:
        code = f"import {LIBRARY}\n{code}"
    return asyncio.run(sandbox(library=library, disabled=disabled, **options).execute_code(code))


def request(code: str) -> bytes:
    """What the host sends to a child."""
    return wire.request(wire.RUN, SECONDS, code)


def resting_processes() -> int:
    """Of this host: its workers, each with the process that waits outside its namespace, and pre-forked children."""
    return sum(2 + len(worker.preforked) for worker in POOL.workers())


def prefork_all() -> None:
    """Else there are some fewer children, by chance."""
    for worker in POOL.workers():
        worker.preforked.extend(worker.fork(pool.PREFORKED_CHILDREN - len(worker.preforked)))


def missing_layers(library: bool = False) -> dict[str, str]:
    """What the sandbox itself reports missing on this machine, with its reasons."""
    run("print(1)", library=library, memory=2**28 + secrets.randbelow(2**20))  # a worker that is not there yet
    return POOL.workers()[-1].missing


def landlock_abi() -> int:
    """0 where the kernel has no Landlock."""
    return max(0, _libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def processor_wait() -> float:
    """Seconds for which this thread was ready to run while others had the processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextlib.asynccontextmanager
async def loop_holds(pause: float = 0.0):
    """A list, filled with how many seconds the event loop was held at each look, one every `pause` seconds.

    What other processes held it up is not counted: the machine may be busy with more than the test.
    """
    holds: list[float] = []

    async def watch():
        while True:
            waited, started = processor_wait(), time.perf_counter()
            await asyncio.sleep(pause)
            held = time.perf_counter() - started - pause
            holds.append(held - (processor_wait() - waited))

    watcher = asyncio.create_task(watch())
    try:
        yield holds
        await asyncio.sleep(2 * pause)  # so that whatever held the loop last is in the list too
    finally:
        watcher.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# The world outside

CANARY_PROGRAM = """
import ctypes, os, signal, sys, time
secret = ctypes.create_string_buffer(os.environ["RETOOL_CANARY"].encode())
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
print(ctypes.addressof(secret), flush=True)
time.sleep(3600)
"""


class Canary(NamedTuple):
    """A process that blocks all signals, so that each one sent to it stays pending, where the watcher sees it."""

    process: subprocess.Popen
    address: int  # of its secret in its memory

    def state(self) -> tuple:
        """What others could change about it. Equal to the state at its start if nobody did."""
        pid = self.process.pid
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return (
            self.process.poll(),
            *(int(status[name], 16) for name in ("SigPnd", "ShdPnd")),
            status["TracerPid"].strip(),
            status["State"].split()[0] in ("T", "t"),
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getscheduler(pid),
            os.sched_getaffinity(pid),
            resource.prlimit(pid, resource.RLIMIT_NOFILE),
            Path(f"/proc/{pid}/oom_score_adj").read_text(),
        )


class Outside:
    """Made once for a test module; `touched` says what has changed since it was made or last mended."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.secret = f"canary-{secrets.token_hex(12)}"
        self.private, self.public = folder / "private", folder / "public"
        self.drop, self.mount = folder / "drop", folder / "mount"
        self.mount.mkdir()
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.unix_path, self.abstract_name = str(folder / "socket"), f"\0retool-{secrets.token_hex(8)}"
        self.unix.bind(self.unix_path)
        self.abstract.bind(self.abstract_name)
        self.sockets = {"tcp": self.tcp, "udp": self.udp, "unix": self.unix, "abstract": self.abstract}
        for name, listening in self.sockets.items():
            if name != "udp":
                listening.listen()
        os.chmod(self.unix_path, 0o777)
        self.key = secrets.randbelow(2**30) + 1
        self.shared_memory = _system_v("shmget", self.key, 4096, 0o1666)
        self.queue = _system_v("msgget", self.key, 0o1666)
        self.environment = {"RETOOL_CANARY": self.secret}
        self.canary = self._start_canary()
        self.mend()

    def _start_canary(self) -> Canary:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CANARY_PROGRAM],
            env=self.environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        return Canary(process, int(process.stdout.readline()))

    def mend(self) -> None:
        """Put everything back as it was, after an attack that was let through on purpose."""
        self._unmount()
        for path in (self.private, self.public):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.drop, ignore_errors=True)
        self.drop.mkdir()
        self.drop.chmod(0o777)
        for path, mode in ((self.private, 0o600), (self.public, 0o666)):
            path.write_text(self.secret)
            path.chmod(mode)
            os.utime(path, (1e9, 1e9))
        for name, listening in self.sockets.items():
            while self._arrived(listening):
                if name == "udp":
                    listening.recv(65536)
                else:
                    listening.accept()[0].close()
        if _system_v("msgget", self.key, 0o1666) != -1:
            _libc.msgctl(self.queue, 0, None)
            self.queue = _system_v("msgget", self.key, 0o1666)
        state = getattr(self, "canary_state", None)
        if state and state != self.canary.state():
            self._end_canary()
            self.canary = self._start_canary()
        self.files, self.canary_state = self._files(), self.canary.state()

    def _unmount(self) -> None:
        while os.path.ismount(self.mount) and _libc.umount2(os.fsencode(self.mount), 2) == 0:
            pass

    def _files(self) -> dict[str, tuple]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            stat = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[path.name] = (
                stat.st_mode,
                stat.st_uid,
                stat.st_gid,
                stat.st_nlink,
                stat.st_mtime_ns if content else 0,
                content,
                os.listxattr(path, follow_symlinks=False),
            )
        return found

    @staticmethod
    def _arrived(listening: socket.socket) -> bool:
        return bool(select.select([listening], [], [], 0)[0])

    def touched(self) -> list[str]:
        """What was reached; empty if all is as it was."""
        found = [f"the {name} socket" for name, listening in self.sockets.items() if self._arrived(listening)]
        if os.path.ismount(self.mount):
            found.append("a mount")
        if self._files() != self.files:
            found.append("files")
        if self.canary.state() != self.canary_state:
            found.append("the canary process")
        if b" " + str(self.queue).encode() + b" " in _waiting_messages():
            found.append("the message queue")
        return found

    def facts(self) -> dict:
        """What an attacker may know: everything but the secret itself."""
        return {
            "HOST": os.getpid(),
            "CANARY": self.canary.process.pid,
            "ADDRESS": self.canary.address,
            "SECRET_BYTES": len(self.secret),
            "FOLDER": str(self.folder),
            "DROP": str(self.drop),
            "PRIVATE": str(self.private),
            "PUBLIC": str(self.public),
            "MOUNT": str(self.mount),
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "UNIX": self.unix_path,
            "ABSTRACT": self.abstract_name,
            "KEY": self.key,
            "PROJECT": str(SANDBOX_FILES),
            "HOME": os.path.expanduser("~"),
            "LIBRARY": os.path.dirname(os.__file__),
            "LOADER": LOADER,
            "X86": platform.machine() == "x86_64",
            "DESCRIPTOR": self.tcp.fileno(),
        }

    def _end_canary(self) -> None:
        self.canary.process.kill()
        self.canary.process.wait()
        self.canary.process.stdout.close()

    def close(self) -> None:
        self._end_canary()
        self._unmount()
        for listening in self.sockets.values():
            listening.close()
        _libc.shmctl(self.shared_memory, 0, None)
        _libc.msgctl(self.queue, 0, None)


def _system_v(name: str, *arguments) -> int:
    """An identifier, or -1 where this machine has none to give."""
    flags = arguments[-1]
    return getattr(_libc, name)(*arguments[:-1], flags)


def _waiting_messages() -> bytes:
    """The identifiers of System V queues that hold messages, each between blanks."""
    try:
        lines = Path("/proc/sysvipc/msg").read_text().splitlines()[1:]
    except OSError:
        return b""
    return " ".join(["", *(line.split()[1] for line in lines if int(line.split()[4])), ""]).encode()


@contextlib.contextmanager
def outside():
    """An `Outside` in a private folder of its own, with its secret in this process's environment too."""
    with tempfile.TemporaryDirectory(prefix="retool-outside-") as folder:
        os.chmod(folder, 0o755)
        world = Outside(Path(folder))
        os.environ.update(world.environment)
        try:
            yield world
        finally:
            for name in world.environment:
                del os.environ[name]
            world.close()


def below() -> set[int]:
    """All processes below this one, zombies included, but those of the Ray cluster that the tests share."""
    found = descendants(os.getpid(), zombies=True)
    for pid in set(found):
        with contextlib.suppress(OSError):
            if b"ray.init(" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found -= descendants(pid, zombies=True) | {pid}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What attack programs start with

# Name: number on x86_64, number on aarch64 (None: no such call there).
SYSTEM_CALLS = {
    "add_key": (248, 217), "bpf": (321, 280), "capset": (126, 91), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "execveat": (322, 281), "fanotify_init": (300, 262), "fchmodat": (268, 53),
    "fcntl": (72, 25), "fsopen": (430, 430), "fstat": (5, 80), "futex": (202, 98), "getpid": (39, 172),
    "init_module": (175, 105), "inotify_add_watch": (254, 27), "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425), "iopl": (172, None), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "keyctl": (250, 219), "memfd_create": (319, 279), "mlock": (149, 228), "mount": (165, 40), "mprotect": (10, 226),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgget": (68, 186), "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "openat": (257, 56),
    "openat2": (437, 437), "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pipe2": (293, 59), "pivot_root": (155, 41),
    "pkey_mprotect": (329, 288), "prctl": (157, 167), "prlimit64": (302, 261), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "reboot": (169, 142), "renameat2": (316, 276),
    "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122), "seccomp": (317, 277), "semget": (64, 190), "sethostname": (170, 161),
    "setns": (308, 268), "shmget": (29, 194), "socket": (41, 198), "statfs": (137, 43), "swapoff": (168, 225),
    "syslog": (103, 116), "tgkill": (234, 131), "timer_create": (222, 107), "tkill": (200, 130), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())

PRELUDE = '''
import ctypes, os, sys, struct, signal, resource, time
import _socket as socket  # all that the worker has of it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
def system_call(name, *arguments):
    """The raw system call; OSError where the kernel refuses it."""
    number = NUMBERS[name] if isinstance(name, str) else name
    if number is None:
        raise OSError(38, "no such call on this machine")
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    converted += [ctypes.c_long(0)] * (6 - len(converted))
    result = _libc.syscall(ctypes.c_long(number), *converted)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result
def got(*what):
    print("GOT", *what, flush=True)
def buffer(content):
    return ctypes.create_string_buffer(content)
def vector(address, size):
    return buffer(struct.pack("=QQ", address, size))
def own_descriptor():
    return sys.modules["retool.sandbox.child"]._call
def open_descriptors(most=1024):
    status, fstat = buffer(512), ctypes.c_long(NUMBERS["fstat"])
    return [number for number in range(most) if _libc.syscall(fstat, ctypes.c_long(number), status) == 0]
def reached(name, *arguments):
    """For calls that must not be let do their work: with arguments that are wrong, got past the question who may."""
    try:
        got(system_call(name, *arguments))
    except OSError as error:
        if error.errno in (1, 13, 38):
            raise
        got(error)
AT_FDCWD = -100
'''


def with_helpers(code: str) -> str:
    numbers = {name: pair[COLUMN] for name, pair in SYSTEM_CALLS.items()}
    return f"NUMBERS = {numbers!r}\n{PRELUDE}\n{code}"


def program(code: str, facts: dict) -> str:
    """A whole attack: facts, helpers, and the attack's own code, whose refusal by the kernel ends it in one line."""
    assigned = "\n".join(f"{name} = {value!r}" for name, value in facts.items())
    body = "\n".join(f"        {line}" for line in code.strip("\n").split("\n"))
    guard = "    except OSError as error:\n        print('REFUSED', error)"
    return with_helpers(f"{assigned}\ndef attack():\n    try:\n{body}\n{guard}\nattack()\n")
