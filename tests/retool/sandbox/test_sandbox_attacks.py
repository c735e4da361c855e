"""Attacks on the real jail, by name. The source policy is bypassed: what is tested is the jail itself.

Each attack of the first part names the layers each of which stops it alone. It runs with all layers on (in a plain
worker and in one that may read libraries), with each of those layers alone, and with none at all, which must let it
through: so an attack that fails for a reason of its own cannot pass for one that was stopped. What got out is looked
up from outside (`jail.Outside`); after each attack the next call has to work and be right.

The second part attacks what limits, the protocol and the host have to withstand: bombs, floods, forged replies,
crashes, programs that refuse to end, and what an earlier call leaves.
"""

import os
import re
import subprocess
import sys
from typing import NamedTuple

import jail
import pytest
from tool_sandbox import SandboxError

pytestmark = pytest.mark.skipif(jail.COLUMN is None, reason="no table of system calls for this machine's architecture")


class Attack(NamedTuple):
    name: str
    stopped_by: tuple[str, ...]  # layers that stop it alone, "landlock:6" from that ABI; none: it never works
    code: str  # prints GOT if it succeeded
    stopped_in_library: bool  # by the worker that may read libraries, too


def attack(name: str, stopped_by: str, code: str, stopped_in_library: bool = True) -> Attack:
    return Attack(name, tuple(stopped_by.split()), code, stopped_in_library)


def name_of(value) -> str:
    return getattr(value, "name", value)


# Layers that stop what needs a path; a look at a name or its status, which Landlock leaves alone; what only root or a
# capability may do; what reaches for another process.
PATHS = "namespaces landlock seccomp"
LOOKS = "namespaces seccomp"
POWERS = "user capabilities seccomp"
OTHERS = "namespaces landlock:6 seccomp user"

