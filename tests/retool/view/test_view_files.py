"""Rollout files: read without torch and without running what is in them, and bad ones answered in one line."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import view_rollouts
from view.load import FileError, load
from view_helpers import byte_tokenizer, raw, save

EXAMPLE = Path(view_rollouts.__file__).parent


@pytest.mark.parametrize("name", ["rollout_3.pt", "samples.jsonl"])
def test_samples_come_as_they_were_saved(tmp_path, name):
    samples = [raw(index=n) for n in range(3)]
    found = load(save(tmp_path / name, samples, rollout_id=3))
    assert found.samples == samples and found.notes == []
    assert found.number == (3 if name.endswith(".pt") else None) and not found.evaluation


def test_vimes_evaluation_files_are_known_by_their_name(tmp_path):
    assert load(save(tmp_path / "rollout_eval_3.pt", [raw()])).evaluation
    assert load(save(tmp_path / "eval_3.pt", [raw()])).evaluation
    assert not load(save(tmp_path / "medieval_3.pt", [raw()])).evaluation


def test_tensors_arrays_and_objects_are_passed_over(tmp_path):
    import collections
    import datetime

    import numpy

    extra = dict(
        rollout_routed_experts=torch.zeros(4, 2, dtype=torch.int32),
        rollout_top_p_token_ids=torch.arange(5),
        array=numpy.arange(3),
        date=datetime.date(2026, 7, 1),
        ordered=collections.OrderedDict(a=1),
        some={1, 2},
        raw_bytes=b"\x00\xff",
    )
    [sample] = load(save(tmp_path / "a.pt", [raw(**extra)])).samples
    assert {name: sample[name] for name in raw()} == raw()
    assert sample["ordered"] == {"a": 1}


class _Attack:
    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("cut", [0, 40])
def test_nothing_in_a_file_is_run(tmp_path, cut):
    marker = tmp_path / "ran"
    path = save(tmp_path / "evil.pt", [raw(evil=_Attack(str(marker)))])
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])
    assert len(load(path).samples) == 1
    assert not marker.exists()


def test_torch_is_not_needed(tmp_path):
    path = save(tmp_path / "a.pt", [raw()])
    code = (
        f"import sys; sys.modules['torch'] = None; import view_rollouts; sys.exit(view_rollouts.main([{str(path)!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "a.html").is_file()


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_truncated_file_shows_its_whole_samples(tmp_path, kept):
    samples = [raw(index=n) for n in range(40)]
    path = save(tmp_path / "a.pt", samples)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    found = load(path)
    assert found.samples == samples[: len(found.samples)] and 40 * kept - 8 < len(found.samples) <= 40
    [note] = found.notes
    assert "cut off" in note and "\n" not in note


def test_more_samples_than_a_pickle_takes_at_a_time(tmp_path):
    """Lists are built a thousand entries at a time."""
    samples = [raw([("x", 1)], index=n) for n in range(1700)]
    path = save(tmp_path / "a.pt", samples)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.9)])
    assert [sample["index"] for sample in load(path).samples] == list(range(len(load(path).samples)))
    assert 1400 < len(load(path).samples) < 1700


def test_a_truncated_line_is_left_out(tmp_path):
    path = save(tmp_path / "a.jsonl", [raw(), raw(index=1)])
    path.write_bytes(path.read_bytes()[:-20])
    found = load(path)
    assert len(found.samples) == 1 and found.notes == ["a.jsonl: line 2 is not JSON or cut off, and left out"]


def _legacy(path):
    torch.save({"samples": []}, path, _use_new_zipfile_serialization=False)


BAD = {
    "empty.pt": lambda path: path.write_bytes(b""),
    "picture.pt": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "text.jsonl": lambda path: path.write_text("not a rollout\n"),
    "number.jsonl": lambda path: path.write_text("1\n2\n"),
    "data.jsonl": lambda path: path.write_text(json.dumps({"prompt": "x", "label": "1"}) + "\n"),
    "deep.jsonl": lambda path: path.write_text("[" * 200_000),
    "pickle.pt": lambda path: path.write_bytes(pickle.dumps({"samples": [raw()]})),
    "legacy.pt": _legacy,
    "weights.pt": lambda path: torch.save({"weight": torch.zeros(2)}, path),
    "tensor.pt": lambda path: torch.save(torch.zeros(2), path),
    "none.pt": lambda path: save(path, []),
    "beginning.pt": lambda path: (save(path, [raw()]), path.write_bytes(path.read_bytes()[:300])),
    "four.pt": lambda path: path.write_bytes(b"PK\x03\x04"),
    "archive.zip": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"),
    "damaged.pt": lambda path: (save(path, [raw()]), _damage(path)),
    "missing.pt": lambda path: None,
    "folder.pt": lambda path: path.mkdir(),
}


def _damage(path):
    data = bytearray(path.read_bytes())
    data[70:400] = b"\xff" * 330
    path.write_bytes(data)


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_rollout_is_said_in_one_line(tmp_path, name, capsys):
    path = tmp_path / name
    BAD[name](path)
    with pytest.raises(FileError) as error:
        load(path)
    assert name in str(error.value) and "\n" not in str(error.value)
    assert view_rollouts.main([str(path), "-o", str(tmp_path / "page.html")]) == 1
    assert capsys.readouterr().err == f"error: {error.value}\n"
    assert not (tmp_path / "page.html").exists()


def test_the_good_files_are_shown_beside_a_bad_one(tmp_path, capsys):
    good, bad = save(tmp_path / "good.pt", [raw()]), tmp_path / "bad.pt"
    bad.write_bytes(b"")
    page = tmp_path / "page.html"
    assert view_rollouts.main([str(bad), str(good), "-o", str(page)]) == 0
    assert capsys.readouterr().err == f"note: {bad} is empty\n"
    assert f"{bad} is empty" in page.read_text()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{good}", "-o", "{tmp}/no/page.html"], "cannot write"),
        (["{good}", "--tokenizer", "{tmp}/no"], "cannot read the tokenizer"),
    ],
)
def test_other_faults_of_the_user(tmp_path, capsys, arguments, words):
    good = save(tmp_path / "good.pt", [raw()])
    assert view_rollouts.main([a.format(good=good, tmp=tmp_path) for a in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_the_page_never_replaces_what_it_shows(tmp_path):
    good = save(tmp_path / "good.pt", [raw()])
    before = good.read_bytes()
    with pytest.raises(SystemExit):
        view_rollouts.main([str(good), "-o", str(good)])
    assert good.read_bytes() == before


def test_a_tokenizer_is_read(tmp_path):
    good = save(tmp_path / "good.pt", [raw()])
    assert view_rollouts.main([str(good), "--tokenizer", str(byte_tokenizer(tmp_path / "model"))]) == 0


@pytest.mark.skipif("VIME_ROOT" not in os.environ, reason="VIME_ROOT names no vime checkout")
def test_vimes_own_timeline_draws_the_plugins_spans_of_the_same_file(tmp_path, monkeypatch):
    from scripted import Rollout, Turn, call

    rollout = Rollout(monkeypatch)
    try:
        sample = rollout.run([Turn(call("print(1)")), Turn("Answer: \\boxed{1}<|im_end|>")])
    finally:
        rollout.close()
    file = save(tmp_path / "rollout_0.pt", [sample.to_dict()])
    viewer = Path(os.environ["VIME_ROOT"], "tools", "trace_timeline_viewer.py")
    subprocess.run([sys.executable, viewer, file, "--no-serve"], check=True, capture_output=True)
    drawn = "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert set(re.findall(r'"name": ?"(retool_\w+)"', drawn)) == {"retool_turn", "retool_tool_call"}
    assert load(file).samples[0]["response"] == sample.response
