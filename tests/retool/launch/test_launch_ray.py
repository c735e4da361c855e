"""The cluster that a launch starts, uses and ends: with a program in Ray's place, and with real Ray."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launch_helpers import EXAMPLE, LAUNCHED, SECRET, Tree, alive, job_words, run, wait_for

# A cluster of the job's own, with a program in Ray's place -----------------------------------------------------------


def start(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    """An RL launch in the background, its output in files."""
    settings = {"FAKE_REPORT": str(tree.root / "report.json"), "FAKE_EXIT": "0", "TMPDIR": str(tmp)}
    with open(tree.root / "out", "w") as out, open(tree.root / "err", "w") as err:
        process = subprocess.Popen(
            ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh"), *flags],
            env=tree.environment(**{**settings, "WANDB_KEY": SECRET, **changes}),
            cwd=tree.root,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    LAUNCHED.append(process)
    return process


def start_real(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    (tree.root / "bin" / "ray").unlink()
    return start(tree, tmp, *flags, **changes)


def check_ended_by(process: subprocess.Popen, number: int, tree: Tree, tmp: Path) -> None:
    """The signal, sent twice by an impatient user, ends everything and leaves nothing."""
    assert wait_for((tree.root / "report.json").exists), (tree.root / "err").read_text()[-3000:]
    pids = json.loads((tree.root / "report.json").read_text())["pids"]
    assert all(alive(pid) for pid in pids)
    process.send_signal(number)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    assert not any(alive(pid) for pid in pids)
    assert list(tmp.iterdir()) == []


def printed_command(output: str) -> str:
    """The launch command at the head of the output, without what the job printed after it."""
    lines = [line for line in output.splitlines() if not line.startswith("#")]
    end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
    return "\n".join(lines[: end + 1])


FAKE_RAY = """
import json, os, signal, subprocess, sys, time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

report = Path(os.environ["FAKE_REPORT"])
if sys.argv[1] == "start":
    # What outlives Ray's own shutdown: in another session, its parent ended, deaf to SIGTERM if asked to be.
    deaf = "trap '' TERM; " if os.environ.get("FAKE_DEAF") else ""
    with open(report.parent / "pids", "w") as pids:
        subprocess.run(["setsid", "sh", "-c", f"({deaf}sleep 600; sleep 600) & echo $!"], stdout=pids)
    Path(option("--temp-dir"), "session_x").mkdir()
    HTTPServer(("127.0.0.1", int(option("--dashboard-port"))), SimpleHTTPRequestHandler).serve_forever()