ENVIRONMENT_AND_PROC = [
    attack("own-environment", "", "found = [name for name in os.environ if 'CANARY' in name]\nif found: got(found)"),
    attack(
        "c-library-environment",
        "",
        """
environment, position = ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ"), 0
while environment and environment[position]:
    if b"CANARY" in environment[position]: got(environment[position])
    position += 1
""",
    ),
    attack("proc-self-environ", PATHS, "got(len(open('/proc/self/environ', 'rb').read()))"),
    attack("proc-parent-environ", PATHS, "got(len(open(f'/proc/{os.getppid()}/environ').read()))"),
    attack("proc-host-environ", PATHS + " user", "got(open(f'/proc/{HOST}/environ').read())"),
    attack("proc-canary-environ", PATHS + " user", "got(open(f'/proc/{CANARY}/environ').read())"),
    attack("proc-host-cmdline", PATHS, "got(open(f'/proc/{HOST}/cmdline').read())"),
    attack("proc-self-maps", PATHS, "got(len(open('/proc/self/maps').read()))"),
    attack("proc-parent-maps", PATHS, "got(len(open(f'/proc/{os.getppid()}/maps').read()))"),
    attack("proc-self-mem", PATHS, "got(os.open('/proc/self/mem', os.O_RDWR))"),
    attack("proc-parent-mem", PATHS, "got(os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR))"),
    attack(
        "proc-canary-mem-read",
        PATHS + " user",
        """
with open(f'/proc/{CANARY}/mem', 'rb', 0) as memory:
    memory.seek(ADDRESS)
    got(memory.read(SECRET_BYTES))
""",
    ),
    attack("proc-canary-mem-write", PATHS + " user", "got(os.open(f'/proc/{CANARY}/mem', os.O_RDWR))"),
    attack("proc-self-root", PATHS, "got(open('/proc/self/root' + PUBLIC).read())"),
    attack("proc-host-root", PATHS + " user", "got(open(f'/proc/{HOST}/root' + PRIVATE).read())"),
    attack("proc-host-cwd", PATHS + " user", "got(os.listdir(f'/proc/{HOST}/cwd'))"),
    attack("proc-host-descriptors", PATHS + " user", "got(os.listdir(f'/proc/{HOST}/fd'))"),
    attack("proc-host-descriptor-open", PATHS + " user", "got(os.open(f'/proc/{HOST}/fd/0', 0))"),
    attack("proc-list", PATHS, "got(len(os.listdir('/proc')))"),
    attack("proc-host-exe-link", LOOKS + " user", "got(os.readlink(f'/proc/{HOST}/exe'))", False),
    attack("proc-kernel-settings", PATHS, "got(open('/proc/sys/kernel/ostype').read())"),
    attack("proc-canary-oom-score", PATHS, "open(f'/proc/{CANARY}/oom_score_adj', 'w').write('999')\ngot()"),
    attack("sys-list", PATHS, "got(len(os.listdir('/sys/kernel')))"),
    attack("device-null", PATHS, "got(os.open('/dev/null', os.O_RDWR))"),
]
FILES_READ = [
    attack("read-shadow", PATHS + " user", "got(len(open('/etc/shadow').read()))"),
    attack("read-passwd", PATHS, "got(len(open('/etc/passwd').read()))"),
    attack("read-private", PATHS + " user", "got(open(PRIVATE).read())"),
    attack("read-public", PATHS, "got(open(PUBLIC).read())"),
    attack("read-raw-openat", PATHS, "got(os.read(system_call('openat', AT_FDCWD, PUBLIC.encode(), 0), 99))"),
    attack(
        "read-openat2",
        PATHS,
        "got(os.read(system_call('openat2', AT_FDCWD, PUBLIC.encode(), buffer(24), 24), 99))",
    ),
    attack(
        "read-by-handle",
        PATHS + " user capabilities",
        """
handle, mount = buffer(struct.pack("=Ii", 128, 0) + bytes(128)), buffer(4)
system_call("name_to_handle_at", AT_FDCWD, PUBLIC.encode(), handle, mount, 0)
directory = os.open(FOLDER, os.O_RDONLY)
got(os.read(system_call("open_by_handle_at", directory, handle, 0), 99))
""",
    ),
    attack("read-open-tree", LOOKS, "got(system_call('open_tree', AT_FDCWD, FOLDER.encode(), 0))"),
    attack("read-project", PATHS, "got(open(PROJECT + '/tool_sandbox.py').read(20))"),
    attack("list-project", PATHS, "got(os.listdir(PROJECT))"),
    attack("list-home", PATHS, "got(len(os.listdir(HOME)))"),
    attack("list-root", PATHS, "if os.listdir('/'): got()"),
    attack("list-temporary", PATHS, "got(len(os.listdir('/tmp')))"),
    attack("list-parent-directories", PATHS, "if os.listdir('../../../../..'): got()"),
    attack("look-stat", LOOKS, "got(os.stat(PUBLIC).st_size)", False),
    attack("look-access", LOOKS, "if os.access(PUBLIC, os.F_OK): got()", False),
    attack("look-statfs", "seccomp", "got(system_call('statfs', b'/', buffer(256)))"),
    attack("look-chdir", LOOKS, "os.chdir(FOLDER)\ngot()"),
    attack(
        "look-inotify",
        LOOKS,
        "got(system_call('inotify_add_watch', system_call('inotify_init1', 0), FOLDER.encode(), 0xFFF))",
    ),
    attack("look-fanotify", POWERS, "got(system_call('fanotify_init', 4, 0))"),
]
FILES_WRITTEN = [
    attack("write-private", PATHS + " user", "open(PRIVATE, 'a').write('x')\ngot()"),
    attack("write-public", PATHS, "open(PUBLIC, 'r+').write('x')\ngot()"),
    attack("write-truncating", PATHS, "os.open(PUBLIC, os.O_WRONLY | os.O_TRUNC)\ngot()"),
    attack("write-read-only-truncating", PATHS + ":3", "os.open(PUBLIC, os.O_RDONLY | os.O_TRUNC)\ngot()"),
    attack("make-file", PATHS, "os.open(DROP + '/new', os.O_WRONLY | os.O_CREAT, 0o666)\ngot()"),
    attack("make-file-without-a-name", PATHS, "got(os.open(DROP, 0o20200002, 0o600))"),
    attack(
        "make-file-in-own-directory",
        PATHS,
        "os.open('retool-own', os.O_RDWR | os.O_CREAT)\nos.unlink('retool-own')\ngot()",
    ),
    attack(
        "make-shared-memory-file",
        PATHS,
        "os.open('/dev/shm/retool', os.O_RDWR | os.O_CREAT)\nos.unlink('/dev/shm/retool')\ngot()",
    ),
    attack(
        "make-library-file",
        PATHS + " user",
        "os.open(LIBRARY + '/retool', os.O_RDWR | os.O_CREAT)\nos.unlink(LIBRARY + '/retool')\ngot()",
    ),
    attack("make-directory", PATHS, "os.mkdir(DROP + '/new')\ngot()"),
    attack("make-link", PATHS, "os.link(PUBLIC, DROP + '/new')\ngot()"),
    attack("make-symbolic-link", PATHS, "os.symlink('/etc', DROP + '/new')\ngot()"),
    attack("make-fifo", PATHS, "os.mkfifo(DROP + '/new')\ngot()"),
    attack("make-device", PATHS + " user capabilities", "os.mknod(DROP + '/new', 0o020666, os.makedev(1, 3))\ngot()"),
    attack("make-socket-file", PATHS, "os.mknod(DROP + '/new', 0o140666)\ngot()"),
    attack("rename", PATHS + " user", "os.rename(PUBLIC, DROP + '/new')\ngot()"),
    attack(
        "rename-exchange",
        PATHS + " user",
        "got(system_call('renameat2', AT_FDCWD, PUBLIC.encode(), AT_FDCWD, PRIVATE.encode(), 2))",
    ),
    attack("unlink", PATHS + " user", "os.unlink(PUBLIC)\ngot()"),
    attack("remove-directory", PATHS + " user", "os.rmdir(DROP)\ngot()"),
    attack("truncate", "namespaces landlock:3 seccomp", "os.truncate(PUBLIC, 1)\ngot()"),
    attack("chmod", LOOKS + " user", "os.chmod(PUBLIC, 0o777)\ngot()"),
    attack("chmod-raw", LOOKS + " user", "got(system_call('fchmodat', AT_FDCWD, PRIVATE.encode(), 0o644))"),
    attack("chown", LOOKS + " user", "os.chown(PUBLIC, os.getuid(), 12345 if os.getuid() == 0 else -1)\ngot()"),
    attack("change-times", LOOKS + " user", "os.utime(PUBLIC, (1, 1))\ngot()"),
    attack("set-attribute", LOOKS, "os.setxattr(PUBLIC, 'user.retool', b'x')\ngot()"),
    attack("write-memory-file", "seccomp limits", "got(os.write(system_call('memfd_create', b'x', 0), b'x'))"),
]
NETWORK = [
    attack(
        "tcp-connect",
        "namespaces landlock:4 seccomp",
        "socket.socket().connect(('127.0.0.1', TCP))\ngot()",
    ),
    attack(
        "tcp-connect-ipv6",
        "namespaces landlock:4 seccomp",
        "socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', TCP))\ngot()",
    ),
    attack(
        "tcp-listen",
        "landlock:4 seccomp",
        "s = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\ngot(s.getsockname())",
    ),
    attack("udp-send", LOOKS, "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))\ngot()"),
    attack("udp-listen", "seccomp", "socket.socket(type=socket.SOCK_DGRAM).bind(('127.0.0.1', 0))\ngot()"),
    attack("unix-connect", LOOKS, "socket.socket(socket.AF_UNIX).connect(UNIX)\ngot()"),
    attack("unix-listen", PATHS, "socket.socket(socket.AF_UNIX).bind(DROP + '/new')\ngot()"),
    attack(
        "unix-abstract-connect",
        "namespaces landlock:6 seccomp",
        "socket.socket(socket.AF_UNIX).connect(ABSTRACT)\ngot()",
    ),
    attack(
        "unix-abstract-listen",
        "seccomp",
        "s = socket.socket(socket.AF_UNIX)\ns.bind('\\0retool-new')\ns.listen()\ngot()",
    ),
    attack("unix-pair", "seccomp", "got(socket.socketpair())"),
    attack("raw-socket", POWERS, "got(socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))"),
    attack("packet-socket", POWERS, "got(socket.socket(17, socket.SOCK_RAW, 0))"),
    attack("netlink-socket", "seccomp", "got(socket.socket(16, socket.SOCK_RAW, 0))"),
    attack(
        "socket-of-any-family",
        "seccomp",
        """
for family in range(64):
    for kind in (1, 2, 3, 5):
        try: got(family, kind, system_call("socket", family, kind, 0))
        except OSError as error: last = error
raise last
""",
    ),
    attack("socket-raw-call", "seccomp", "got(system_call('socket', 2, 1, 0))"),
    attack(
        "pass-a-descriptor",
        "seccomp",
        """
call = socket.socket(fileno=own_descriptor())
call.sendmsg([b"o"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", call.fileno()))])
call.detach()
got()
""",
    ),
]
PROGRAMS_AND_PROCESSES = [
    attack("exec", PATHS, "os.execv('/bin/sh', ['sh', '-c', f'echo x > {DROP}/executed'])"),
    attack(
        "exec-by-descriptor",
        PATHS,
        "os.execve(os.open('/bin/sh', os.O_RDONLY), ['sh', '-c', f'echo x > {DROP}/executed'], {})",
    ),
    attack(
        "exec-memory-file",
        PATHS + " limits",
        """
script = system_call("memfd_create", b"x", 0)
os.write(script, f"#!/bin/sh\\necho x > {DROP}/executed\\n".encode())
arguments = (ctypes.c_char_p * 2)(b"x", None)
system_call("execveat", script, b"", arguments, ctypes.pointer(ctypes.c_char_p(None)), 0x1000)
""",
    ),
    attack(
        "exec-through-the-loader",
        PATHS,
        "os.execv(LOADER, [LOADER, '/bin/sh', '-c', f'echo x > {DROP}/executed'])",
    ),
    attack("system", PATHS + " limits", "os.system(f'echo x > {DROP}/executed')"),
    attack(
        "spawn",
        PATHS + " limits",
        "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', f'echo x > {DROP}/executed'], {}), 0)",
    ),
    attack(
        "open-a-pipe-to-a-program", PATHS + " limits", "import posix\nposix.system('/bin/mkdir ' + DROP + '/executed')"
    ),
    attack("fork", "seccomp limits", "child = os.fork()\nif child == 0: os._exit(0)\nos.waitpid(child, 0)\ngot()"),
    attack("fork-pseudo-terminal", "seccomp limits", "child, _ = os.forkpty()\nif child == 0: os._exit(0)\ngot()"),
    attack(
        "clone-raw",
        "seccomp limits",
        "child = system_call('clone', signal.SIGCHLD, 0, 0, 0, 0)\nif child == 0: os._exit(0)\ngot()",
    ),
    attack(
        "clone3-raw",
        "seccomp limits",
        """
arguments = buffer(struct.pack("=8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
child = system_call("clone3", arguments, 64)
if child == 0: os._exit(0)
got()
""",
    ),
    attack(
        "thread",
        "seccomp limits",
        """
import _thread
ran = []
try:
    _thread.start_new_thread(ran.append, (1,))
except RuntimeError as error:
    raise OSError(11, str(error))
time.sleep(0.2)
if ran: got()
""",
    ),
    attack("leave-the-process-group", "seccomp", "os.setpgid(0, os.getpgid(os.getppid()))\ngot()"),
    attack("stay-when-the-worker-dies", "seccomp", "got(system_call('prctl', 1, 0, 0, 0, 0))"),
]
OTHER_PROCESSES = [
    attack("signal-canary", OTHERS, "os.kill(CANARY, signal.SIGUSR1)\ngot()"),
    attack("signal-canary-group", OTHERS, "os.killpg(CANARY, signal.SIGUSR1)\ngot()"),
    attack("signal-canary-tkill", OTHERS, "got(system_call('tkill', CANARY, signal.SIGUSR1))"),
    attack("signal-canary-tgkill", OTHERS, "got(system_call('tgkill', CANARY, CANARY, signal.SIGUSR1))"),
    attack(
        "signal-canary-queue",
        OTHERS,
        "got(system_call('rt_sigqueueinfo', CANARY, 10, buffer(struct.pack('=iii', 10, 0, -1) + bytes(116))))",
    ),
    attack(
        "signal-canary-thread-queue",
        OTHERS,
        """
what = buffer(struct.pack("=iii", 10, 0, -1) + bytes(116))
got(system_call("rt_tgsigqueueinfo", CANARY, CANARY, 10, what))
""",
    ),
    attack(
        "signal-canary-by-descriptor",
        OTHERS,
        "got(system_call('pidfd_send_signal', system_call('pidfd_open', CANARY, 0), signal.SIGUSR1, 0, 0))",
    ),
    attack(
        "signal-canary-by-a-pipe",
        OTHERS,
        """
ends = (ctypes.c_int * 2)()
system_call("pipe2", ends, 0)
system_call("fcntl", ends[0], 8, CANARY)
system_call("fcntl", ends[0], 10, signal.SIGUSR1)
system_call("fcntl", ends[0], 4, 0o20000)
os.write(ends[1], b"x")
""",
    ),
    attack("signal-parent", "landlock:6 seccomp", "os.kill(os.getppid(), signal.SIGTERM)\ngot()"),
    attack(
        "signal-canary-by-own-socket",
        OTHERS,
        """
call = own_descriptor()
system_call("fcntl", call, 8, CANARY)
system_call("fcntl", call, 10, signal.SIGUSR1)
system_call("fcntl", call, 4, 0o20000)  # the signal goes out when the host closes its end
""",
    ),
    attack("signal-host", OTHERS, "os.kill(HOST, 0)\ngot()"),
    attack("signal-everyone", OTHERS, "os.kill(-1, signal.SIGURG)"),  # which is ignored by default
    attack(
        "signal-siblings",
        "landlock:6 seccomp",
        """
near = [pid for pid in range(max(1, os.getpid() - 40), os.getpid() + 40) if pid != os.getpid()]
for pid in near:
    try: got(os.kill(pid, 0))
    except OSError as error: last = error
raise last
""",
    ),
    attack("trace-canary", PATHS + " user", "got(system_call('ptrace', 0x4206, CANARY, 0, 0))"),
    attack(
        "trace-parent", "landlock seccomp user capabilities", "got(system_call('ptrace', 0x4206, os.getppid(), 0, 0))"
    ),
    attack(
        "memory-of-canary-read",
        PATHS + " user",
        """
content = buffer(SECRET_BYTES)
local, remote = vector(ctypes.addressof(content), SECRET_BYTES), vector(ADDRESS, SECRET_BYTES)
system_call("process_vm_readv", CANARY, local, 1, remote, 1, 0)
got(content.raw)
""",
    ),
    attack(
        "memory-of-canary-write",
        PATHS + " user",
        """
content = buffer(b"x")
local, remote = vector(ctypes.addressof(content), 1), vector(ADDRESS, 1)
got(system_call("process_vm_writev", CANARY, local, 1, remote, 1, 0))
""",
    ),
    attack(
        "memory-of-parent",
        "landlock seccomp user capabilities",
        """
content = buffer(16)
local, remote = vector(ctypes.addressof(content), 16), vector(id(os), 16)
got(system_call("process_vm_readv", os.getppid(), local, 1, remote, 1, 0))
""",
    ),
    attack(
        "memory-of-siblings",
        "landlock seccomp user capabilities",
        """
content = buffer(16)
local, remote = vector(ctypes.addressof(content), 16), vector(id(os), 16)
for pid in range(max(2, os.getpid() - 40), os.getpid() + 40):
    if pid in (os.getpid(), os.getppid()): continue
    try: got(system_call("process_vm_readv", pid, local, 1, remote, 1, 0))
    except OSError as error: last = error
raise last
""",
    ),
    attack(
        "descriptor-of-host",
        PATHS + " user",
        "got(system_call('pidfd_getfd', system_call('pidfd_open', HOST, 0), DESCRIPTOR, 0))",
    ),
    attack("compare-with-host", PATHS + " user", "got(system_call('kcmp', HOST, CANARY, 2, 0, 0))"),
    attack("renice-canary", LOOKS + " user", "os.setpriority(os.PRIO_PROCESS, CANARY, 5)\ngot()"),
    attack(
        "pin-canary", LOOKS + " user", "got(system_call('sched_setaffinity', CANARY, 8, buffer(struct.pack('=Q', 1))))"
    ),
    attack(
        "reschedule-canary", LOOKS + " user", "os.sched_setscheduler(CANARY, os.SCHED_IDLE, os.sched_param(0))\ngot()"
    ),
    attack("limit-canary", LOOKS + " user", "resource.prlimit(CANARY, resource.RLIMIT_NOFILE, (9, 9))\ngot()"),
    attack("slow-canary-disk", LOOKS + " user", "got(system_call('ioprio_set', 1, CANARY, 3 << 13))"),
]
PRIVILEGES = [
    attack(
        "raise-limits",
        "limits seccomp",
        """
for name in ("AS", "NOFILE", "NPROC", "FSIZE", "CORE", "MEMLOCK"):
    number = getattr(resource, "RLIMIT_" + name)
    try:
        most = 1 << 20 if name == "NOFILE" else resource.RLIM_INFINITY
        resource.setrlimit(number, (most, most))
        got(name)
    except (OSError, ValueError) as error: last = error
raise OSError(1, str(last))
""",
    ),
    attack("raise-limits-raw", "limits seccomp", "got(system_call('prlimit64', 0, 9, vector(2**63, 2**63), 0))"),
    attack("lock-memory", "limits seccomp", "block = buffer(8192)\ngot(system_call('mlock', block, 8192))"),
    attack("become-root", "user seccomp", "os.setuid(0)\ngot()"),
    attack("become-root-group", "user seccomp", "os.setgid(0)\ngot()"),
    attack("become-root-all-ids", "user seccomp", "os.setresuid(0, 0, 0)\ngot()"),
    attack("become-another-user", POWERS, "os.setuid(12345)\ngot()"),
    attack("join-groups", POWERS, "os.setgroups([0, 4, 6])\ngot()"),
    attack(
        "regain-capabilities",
        POWERS,
        """
header, one = buffer(struct.pack("=Ii", 0x20080522, 0)), buffer(struct.pack("=III", 1, 1, 0) + bytes(12))
got(system_call("capset", header, one))
""",
    ),
    attack("no-no-new-privileges", "no_new_privs seccomp", "if system_call('prctl', 39, 0, 0, 0, 0) == 0: got()"),
    attack("become-dumpable", "seccomp", "got(system_call('prctl', 4, 1, 0, 0, 0))"),
    attack("mount", POWERS + " landlock", "got(system_call('mount', b'tmpfs', MOUNT.encode(), b'tmpfs', 0, b''))"),
    attack("mount-by-new-calls", POWERS, "got(system_call('fsopen', b'tmpfs', 0))"),
    attack("unmount", POWERS, "reached('umount2', MOUNT.encode(), 0)"),
    attack("unshare-user", "seccomp namespaces", "got(system_call('unshare', 0x10000000))"),
    attack("unshare-files", POWERS, "got(system_call('unshare', 0x00020000))"),
    attack("unshare-network", POWERS, "got(system_call('unshare', 0x40000000))"),
    attack("unshare-processes", POWERS, "got(system_call('unshare', 0x20000000))"),
    attack("unshare-ipc", POWERS, "got(system_call('unshare', 0x08000000))"),
    attack(
        "unshare-user-and-mount",
        PATHS,
        "system_call('unshare', 0x10020000)\ngot(system_call('mount', b'tmpfs', MOUNT.encode(), b'tmpfs', 0, b''))",
    ),
    attack(
        "enter-host-network",
        PATHS + " user capabilities",
        "got(system_call('setns', os.open(f'/proc/{HOST}/ns/net', 0), 0))",
    ),
    attack(
        "enter-host-by-descriptor",
        POWERS + " namespaces",
        "got(system_call('setns', system_call('pidfd_open', HOST, 0), 0x40000000))",
    ),
    attack("chroot", POWERS + " namespaces", "os.chroot(FOLDER)\ngot()"),
    attack(
        "chroot-escape",
        PATHS + " user capabilities",
        """
os.chroot("/")
os.mkdir(DROP + "/new")
os.chroot(DROP + "/new")
for _ in range(50): os.chdir("..")
os.chroot(".")
got(open(PUBLIC).read())
""",
    ),
    attack("pivot-root", POWERS, "reached('pivot_root', b'/retool-none', b'/retool-none')"),
    attack(
        "set-host-name",
        POWERS,
        "name = os.uname().nodename.encode()\ngot(system_call('sethostname', name, len(name)))",
    ),
    attack("load-module", POWERS, "reached('init_module', 0, 0, b'')"),
    attack("unload-module", POWERS, "reached('delete_module', b'retool_none', 0o4000)"),
    attack("reboot", POWERS, "reached('reboot', 0, 0, 0, 0)"),
    attack("switch-swap-off", POWERS, "reached('swapoff', b'/retool-none')"),
    attack("kernel-log", POWERS, "got(system_call('syslog', 10, 0, 0))"),
    attack("input-output-ports", POWERS, "got(system_call('iopl', 3))"),
    attack("personality", "seccomp", "got(system_call('personality', 0x0400000))"),
    attack("io-uring", "seccomp", "got(system_call('io_uring_setup', 1, buffer(120)))"),
    attack("bpf", "seccomp", "got(system_call('bpf', 0, buffer(struct.pack('=IIII', 2, 4, 4, 1) + bytes(112)), 128))"),
    attack("bpf-filter-of-its-own", "seccomp", "reached('seccomp', 0, 1, 0)"),
    attack(
        "performance-events",
        "seccomp",
        """
clock = buffer(struct.pack("=IIQQQQQ", 1, 112, 0, 0, 0, 0, 0x61) + bytes(64))
got(system_call("perf_event_open", clock, 0, -1, -1, 0))
""",
    ),
    attack("userfaultfd", "seccomp", "got(system_call('userfaultfd', 1))"),
    attack("keyring-read", "seccomp", "got(system_call('keyctl', 0, -4, 1))"),
    attack("keyring-add", "seccomp", "got(system_call('add_key', b'user', b'retool', b'x', 1, -2))"),
    attack("keyring-request", "seccomp", "reached('request_key', b'user', b'retool-none', 0, -2)"),
    attack("shared-memory-of-host", LOOKS, "got(system_call('shmget', KEY, 0, 0))"),
    attack(
        "shared-memory-new",
        "seccomp",
        "number = system_call('shmget', 0, 4096, 0o600)\n_libc.shmctl(number, 0, None)\ngot()",
    ),
    attack(
        "message-queue-of-host",
        LOOKS,
        "got(system_call('msgsnd', system_call('msgget', KEY, 0), buffer(struct.pack('=q', 1) + b'x'), 1, 0))",
    ),
    attack(
        "semaphore-new", "seccomp", "number = system_call('semget', 0, 1, 0o600)\n_libc.semctl(number, 0, 0)\ngot()"
    ),
    attack(
        "posix-message-queue",
        "seccomp limits",
        "system_call('mq_open', b'retool', 0o102, 0o600, 0)\nsystem_call('mq_unlink', b'retool')\ngot()",
    ),
    attack("timer-for-others", "seccomp", "got(system_call('timer_create', 1, 0, buffer(8)))"),
    attack("pipe", "seccomp", "got(system_call('pipe2', (ctypes.c_int * 2)(), 0))"),
]
# Machine code that asks for the process's id and returns it: through the 64-bit entry, and through the 32-bit one.
MACHINE_CODE = """
def run_machine_code(code, make_executable):
    if not X86: raise OSError(38, "the machine code is for x86_64")
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    page = _libc.mmap(None, 4096, 7 if make_executable is None else 3, 0x22, -1, 0)
    if page == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
    ctypes.memmove(page, code, len(code))
    if make_executable: make_executable(page)
    return ctypes.CFUNCTYPE(ctypes.c_int)(page)()
SYSCALL_64, INTERRUPT_32 = b"\\xb8\\x27\\0\\0\\0\\x0f\\x05\\xc3", b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3"
"""
NATIVE_CODE = [
    attack("code-mmap", "seccomp", MACHINE_CODE + "got(run_machine_code(SYSCALL_64, None))", False),
    attack(
        "code-mprotect",
        "seccomp",
        MACHINE_CODE + "got(run_machine_code(SYSCALL_64, lambda page: system_call('mprotect', page, 4096, 5)))",
        False,
    ),
    attack(
        "code-pkey-mprotect",
        "seccomp",
        MACHINE_CODE
        + "got(run_machine_code(SYSCALL_64, lambda page: system_call('pkey_mprotect', page, 4096, 5, -1)))",
    ),
    attack("code-32-bit-entry", "seccomp", MACHINE_CODE + "got(run_machine_code(INTERRUPT_32, None))"),
    attack("code-x32-entry", "seccomp", "got(system_call(0x40000000 + NUMBERS['getpid']))"),
]
ATTACKS = [
    *ENVIRONMENT_AND_PROC,
    *FILES_READ,
    *FILES_WRITTEN,
    *NETWORK,
    *PROGRAMS_AND_PROCESSES,
    *OTHER_PROCESSES,
    *PRIVILEGES,
    *NATIVE_CODE,
]


