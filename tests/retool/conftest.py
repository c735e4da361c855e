"""What every test file needs: the plugin and vime on the path, and the real Qwen3 tokenizer where the test command put
it.

vime is the checkout that VIME_ROOT names, else the one that these files lie in, else the stand-in beside this file.

Tests that take minutes carry a marker of SLOW. They are skipped with the reason, unless RETOOL_ALL_TESTS=1 (which
run.sh sets) or any `-m` expression asks for them.
"""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
EXAMPLE = ROOT / "examples" / "retool"
VIME = Path(os.environ.get("VIME_ROOT") or (ROOT if (ROOT / "vime").is_dir() else TESTS / "standin"))

IN_VIME = (ROOT / "vime").is_dir()
for folder in (VIME, TESTS, EXAMPLE):
    sys.path.insert(0, str(folder))

# Every user of the machine may connect to a cluster's ports. Read when Ray is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

# Started by nohup, or in the background of a script, a process ignores these signals, and so does all that it starts.
# What is handled, if only by doing nothing, starts at its default in a program that is started.
for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(signum) == signal.SIG_IGN:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else lambda *_: None)

try:
    from hypothesis import settings
except ImportError:  # the files that need it say so themselves
    pass
else:
    settings.register_profile("retool", deadline=None)  # how long an example takes is up to what else runs
    settings.load_profile("retool")

SLOW = {
    "engine": "starts vLLM on the CPU",
    "ray": "starts a Ray cluster",
    "soak": "makes thousands of sandbox calls",
    "train": "trains a tiny model by vime and Megatron-LM on the CPU",
}


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers here, since vime's own pyproject.toml is the one that counts in a checkout."""
    for name, what in SLOW.items():
        config.addinivalue_line("markers", f"{name}: {what}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a vime checkout `pytest tests/` is for vime's own tests: ours run where this folder or a part of it is
    named."""
    named = (Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args)
    return True if IN_VIME and not any(path.is_relative_to(TESTS) for path in named) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is slow among the tests of this folder unless it was asked for."""
    if os.environ.get("RETOOL_ALL_TESTS") == "1" or config.option.markexpr:
        return
    for item in items:
        for name, what in SLOW.items():
            if item.path.is_relative_to(TESTS) and item.get_closest_marker(name):
                reason = f"{what}: set RETOOL_ALL_TESTS=1, pass -m {name}, or run tests/retool/run.sh"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    """Qwen3's own tokenizer and chat template."""
    folder = os.environ.get("RETOOL_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip(
            "RETOOL_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer.json (tests/retool/run.sh fetches one)"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# Leads a Ray cluster until its stdin ends. Its drivers are other processes, each with an environment of its own.
CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """The address of a Ray cluster, one for all tests, that no other Ray of this machine has to do with."""
    pytest.importorskip("ray")
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("w") as stderr:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        leader = subprocess.Popen([sys.executable, "-c", CLUSTER], text=True, **pipes)
    address = leader.stdout.readline().strip()
    assert address, log.read_text()
    yield address
    leader.communicate(timeout=60)