pids = [int(pid) for pid in (report.parent / "pids").read_text().split()] + [os.getpid(), os.getppid()]
(report.parent / "partial").write_text(json.dumps({"pids": pids, "key": os.environ.get("WANDB_API_KEY")}))
(report.parent / "partial").rename(report)
if "--sleep" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ["FAKE_EXIT"]))
"""


def start_fake(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    (tree.root / "bin" / "ray.py").write_text(FAKE_RAY)
    (tree.root / "bin" / "ray").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tree.root}/bin/ray.py" "$@"\n')
    return start(tree, tmp, *flags, **changes)


@pytest.mark.parametrize("number, deaf", [(signal.SIGINT, ""), (signal.SIGTERM, "1"), (signal.SIGHUP, "")])
def test_a_signal_ends_all_that_was_started(tree, short_tmp, number, deaf):
    process = start_fake(tree, short_tmp, "--sleep", FAKE_DEAF=deaf)
    check_ended_by(process, number, tree, short_tmp)


@pytest.mark.parametrize("code, deaf", [(0, ""), (3, "1")])
def test_the_end_of_the_job_ends_all_that_was_started(tree, short_tmp, code, deaf):
    process = start_fake(tree, short_tmp, FAKE_EXIT=str(code), FAKE_DEAF=deaf)
    assert process.wait(timeout=120) == code
    report = json.loads((tree.root / "report.json").read_text())
    assert not any(alive(pid) for pid in report["pids"])
    assert report["key"] is None  # the client of the cluster needs none
    if code == 0:
        assert list(short_tmp.iterdir()) == []
    else:
        err = (tree.root / "err").read_text()
        kept = Path(err.rpartition("Ray's logs and temporary files: ")[2].splitlines()[0])
        assert kept.parent == short_tmp and (kept / "session_x").is_dir()


# Real Ray ------------------------------------------------------------------------------------------------------------

needs_ray = pytest.mark.skipif(
    not shutil.which("ray", path=str(Path(sys.executable).parent)), reason="ray is not installed"
)


@pytest.fixture
def other_cluster():
    """A Ray cluster of somebody else on the same machine, and its processes."""
    folder = tempfile.mkdtemp(prefix="other-", dir="/tmp")
    # Ray keeps a token in the home directory; with one there, a cluster asks everyone for it.
    home = Path(folder, "home")
    home.mkdir()
    program = (
        "import json, os, sys, ray, psutil, time\n"
        f"ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, _temp_dir={folder!r})\n"
        "@ray.remote\nclass A:\n    def ping(self): return os.getpid()\n"
        "a = A.remote()\nray.get(a.ping.remote())\n"
        "print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)\n"
        "sys.stdin.readline()\nray.get(a.ping.remote())\nprint('still works', flush=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(home)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    pids = json.loads(process.stdout.readline())
    yield process, pids
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@needs_ray
def test_a_job_runs_on_a_cluster_of_its_own_and_nothing_else_is_touched(tree, short_tmp, other_cluster):
    other, other_pids = other_cluster
    process = start_real(tree, short_tmp, "--more", "a 'b' \"c\"", FAKE_EXIT="0")
    assert process.wait(timeout=300) == 0, (tree.root / "err").read_text()[-3000:]
    report = json.loads((tree.root / "report.json").read_text())

    assert report["argv"] == job_words(printed_command((tree.root / "out").read_text()))
    assert report["argv"][-2:] == ["--more", "a 'b' \"c\""]
    environment = report["environment"]
    assert environment["PYTHONPATH"].startswith(f"{EXAMPLE}:{tree.vime}:{tree.root / 'Megatron LM'}")
    assert report["marker"] == str(tree.vime / "generate_marker.py")
    assert report["gcs"].startswith("127.0.0.1:")
    version, status = report["stranger"]
    if tuple(map(int, version.split(".")[:2])) >= (2, 52):  # the first with tokens
        assert status == 401
    assert environment["WANDB_API_KEY"] == SECRET and "WANDB_KEY" not in environment
    assert not any(SECRET in line for line in report["command_lines"])
    for name in ("out", "err"):
        assert SECRET not in (tree.root / name).read_text()

    assert not any(alive(pid) for pid in report["pids"])
    assert list(short_tmp.iterdir()) == []
    assert all(alive(pid) for pid in other_pids)
    assert other.communicate("\n", timeout=60)[0].strip() == "still works"


@pytest.mark.ray
@needs_ray
def test_a_signal_ends_a_job_on_real_ray(tree, short_tmp):
    process = start_real(tree, short_tmp, "--sleep")
    check_ended_by(process, signal.SIGINT, tree, short_tmp)


@pytest.mark.ray
@needs_ray
def test_a_cluster_that_runs_already_is_used_and_stays(tree, short_tmp):
    (tree.root / "bin" / "ray").unlink()
    after = tree.root / "after"
    result = subprocess.run(
        [
            *[sys.executable, str(EXAMPLE / "launch" / "local_ray.py"), "--num-gpus", "8", "--", "bash", "-c"],
            # The second job shows that the first launch left the cluster as it was.
            'bash "$0" && ray job submit -- touch "$1"',
            str(EXAMPLE / "retool_qwen3_4b_rl.sh"),
            str(after),
        ],
        env=tree.environment(FAKE_REPORT=str(tree.root / "report.json"), TMPDIR=str(short_tmp), FAKE_EXIT="0"),
        cwd=tree.root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--address http://127.0.0.1:" in result.stdout
    report = json.loads((tree.root / "report.json").read_text())
    assert report["argv"] == job_words(printed_command(result.stdout))
    assert after.exists() and list(short_tmp.iterdir()) == []


def test_a_cluster_that_does_not_start_is_one_clear_line(tree, short_tmp):
    (tree.root / "bin" / "ray").write_text("#!/bin/sh\necho no room on the device\nexit 1\n")
    result = run(tree, "rl", TMPDIR=str(short_tmp))
    assert result.returncode == 1
    assert "error: Ray ended while starting: no room on the device" in result.stderr