# ---------------------------------------------------------------------------------------------------------------------
# The same attack against everything, against one layer, and against nothing


@pytest.fixture(scope="module")
def world():
    with jail.outside() as made:
        yield made


@pytest.fixture(scope="module")
def missing():
    """Layers that the sandbox reports missing here, in a plain worker and in one for libraries."""
    return {library: jail.missing_layers(library) for library in (False, True)}


def holds(layer: str, missing: dict[str, str]) -> bool:
    """Whether a layer, as an attack names it, does its work on this machine."""
    name, _, abi = layer.partition(":")
    if name == "user" and os.getuid() != 0:
        return False  # nobody to change to, and nothing to report
    return name not in missing and not (abi and jail.landlock_abi() < int(abi))


def check_next_call(disabled=()):
    assert jail.run("print(6 * 7)", disabled) == "Output:\n42"


def attack_it(attack: Attack, world, disabled=(), library=False) -> str:
    """What the attack printed. It catches what the kernel refuses, so any other exception is a fault of its own."""
    output = jail.run(jail.program(attack.code, world.facts()), disabled, library)
    assert output.outcome != "error", output
    return output


def assert_stopped(attack: Attack, world, disabled=(), library=False):
    try:
        output = attack_it(attack, world, disabled, library)
        assert "GOT" not in output and world.secret not in output
        assert world.touched() == []
    finally:
        world.mend()
    check_next_call(disabled)


