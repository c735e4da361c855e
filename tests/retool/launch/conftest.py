"""The fake vime tree and a short temporary directory, for all tests of the launch."""

import tempfile
from pathlib import Path

import pytest
from launch_helpers import LAUNCHED, make_tree


@pytest.fixture
def tree(tmp_path):
    yield make_tree(tmp_path / "a  b")
    for process in LAUNCHED:  # a test that failed must not leave its launch running
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    LAUNCHED.clear()


@pytest.fixture
def short_tmp():
    """A temporary directory whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)
