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
from commands import job_words
from launch import local_ray, ray_job
from launch_helpers import EXAMPLE, LAUNCHED, SECRET, Tree, make_tree, run_script
from retool.supervise import LaunchError
from surroundings import NAME, worst
from watching import alive, descendants, wait_for

# A cluster of the job's own, with a program in Ray's place -----------------------------------------------------------


def start(tree: Tree, tmp: Path, *flags: str, stdout=None, before=(), **changes: str) -> subprocess.Popen:
    """An RL launch in the background, its output in files, or where `stdout` says."""
    settings = {"FAKE_REPORT": str(tree.root / "report.json"), "FAKE_EXIT": "0", "TMPDIR": str(tmp)}
    with open(tree.root / "out", "w") as out, open(tree.root / "err", "w") as err:
        process = subprocess.Popen(
            [*before, "bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh"), *flags],
            env=tree.environment(**{**settings, "WANDB_KEY": SECRET, **changes}),
            cwd=tree.root,
            stdout=stdout or out,
            stderr=err,
            start_new_session=True,
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


def put_programs_in_place_of_ray(tree: Tree) -> None:
    (tree.root / "bin" / "ray.py").write_text(FAKE_RAY)
    (tree.root / "bin" / "ray").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tree.root}/bin/ray.py" "$@"\n')
    (tree.vime / "train.py").write_text(FAKE_TRAIN)


def start_fake(tree: Tree, tmp: Path, *flags: str, **changes) -> subprocess.Popen:
    put_programs_in_place_of_ray(tree)
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


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_of_the_job_ends_all_that_was_started(tree, short_tmp, code):
    process = start_fake(tree, short_tmp, FAKE_EXIT=str(code))
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


def test_it_does_not_matter_from_where_a_launch_is_started(tree, tmp_path):
    put_programs_in_place_of_ray(tree)
    shutil.rmtree(tree.converted)
    settings = tree.environment(
        FAKE_REPORT=str(tree.root / "report.json"), FAKE_EXIT="0", RAY_ADDRESS="", PYTHONPATH=""
    )
    surroundings = worst(tmp_path, cache=str(tmp_path), **{**settings, "HOME": str(tmp_path / NAME / "home")})
    command = ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh")]
    result = subprocess.run(command, **surroundings, capture_output=True, timeout=120)
    assert result.returncode == 0 and result.stdout.endswith(b"the end\n"), result.stderr
    assert not any(alive(pid) for pid in pids_of(tree))


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
    process = start_fake(tree, short_tmp, "--sleep", before=["nohup"])
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
    second = run_script(tree, "rl", TMPDIR=str(short_tmp))
    save = f"{tree.checkpoint}_retool_rl"
    assert second.returncode == 1
    assert f"error: only one launch may write to {save}: process " in second.stderr
    elsewhere = run_script(tree, "rl", SAVE=str(tree.root / "else"), FAKE_REPORT=str(tree.root / "x" / "r"))
    assert "only one launch" not in elsewhere.stderr
    assert process.poll() is None and all(alive(pid) for pid in pids)
    (tree.root / "go on").touch()
    assert process.wait(60) == 0
    third = start_fake(tree, short_tmp)  # the lock file is there, the lock is not
    assert third.wait(60) == 0


@pytest.mark.parametrize("tmp", ["short", "long"])
def test_a_cluster_that_does_not_start_is_one_clear_line(tree, short_tmp, tmp):
    (tree.root / "bin" / "ray").write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{tree.root}/words'\necho no room on the device\nexit 1\n"
    )
    long = tree.root / ("x" * 60)
    long.mkdir()
    result = run_script(tree, "rl", TMPDIR=str(short_tmp if tmp == "short" else long), HOME=str(long))
    assert result.returncode == 1
    assert "error: Ray did not start: no room on the device" in result.stderr
    words = (tree.root / "words").read_text().splitlines()
    folder = words[words.index("--temp-dir") + 1]  # sockets below it must have a path of at most 107 bytes
    assert len(f"{folder}/session_2026-12-01_00-00-00_000000_4194304/sockets/plasma_store") <= 107
    shutil.rmtree(Path(folder).parent)


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


# Real Ray ------------------------------------------------------------------------------------------------------------