# What is switched off: nothing; what a container with its usual profile denies to a user other than root.
PLACES = {"machine": (), "container": ("namespaces", "user")}


@pytest.mark.parametrize("attack", ATTACKS, ids=name_of)
@pytest.mark.parametrize("disabled", PLACES.values(), ids=PLACES)
def test_all_layers_stop_it(attack, disabled, world, missing):
    layers = [layer for layer in attack.stopped_by if layer not in disabled and holds(layer, missing[False])]
    if attack.stopped_by and not layers:
        pytest.skip(f"only these layers stop it, and none is to be had here: {', '.join(attack.stopped_by)}")
    assert_stopped(attack, world, disabled)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.stopped_in_library], ids=name_of)
@pytest.mark.parametrize("disabled", PLACES.values(), ids=PLACES)
def test_all_layers_stop_it_in_a_worker_with_libraries(attack, disabled, world, missing):
    off = {"namespaces", *disabled}  # the first leave such a worker the files
    layers = [layer for layer in attack.stopped_by if layer not in off and holds(layer, missing[True])]
    if attack.stopped_by and not layers:
        pytest.skip(f"only these layers stop it, and none is to be had here: {', '.join(attack.stopped_by)}")
    assert_stopped(attack, world, disabled, library=True)


SINGLE = sorted(
    ((layer, attack) for attack in ATTACKS for layer in attack.stopped_by),
    key=lambda pair: pair[0].partition(":")[0],  # one worker after the other
)


