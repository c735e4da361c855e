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
from types import SimpleNamespace

import pytest
from launch_helpers import EXAMPLE, LAUNCHED, SECRET, Tree, alive, job_words, run, wait_for

sys.path.insert(0, str(EXAMPLE / "launch"))

import ray_job
from launch.supervise import LaunchError

# A cluster of the job's own, with a program in Ray's place -----------------------------------------------------------


def start(tree: Tree, tmp: Path, *flags: str, stdout=None, preexec_fn=None, **changes: str) -> subprocess.Popen:
    """An RL launch in the background, its output in files, or where `stdout` says."""
    settings = {"FAKE_REPORT": str(tree.root / "report.json"), "FAKE_EXIT": "0", "TMPDIR": str(tmp)}
    with open(tree.root / "out", "w") as out, open(tree.root / "err", "w") as err:
        process = subprocess.Popen(
            ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh"), *flags],
            env=tree.environment(**{**settings, "WANDB_KEY": SECRET, **changes}),
            cwd=tree.root,
            stdout=stdout or out,
            stderr=err,
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
    LAUNCHED.append(process)
    return process


def start_real(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    (tree.root / "bin" / "ray").unlink()
    return start(tree, tmp, *flags, **changes)


def check_ended_by(process: subprocess.Popen, number: int, tree: Tree, tmp: Path) -> None:
    """The signal, sent twice by an impatient user, ends everything and leaves the logs."""
    assert wait_for((tree.root / "report.json").exists), (tree.root / "err").read_text()[-3000:]
    pids = json.loads((tree.root / "report.json").read_text())["pids"]
    assert all(alive(pid) for pid in pids)
    process.send_signal(number)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    assert not any(alive(pid) for pid in pids)
    assert list(tmp.iterdir()) == [kept_logs(tree)]


def printed_command(output: str) -> str:
    """The launch command at the head of the output, without what the job printed after it."""
    lines = [line for line in output.splitlines() if not line.startswith("#")]
    end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
    return "\n".join(lines[: end + 1])


FAKE_RAY = """
import os, subprocess, sys
from pathlib import Path

# What outlives Ray's own shutdown: in another session, its parent ended, deaf to SIGTERM if asked to be.
deaf = "trap '' TERM; " if os.environ.get("FAKE_DEAF") else ""
with open(Path(os.environ["FAKE_REPORT"]).parent / "pids", "w") as pids:
    subprocess.run(["setsid", "sh", "-c", f"({deaf}sleep 600; sleep 600) & echo $!"], stdout=pids)
folder = Path(sys.argv[sys.argv.index("--temp-dir") + 1])
folder.mkdir()
folder.chmod(0o777)  # as Ray does
(folder / "session_x").mkdir()
"""
FAKE_TRAIN = """
import json, os, sys, time
from pathlib import Path

report = Path(os.environ["FAKE_REPORT"])
pids = [int(pid) for pid in (report.parent / "pids").read_text().split()] + [os.getpid(), os.getppid()]
names = ["WANDB_API_KEY", "PYTHONPATH", "RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"]
(report.parent / "partial").write_text(json.dumps({"pids": pids, **{name: os.environ.get(name) for name in names}}))
(report.parent / "partial").rename(report)
sys.stdout.buffer.write(b"\\xff not UTF-8\\n" + b"x" * 5_000_000 + b"\\n")
sys.stdout.flush()
while "--sleep" in sys.argv and not (report.parent / "go on").exists():
    time.sleep(0.1)
print("the end", flush=True)
sys.exit(int(os.environ["FAKE_EXIT"]))
"""


def start_fake(tree: Tree, tmp: Path, *flags: str, **changes) -> subprocess.Popen:
    (tree.root / "bin" / "ray.py").write_text(FAKE_RAY)
    (tree.root / "bin" / "ray").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tree.root}/bin/ray.py" "$@"\n')
    (tree.vime / "train.py").write_text(FAKE_TRAIN)
    return start(tree, tmp, *flags, **changes)


def pids_of(tree: Tree) -> list[int]:
    assert wait_for((tree.root / "report.json").exists), (tree.root / "err").read_text()[-3000:]
    return json.loads((tree.root / "report.json").read_text())["pids"]


def kept_logs(tree: Tree) -> Path:
    return Path((tree.root / "err").read_text().rpartition("logs and temporary files: ")[2].splitlines()[0])


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
    assert report["WANDB_API_KEY"] == SECRET
    assert report["PYTHONPATH"].startswith(f"{EXAMPLE}:{tree.vime}:")
    if code == 0:
        assert list(short_tmp.iterdir()) == []
    else:
        kept = kept_logs(tree)
        assert kept.parent == short_tmp and (kept / "r" / "session_x").is_dir()
        assert (kept / "job.log").read_bytes().endswith(b"the end\n")


def test_output_of_any_kind_is_shown_to_its_end(tree, short_tmp):
    process = start_fake(tree, short_tmp)
    assert process.wait(timeout=120) == 0
    shown = (tree.root / "out").read_bytes()
    assert b"\xff not UTF-8\n" + b"x" * 5_000_000 + b"\nthe end\n" in shown


def test_a_closed_pipe_does_not_end_the_job(tree, short_tmp):
    read, write = os.pipe()
    process = start_fake(tree, short_tmp, "--sleep", stdout=write, FAKE_EXIT="7")
    os.close(write)
    pids_of(tree)
    os.close(read)
    time.sleep(1)
    assert process.poll() is None
    (tree.root / "go on").touch()
    assert process.wait(timeout=60) == 7
    assert (kept_logs(tree) / "job.log").read_bytes().endswith(b"the end\n")


def test_nohup_keeps_the_job_when_the_terminal_closes(tree, short_tmp):
    process = start_fake(
        tree, short_tmp, "--sleep", FAKE_EXIT="0", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    pids = pids_of(tree)
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None and all(alive(pid) for pid in pids)
    (tree.root / "go on").touch()
    assert process.wait(timeout=60) == 0
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("which", ["front", "worker"])
def test_a_launch_that_is_killed_outright_leaves_no_process(tree, short_tmp, which):
    process = start_fake(tree, short_tmp, "--sleep")
    pids = pids_of(tree)
    os.kill(process.pid if which == "front" else pids[-1], signal.SIGKILL)
    assert process.wait(timeout=60) == (-signal.SIGKILL if which == "front" else 128 + signal.SIGKILL)
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)


def test_other_users_cannot_enter_rays_folder(tree, short_tmp):
    process = start_fake(tree, short_tmp, "--sleep")
    pids_of(tree)
    [directory] = short_tmp.iterdir()
    assert (directory / "r").stat().st_mode & 0o777 == 0o777
    assert directory.stat().st_mode & 0o777 == 0o700
    process.terminate()
    process.wait(60)


def test_two_runs_do_not_save_to_one_folder(tree, short_tmp):
    process = start_fake(tree, short_tmp, "--sleep")
    pids = pids_of(tree)
    second = run(tree, "rl", TMPDIR=str(short_tmp))
    save = f"{tree.checkpoint}_retool_rl"
    assert second.returncode == 1
    assert f"error: only one launch may write to {save}: process " in second.stderr
    elsewhere = run(tree, "rl", SAVE=str(tree.root / "else"), FAKE_REPORT=str(tree.root / "x" / "r"))
    assert "only one launch" not in elsewhere.stderr
    assert process.poll() is None and all(alive(pid) for pid in pids)
    (tree.root / "go on").touch()
    assert process.wait(60) == 0
    third = start_fake(tree, short_tmp)  # the lock file is there, the lock is not
    assert third.wait(60) == 0


# A running cluster, with a client in its place -----------------------------------------------------------------------


class FakeClient:
    """A job server whose log streams and answers are given: an exception is raised, None means that the job runs."""

    def __init__(self, streams: list, answers: list):
        self.streams, self.answers = streams, answers

    async def tail_job_logs(self, job_id):
        for text in self.streams.pop(0):
            if isinstance(text, Exception):
                raise text
            yield text

    def get_job_info(self, job_id):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, code = answer or ("RUNNING", None)
        status = SimpleNamespace(value=status, is_terminal=lambda: answer is not None)
        return SimpleNamespace(status=status, driver_exit_code=code, message="why")


BROKEN = RuntimeError("WebSocket connection closed unexpectedly with close code 1006")


@pytest.mark.parametrize(
    "streams, answers, code, shown",
    [
        ([["a\n", "b\n"]], [("SUCCEEDED", 0)], 0, "a\nb\n"),
        ([["a\n", "b\n"]], [("FAILED", 3)], 3, "a\nb\n"),
        ([["a\n"]], [("FAILED", None)], 1, "a\n"),
        ([["a\n"]], [("STOPPED", None)], 1, "a\n"),
        # A stream that breaks is followed again from where it broke off, in whatever pieces it comes.
        ([["a\nb", BROKEN], ["a", "\nb\nc\n"]], [None, ("SUCCEEDED", 0)], 0, "a\nb\nc\n"),
        ([["a\n"], ["a\n", BROKEN], ["a\nb\n"]], [None, None, ("FAILED", 2)], 2, "a\nb\n"),
        ([[BROKEN], [BROKEN], [BROKEN]], [OSError("refused"), OSError("refused"), ("SUCCEEDED", 0)], 0, ""),
    ],
)
def test_a_job_is_followed_to_its_own_end(streams, answers, code, shown, capfdbinary, monkeypatch):
    monkeypatch.setattr(ray_job, "POLL_SECONDS", 0.01)
    assert ray_job.follow(FakeClient(list(streams), list(answers)), "job") == code
    out, err = capfdbinary.readouterr()
    assert out.decode() == shown
    assert err.count(b"has not ended") <= 2


def test_a_cluster_that_never_answers_again_is_given_up(monkeypatch):
    monkeypatch.setattr(ray_job, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_job, "MAX_SILENCE_SECONDS", 0.1)
    client = FakeClient([[BROKEN]] * 1000, [OSError("connection refused")] * 1000)
    with pytest.raises(LaunchError, match="connection refused; job job may still be running"):
        ray_job.follow(client, "job")


def test_no_cluster_at_the_address_is_one_clear_line(tree):
    result = run(tree, "rl", RAY_ADDRESS="http://127.0.0.1:1")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: no Ray cluster answers at RAY_ADDRESS http://127.0.0.1:1: " in result.stderr


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
        f"ray.init(address='local', num_cpus=1, num_gpus=0, include_dashboard=False, _temp_dir={folder!r})\n"
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
def test_a_job_outlives_rays_dashboard_and_another_shell_reaches_it(tree, short_tmp):
    process = start_real(tree, short_tmp, "--sleep", FAKE_EXIT="4")
    pids = pids_of(tree)
    [directory] = short_tmp.iterdir()
    shell = f'source "{directory}/env.sh" && ray status'
    path = tree.environment()["PATH"]
    status = subprocess.run(["bash", "-c", shell], env={"PATH": path}, capture_output=True, text=True, timeout=60)
    assert status.returncode == 0 and "/8.0 GPU" in status.stdout, status.stdout + status.stderr

    dashboards = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and f"--temp-dir={directory}/r" in command_line(entry)
        and "dashboard.py" in command_line(entry)
    ]
    assert len(dashboards) == 1
    os.kill(dashboards[0], signal.SIGKILL)
    time.sleep(5)
    assert process.poll() is None and all(alive(pid) for pid in pids)
    (tree.root / "go on").touch()
    assert process.wait(timeout=120) == 4
    assert (kept_logs(tree) / "r" / "session_latest" / "logs").is_dir()


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.ray
@needs_ray
def test_why_ray_did_not_start_is_said(tree, short_tmp):
    (tree.root / "bin" / "ray").unlink()
    command = [sys.executable, str(EXAMPLE / "launch" / "local_ray.py"), "--num-gpus", "8"]
    command += ["--lock", str(tree.root / "lock"), "--", "true"]
    environment = tree.environment(CUDA_VISIBLE_DEVICES="0,1", TMPDIR=str(short_tmp))
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert (
        "error: Ray did not start: " in result.stderr and "CUDA_VISIBLE_DEVICES contains ['0', '1']" in result.stderr
    )


