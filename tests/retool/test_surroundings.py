"""The test command: what it makes of its lanes, and a small part of it from the worst of all surroundings at once."""

import os
import shutil
import signal
import subprocess

import pytest
from project import ROOT, TESTS, our_files
from surroundings import NAME, worst
from watching import wait_for

# In Python's place: a pytest that ends as RETOOL_ENDS says of its lane, "waits" for a signal.
FAKE_PYTHON = """#!/bin/bash
[[ $* == *"-m pytest"* ]] || exit 0
given=$* lane=${given#*cache_dir=.pytest_cache/} lane=${lane%% *}
echo "$(($(wc -c <<<"$lane") * 9)).00s call     $lane"
trap 'echo "$lane interrupted"; exit 2' INT
[[ $RETOOL_ENDS =~ $lane=([a-z0-9]+) ]]
if [[ ${BASH_REMATCH[1]} == waits ]]; then
    echo "$lane waits"
    sleep 60 &
    wait
fi
echo "$lane has ended"
exit "${BASH_REMATCH[1]}"
"""


@pytest.fixture
def start(tmp_path):
    """Starts the command of a clone in which everything around it is a stand-in."""
    files = {
        "examples/retool/cpu/system.sh": 'need_python() { :; }\nneed_libraries() { :; }\ndie() { echo "$*"; exit 1; }\n',
        "examples/retool/cpu/venv.sh": 'echo "$RETOOL_CACHE/venv"\n',
        "cache/venv/bin/python": FAKE_PYTHON,
        "cache/venv/bin/shellcheck": "#!/bin/sh\n",
        "tests/retool/run.sh": (TESTS / "run.sh").read_text(),
        "pyproject.toml": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    settings = {"RETOOL_CACHE": str(tmp_path / "cache"), "RETOOL_QWEN3_TOKENIZER": "x"}

    def started(vime: str = "", **ends: object) -> subprocess.Popen:
        said = " ".join(f"{lane}={ends.get(lane, 0)}" for lane in (*LANES, "standin"))
        environment = {**os.environ, **settings, "VIME_ROOT": vime, "RETOOL_ENDS": said}
        command = ["bash", tmp_path / "tests/retool/run.sh"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return started


LANES = ("computing", "waiting", "engines", "timing")


@pytest.mark.parametrize(
    "ends, code",
    [
        ((0, 0, 0, 0), 0),
        ((0, 1, 0, 0), 1),
        ((2, 0, 0, 0), 2),
        ((0, 0, 3, 0), 3),
        ((0, 0, 0, 1), 1),
        ((5, 0, 5, 5), 0),
        ((1, 5, 5, 5), 1),
        ((5, 5, 5, 5), 5),
        ((5, 139, 0, 0), 139),
    ],
)
def test_the_command_ends_as_the_worst_of_its_lanes(start, ends, code):
    process = start(**dict(zip(LANES, ends, strict=True)))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    slowest, _, ended = said.partition("the ten slowest")[2].strip().partition("\n\n")
    longest = sorted((len(f"{lane}.") for lane in LANES), reverse=True)
    assert [line.split()[0] for line in slowest.split("\n")] == [f"{9 * length}.00s" for length in longest], said
    assert ended.splitlines()[:4] == [f"{lane:10} {lane} has ended" for lane in LANES], said
    assert ended.splitlines()[4].startswith("all of it took 0 min"), said


@pytest.mark.parametrize("standin, code", [(0, 0), (1, 1)])
def test_beside_a_checkout_of_vime_the_loop_goes_through_the_stand_in_too(start, standin, code):
    process = start(vime="/a/checkout", standin=standin)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code and said.count("\nstandin    standin has ended\n") == 1, said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_lane_once(start, tmp_path, signum):
    process = start(computing="waits", waiting="waits", engines="waits")
    wait_for(lambda: sum("waits" in log.read_text() for log in (tmp_path / "cache").glob("tests.*/*.log")) == 3, 30)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, said
    assert all(said.count(f"{lane} interrupted") == 1 for lane in ("waiting", "engines"))
    assert "computing interrupted" in said  # twice: its output is shown while it runs
    assert not list((tmp_path / "cache").glob("tests.*")), "its temporary files were left"


# From anywhere -------------------------------------------------------------------------------------------------------

# Somebody whom no list of users knows, and who may no more than others, as in a container that is given a number.
NUMBERED = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]

# What signals, Ray's sockets, the locale and closed folders have broken.
PART = [
    "cpu/test_cpu_run.py::test_a_signal_keeps_what_was_finished[1]",
    "launch/test_launch_ray.py::test_a_signal_ends_all_that_was_started[2-]",
    "sandbox/test_sandbox_ray.py::test_calls_work_in_a_task",
    "sandbox/test_sandbox_cases.py::test_golden_execution",
]


@pytest.mark.ray
@pytest.mark.skipif("RETOOL_CACHE" not in os.environ, reason="bash tests/retool/run.sh makes the environment for it")
def test_the_test_command_gives_the_same_result_from_anywhere(tmp_path):
    clone = tmp_path / NAME / "retool for vime"
    for path in our_files():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", clone / ".mypy_cache")
    command = [] if subprocess.run([*NUMBERED, "true"]).returncode else NUMBERED  # some machines let nobody do that
    command = [*command, "bash", "tests/retool/run.sh", "-q", *(f"tests/retool/{name}" for name in PART)]
    surroundings = worst(tmp_path, os.environ["RETOOL_CACHE"])
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=600, **surroundings)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
