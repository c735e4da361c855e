"""Both commands on a bare Debian, as root and as an ordinary user: no Python, compiler, curl, npm, sudo or libnuma is
there, and TMPDIR is too small for anything and nothing in it can be executed.

    pytest -m debian tests/retool/cpu/test_cpu_debian.py      as root, with debootstrap; about half an hour

Each root is made by debootstrap, entered in a mount namespace of its own, and removed after its tests. The machine's
own settings of pip come along, with the files that they name; what was downloaded once is kept until the last root is
done.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_helpers import EXAMPLE

pytestmark = [
    pytest.mark.debian,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"),
]

REPOSITORY = EXAMPLE.parents[1]
USER = "anna"
COMMANDS = {
    "rollout": "bash examples/retool/rollout_on_cpu.sh --limit 2 --max-tokens 128",
    "tests": "bash tests/retool/run.sh tests/retool/test_house.py tests/retool/test_closed_paths.py tests/retool/loop/test_prompt.py",
}


@pytest.fixture(scope="module")
def downloads(tmp_path_factory) -> Path:
    """pip's cache, which it uses only where its user may write."""
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def debian(request, tmp_path_factory) -> Path:
    """A bare root with this repository in /work, readable by everyone and writable by nobody but root."""
    root = tmp_path_factory.mktemp(request.param) / "root"
    subprocess.run(["debootstrap", "--variant=minbase", request.param, root], check=True, stdout=subprocess.DEVNULL)
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "outputs")
    shutil.copytree(REPOSITORY, root / "work", ignore=ignored)
    subprocess.run(["chmod", "-R", "a+rX", root / "work"], check=True)
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)
    subprocess.run(["chroot", root, "useradd", "--create-home", USER], check=True)
    yield root
    shutil.rmtree(root)  # nothing is mounted here any more: that ended with its namespace


def run_in(root: Path, user: str, command: str, downloads: Path) -> subprocess.CompletedProcess:
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    settings["PIP_CACHE_DIR"] = str(downloads)
    subprocess.run(["chmod", "-R", "a+rwX", downloads], check=True)
    mounts = [f"mount -t proc proc {root}/proc", f"mount --rbind /sys {root}/sys", f"mount --rbind /dev {root}/dev"]
    for name in ("PIP_CERT", "PIP_FIND_LINKS", "PIP_CACHE_DIR"):
        if (value := settings.get(name)) and os.path.exists(value):
            target = root / "machine" / name
            target.parent.mkdir(exist_ok=True)
            if os.path.isdir(value):
                target.mkdir(exist_ok=True)
            else:
                target.touch()
            mounts.append(f"mount --bind {value} {target}")
            settings[name] = f"/machine/{name}"
    (root / "machine" / "small").mkdir(mode=0o1777, exist_ok=True)
    mounts.append(f"mount -t tmpfs -o size=1m,noexec,mode=1777 small {root}/machine/small")
    home = "/root" if user == "root" else f"/home/{user}"
    environment = {"HOME": home, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TERM": "dumb", "TMPDIR": "/machine/small"}
    environment |= settings
    words = " ".join(f"{name}={value}" for name, value in environment.items())
    in_home = f'cd {home} && cp -r /work . && cd work && {command} && test -z "$(ls -A /machine/small)"'
    inside = f"chroot --userspec={user}:{user} {root} env -i {words} bash -c '{in_home}'"
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", " && ".join([*mounts, inside])],
        capture_output=True,
        text=True,
        timeout=3600,
    )


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("user", [USER, "root"])  # in this order: what root installs, the other one would find
def test_a_command_brings_what_it_needs(debian, user, what, downloads):
    done = run_in(debian, user, COMMANDS[what], downloads)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ("mean difference" if what == "rollout" else "passed") in done.stdout
    assert not list((debian / "tmp").iterdir()), "something was left in the temporary directory"
    installed = (debian / "usr" / "bin" / "python3").exists()
    assert installed == (user == "root"), "only root installs; others unpack below their cache"