@needs_ray
def test_a_cluster_that_runs_already_is_used_and_stays(tree, short_tmp):
    (tree.root / "bin" / "ray").unlink()
    after = tree.root / "after"
    result = subprocess.run(
        [
            *[sys.executable, str(EXAMPLE / "launch" / "local_ray.py"), "--num-gpus", "8"],
            *["--lock", str(tree.root / "lock"), "--", "bash", "-c"],
            # The second job shows that the first launch left the cluster as it was.
            'RAY_ADDRESS=$RAY_API_SERVER_ADDRESS bash "$0"; echo "exit code $?"; ray job submit -- touch "$1"',
            str(EXAMPLE / "retool_qwen3_4b_rl.sh"),
            str(after),
        ],
        env=tree.environment(
            FAKE_REPORT=str(tree.root / "report.json"), TMPDIR=str(short_tmp), FAKE_EXIT="5", FAKE_OUTPUT="1"
        ),
        cwd=tree.root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--address http://127.0.0.1:" in result.stdout
    assert "exit code 5\n" in result.stdout, result.stderr[-3000:]
    report = json.loads((tree.root / "report.json").read_text())
    assert report["argv"] == job_words(printed_command(result.stdout))
    assert after.exists() and list(short_tmp.iterdir()) == []


def test_a_cluster_that_does_not_start_is_one_clear_line(tree, short_tmp):
    (tree.root / "bin" / "ray").write_text("#!/bin/sh\necho no room on the device\nexit 1\n")
    result = run(tree, "rl", TMPDIR=str(short_tmp))
    assert result.returncode == 1
    assert "error: Ray did not start: no room on the device" in result.stderr