@pytest.mark.parametrize("layer, attack", SINGLE, ids=name_of)
def test_one_layer_alone_stops_it(layer, attack, world, missing):
    if not holds(layer, missing[False]):
        pytest.skip(f"{layer} is not to be had here: {missing[False].get(layer.partition(':')[0], 'see the kernel')}")
    assert_stopped(attack, world, disabled=jail.alone(layer.partition(":")[0]))


# What the kernel says where somebody may not, and where there is no such call; anything else is a broken attack.
REFUSED = re.compile(r"REFUSED \[Errno (1|13|38)\]")


def refusal_without_a_sandbox(attack: Attack, world) -> re.Match | None:
    """How the machine refuses an attack to a plain process of this user; None where it does not."""
    program = jail.program(attack.code, world.facts())
    plain = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    return REFUSED.match(plain.stdout)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.stopped_by], ids=name_of)
def test_nothing_else_stops_it(attack, world):
    """The attack works where no layer holds; else it would prove nothing. It is left out only where this machine
    refuses it: to root in the same way outside of any sandbox; others may not look at a worker, nor do what root may.
    """
    try:
        try:
            output = attack_it(attack, world, disabled=jail.NONE_HOLDS)
        except SandboxError:
            assert attack.name == "signal-parent", "only this one ends the worker, where it is seen in time"
            return
        if "GOT" in output or world.touched() or world.secret in output:
            return
        refused = REFUSED.search(output)
        assert refused, output
        if os.getuid() == 0:
            outside = refusal_without_a_sandbox(attack, world)
            assert outside and outside[0] == refused[0], output
        pytest.skip(f"{attack.name}: this machine refuses it to everyone, or to this user: {output}")
    finally:
        world.mend()


def test_the_filter_alone_keeps_a_call_with_libraries_from_signals_by_descriptor(world):
    """Landlock stops them from ABI 6 only, and such a worker has no other layer against them."""
    (by_own_socket,) = [attack for attack in ATTACKS if attack.name == "signal-canary-by-own-socket"]
    output = attack_it(by_own_socket, world, library=True)
    assert "REFUSED" in output and "'fcntl'" in output
