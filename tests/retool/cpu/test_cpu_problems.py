"""The problems of the CPU run are what their script makes, and no answer gets in that was not found in two ways."""

import json
import subprocess
import sys

import make_problems
import pytest
from make_problems import FILE, PROBLEMS, Problem, lines


def test_the_file_is_what_the_script_makes():
    assert FILE.read_text(encoding="utf-8") == "".join(lines())


def test_there_are_about_forty_different_problems_with_answers_as_text():
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(PROBLEMS) >= 40
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(set(row) == {"prompt", "label"} and isinstance(row["label"], str) and row["label"] for row in rows)


def test_answers_that_differ_stop_the_script(monkeypatch):
    monkeypatch.setattr(make_problems, "PROBLEMS", (Problem("What is 2 + 2?", lambda: 4, lambda: 5),))
    with pytest.raises(AssertionError, match="4 and 5 for: What is 2"):
        list(lines())


@pytest.mark.parametrize("change, code", [("", 0), ("\n", 1)])
def test_check_compares_the_file(tmp_path, change, code):
    script = tmp_path / "make_problems.py"
    script.write_text(open(make_problems.__file__, encoding="utf-8").read(), encoding="utf-8")
    (tmp_path / FILE.name).write_text(FILE.read_text(encoding="utf-8") + change, encoding="utf-8")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("run it without --check" in done.stderr) == bool(code)