JOB = """
import json, os, sys, time
from pathlib import Path
sys.stdout.buffer.write(b"\\xff not UTF-8\\n" + b"x" * 5_000_000 + b"\\n")  # what breaks a stream of log lines
sys.stdout.flush()
time.sleep(6)
print("the end", flush=True)
Path(__file__).with_name("job.json").write_text(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"]]))
sys.exit(5)
"""


@pytest.mark.ray
@pytest.mark.skipif(not shutil.which("ray", path=str(Path(sys.executable).parent)), reason="ray is not installed")
def test_launches_on_real_ray(tree, tmp_path, short_tmp):
    """One launch with a Ray of its own; a job on that cluster; another launch that is interrupted beside it."""
    process = start_real(tree, short_tmp, "--sleep", "--more", "a 'b' \"c\"", FAKE_EXIT="4")
    pids = pids_of(tree)
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
    [directory] = short_tmp.iterdir()

    # Another shell reaches it, and sees that Ray was told of as many CPUs as vime reserves.
    status = in_shell(tree, f'source "{directory}/env.sh" && ray status')
    assert status.returncode == 0 and "/8.0 GPU" in status.stdout, status.stdout + status.stderr
    cpus = max(10, local_ray.machine_cpus())
    assert f"/{cpus}.0 CPU" in status.stdout
    warned = f"warning: this machine has {local_ray.machine_cpus()} CPUs, and vime asks Ray for 10"
    assert (warned in (tree.root / "err").read_text()) is (cpus == 10)

    # A job on a cluster that runs already, with a conversion before it.
    job = make_tree(tmp_path / "job")
    shutil.rmtree(job.converted)
    (job.vime / "train.py").write_text(JOB)
    use = f'source "{directory}/env.sh"; export RAY_ADDRESS=$RAY_API_SERVER_ADDRESS; '
    done = in_shell(job, f'{use} exec bash "{EXAMPLE}/retool_qwen3_4b_rl.sh"')
    assert done.returncode == 5 and "# job retool-" in done.stdout, done.stderr[-3000:]
    argv, path = json.loads((job.vime / "job.json").read_text())
    printed = printed_command(done.stdout[done.stdout.index("# train.py as a job") :])
    assert argv == job_words(printed) and path.startswith(f"{EXAMPLE}:{job.vime}:")
    assert job_words(printed_command(done.stdout))[:2] == ["--num-layers", "36"]  # of the conversion
    assert "'--save'" in (job.converted / "release" / "argv").read_text()
    for settings, says in [
        ("NUM_NODES=2", "has 8 GPUs, and the run asks for 16: it would wait for ever"),
        (f"NUM_GPUS={cpus - 1} NUM_NODES=1", f"has {cpus} CPUs, and the run asks for {cpus + 1}"),
    ]:
        flags = "--tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1"
        done = in_shell(job, f'{use} {settings} bash "{EXAMPLE}/retool_qwen3_4b_rl.sh" {flags}')
        assert done.returncode == 1 and says in done.stderr, done.stderr

    # A launch that is interrupted ends its own cluster, and no other.
    beside = make_tree(tmp_path / "beside")
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        check_ended_by(start_real(beside, Path(folder), "--sleep"), signal.SIGINT, beside, Path(folder))
    assert process.poll() is None and all(alive(pid) for pid in pids)

    # Ray's dashboard is not needed.
    [dashboard] = [pid for pid in descendants(process.pid) if "/dashboard.py" in command_line(pid)]
    os.kill(dashboard, signal.SIGKILL)
    assert wait_for(lambda: not alive(dashboard), 30)
    assert process.poll() is None and all(alive(pid) for pid in pids)
    (tree.root / "go on").touch()
    assert process.wait(timeout=120) == 4
    assert not any(alive(pid) for pid in pids)
    assert (kept_logs(tree) / "r" / "session_latest" / "logs").is_dir()
    for name in ("out", "err"):
        assert SECRET not in (tree.root / name).read_text()


def in_shell(tree: Tree, program: str) -> subprocess.CompletedProcess:
    (tree.root / "bin" / "ray").unlink(missing_ok=True)
    return subprocess.run(
        ["bash", "-c", program], env=tree.environment(), cwd=tree.root, capture_output=True, text=True, timeout=300
    )


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
