"""data_io: which files of a directory are read, the formats, and an output that takes nothing else's place."""

import gzip
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import run_script
from retool import data_io
from retool.conversations import openai_messages, text_content
from retool.data_io import DataError, RowError, atomic_output, default_output, find_data_files, read_rows, readable

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"
SHARDS = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"prompt": "A?", "label": "1"}\n')
    return folder


def found(folder: Path, **choice) -> list[str]:
    return [str(path.relative_to(folder)) for path in find_data_files(str(folder), **choice)]


@pytest.mark.parametrize(
    "names, choice, expected",
    [
        # GSM8K as the hub has it: two configurations, two splits.
        (
            ["main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"],
            {},
            ["main/train-00000-of-00001.parquet"],
        ),
        (
            ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"],
            {"config": "socratic"},
            ["socratic/train-00000-of-00001.parquet"],
        ),
        (["default/train/0000.parquet", "other/train/0000.parquet"], {}, ["default/train/0000.parquet"]),
        (
            ["data/" + name for name in SHARDS] + ["data/test-00000-of-00001.parquet"],
            {},
            ["data/" + s for s in SHARDS],
        ),
        (["train.jsonl", "test.jsonl"], {}, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], {"split": "test"}, ["test.jsonl"]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], {}, ["gsm8k_train.jsonl"]),
        (["a.train.jsonl", "a.dev.jsonl"], {"split": "validation"}, ["a.dev.jsonl"]),
        (["train/data.json", "test/data.json"], {}, ["train/data.json"]),
        (["test.jsonl"], {}, ["test.jsonl"]),
        (["aime-2024.jsonl"], {}, ["aime-2024.jsonl"]),
        (
            ["data/cold_start-00000-of-00001.parquet", "data/rl-00000-of-00001.parquet"],
            {"split": "rl"},
            ["data/rl-00000-of-00001.parquet"],
        ),
        (["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"], {}, ["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"]),
        (["train-1.jsonl", "train-2.jsonl"], {}, ["train-1.jsonl", "train-2.jsonl"]),
        (
            ["train.jsonl", "train.parquet.txt", "README.md", "dataset_info.json", ".cache/x/train.jsonl"],
            {},
            ["train.jsonl"],
        ),
        (["train.jsonl", "notes.jsonl"], {}, ["train.jsonl"]),
        (["gsm8k-train.arrow", "gsm8k-test.arrow", "state.json"], {}, ["gsm8k-train.arrow"]),
    ],
)
def test_one_split_of_one_configuration_is_read(tmp_path, names, choice, expected):
    assert found(make(tmp_path, *names), **choice) == expected


@pytest.mark.parametrize(
    "names, choice, says",
    [
        (
            ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"],
            {},
            "configurations main, socratic; choose one with --config",
        ),
        (["main/train.jsonl"], {"config": "x"}, "no configuration x; there are main"),
        (["train.jsonl"], {"split": "test"}, "no split test; there are train"),
        (["test.jsonl", "dev.jsonl"], {}, "the splits test, validation; choose one with --split"),
        (["a-00000-of-00001.parquet", "b-00000-of-00001.parquet"], {}, "the splits a, b; choose one"),
        (
            ["aime-2024.jsonl", "aime-2025.jsonl"],
            {},
            "holds several files (aime-2024.jsonl, aime-2025.jsonl); name the one",
        ),
        (["algebra.jsonl", "geometry.jsonl"], {}, "holds several files (algebra.jsonl, geometry.jsonl)"),
        (["gsm8k_train.jsonl", "math_train.jsonl"], {}, "holds several files"),
        (["train.jsonl", "train.parquet"], {}, "holds .jsonl and .parquet files; name the one file"),
        (SHARDS[:1], {}, "1 of 2 parts are there"),
        (SHARDS[1:], {}, "1 of 2 parts are there"),
        (
            [f"train-0000{n}-of-00002-{h * 16}.parquet" for n in range(2) for h in "ab"],
            {},
            "the same part twice, of two revisions perhaps",
        ),
        (
            ["gsm8k/0.0.0/aaaa/gsm8k-train.arrow", "gsm8k/0.0.0/bbbb/gsm8k-train.arrow"],
            {"config": "gsm8k"},
            "choose one",
        ),
        (["README.md"], {}, "no .parquet, .jsonl, "),
    ],
)
def test_what_is_not_one_data_set_is_refused_by_name(tmp_path, names, choice, says):
    with pytest.raises(DataError) as caught:
        found(make(tmp_path, *names), **choice)
    assert says in str(caught.value)


def test_what_is_not_read_is_said(tmp_path, capsys):
    found(make(tmp_path, "train.jsonl", "test.jsonl"))
    out = capsys.readouterr().out
    assert f"the split train of {tmp_path}; not read: test" in out and f"reading {tmp_path}/train.jsonl" in out


def test_the_hubs_cache_is_read_in_the_revision_that_main_is(tmp_path):
    cache = tmp_path / "datasets--a--b"
    make(cache / "snapshots", "aaaa/train.jsonl", "bbbb/train.jsonl")
    with pytest.raises(DataError, match="holds the revisions aaaa, bbbb; give the folder of one"):
        find_data_files(str(cache))
    make(cache, "refs/main")
    (cache / "refs" / "main").write_text("bbbb")
    assert found(cache) == ["snapshots/bbbb/train.jsonl"]


def test_a_name_of_the_hub_is_first_looked_for_among_the_downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("RETOOL_DOWNLOADS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a local path nor to be had from the hub"):
        find_data_files("someone/aime-2024")
    make(tmp_path / "aime-2024", "aime-2024.jsonl")
    assert find_data_files("someone/aime-2024") == [tmp_path / "aime-2024" / "aime-2024.jsonl"]
    make(tmp_path / "someone" / "aime-2024", "test.jsonl")
    assert find_data_files("someone/aime-2024") == [tmp_path / "someone" / "aime-2024" / "test.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take away its own rights")
def test_a_folder_of_downloads_that_one_may_not_look_into_is_none(tmp_path, monkeypatch):
    """What an ordinary user meets who runs the scripts with their defaults: /root is closed. Named, it is an error."""
    make(tmp_path / "closed" / "JoeYing" / "ReTool-SFT", "train.jsonl")
    (tmp_path / "closed").chmod(0o700)
    monkeypatch.delenv("RETOOL_DOWNLOADS", raising=False)
    monkeypatch.setattr(data_io, "DEFAULT_DOWNLOADS", str(tmp_path / "closed"))
    assert find_data_files("JoeYing/ReTool-SFT") == [tmp_path / "closed" / "JoeYing" / "ReTool-SFT" / "train.jsonl"]
    os.seteuid(65534)
    try:
        assert data_io._downloaded("JoeYing/ReTool-SFT") is None
        monkeypatch.setenv("RETOOL_DOWNLOADS", str(tmp_path / "closed"))
        with pytest.raises(DataError, match="RETOOL_DOWNLOADS is .*closed: no permission to look into "):
            data_io._downloaded("JoeYing/ReTool-SFT")
    finally:
        os.seteuid(0)


def test_outputs_go_where_the_launch_scripts_look(tmp_path, monkeypatch):
    monkeypatch.setenv("VIME_ROOT", str(tmp_path))
    assert default_output("x.jsonl") == tmp_path / "data" / "retool" / "x.jsonl"
    monkeypatch.delenv("VIME_ROOT")
    assert default_output("x.jsonl") == EXAMPLE.parents[1] / "data" / "retool" / "x.jsonl"


# Formats -------------------------------------------------------------------------------------------------------------

ROWS = [{"Prompt": "A é?", "label": "1", "more": 1}, {"Prompt": "B\r\nB?", "label": "2", "more": 2}]


def lines_of(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_arrow(path: Path, stream: bool) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file:
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table.schema) as writer:
            writer.write_table(table)


WRITERS = {
    "lines.jsonl": lambda path: path.write_bytes(lines_of(ROWS)),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines_of(ROWS)),
    "windows.jsonl": lambda path: path.write_bytes(lines_of(ROWS).replace(b"\n", b"\r\n")),
    "packed.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines_of(ROWS))),
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "array.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "lines.json": lambda path: path.write_bytes(lines_of(ROWS)),
    "columns.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "stream.arrow": lambda path: write_arrow(path, stream=True),
    "file.arrow": lambda path: write_arrow(path, stream=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = list(read_rows(find_data_files(str(tmp_path / name)), [["prompt"], ["label"]], "reading"))
    read = [readable(row) for row in rows]
    assert [(row["prompt"], row["label"]) for row in read] == [("A é?", "1"), ("B\nB?", "2")]
    assert [row.place for row in rows] == [f"{name} row 1", f"{name} row 2"]
    if name.endswith((".parquet", ".arrow")):
        assert "more" not in read[0]  # columns that nobody asked for are not read


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.jsonl", b"", "a.jsonl: the file is empty"),
        ("a.parquet", b"", "a.parquet: the file is empty"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("a.parquet", b"x", "cannot be read as parquet"),
        ("a.arrow", b"xxxxxxxx", "cannot be read as arrow"),
        ("a.jsonl.gz", b"xxxxxxxx", "cannot be unpacked"),
        ("a.jsonl.gz", gzip.compress(lines_of(ROWS * 99))[:-20], "cannot be unpacked"),
        ("a.json", b"[1, 2", "not JSON in UTF-8"),
        ("a.json", json.dumps({"data": ROWS}, indent=1).encode(), "its first row goes on over several lines"),
        ("a.jsonl", "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), "`jq -c . FILE`"),
        ("a.jsonl.gz", gzip.compress(json.dumps(ROWS[0], indent=2).encode()), "or all of them as one array"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows([tmp_path / name], [["prompt"]], "reading"))
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["columns.parquet", "stream.arrow"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, name):
    WRITERS[name](tmp_path / name)
    with pytest.raises(DataError, match="has no column question or problem but Prompt, label, more"):
        list(read_rows([tmp_path / name], [["label"], ["question", "problem"]], "reading"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("column", ["images", "Image", "audio"])
def test_a_column_of_pictures_or_sound_is_refused(tmp_path, name, column):
    table = pa.Table.from_pylist([{"prompt": "A?", column: ["a.png"]}])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=f"has a column {column}, and models are shown text alone"):
        list(read_rows([tmp_path / name], [["prompt"]], "reading"))


@pytest.mark.parametrize("rows", [b'{"prompt"\n{"prompt": "B"}\n', b'{"prompt": "A"}\n{\n'])
def test_one_broken_line_at_the_start_is_one_bad_row(tmp_path, rows):
    (tmp_path / "a.jsonl").write_bytes(rows)
    assert [bool(row.error) for row in read_rows([tmp_path / "a.jsonl"], [], "reading")].count(True) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.zst", "a.txt", "a"])
def test_another_format_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=f"{name}: expected a file that ends in .parquet, .jsonl"):
        find_data_files(str(tmp_path / name))


def test_fields_that_differ_in_case_alone_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"Answer": "1", "answer": "2"}\n')
    [row] = read_rows([tmp_path / "a.jsonl"], [], "reading")
    with pytest.raises(RowError, match="two fields are called 'answer'"):
        readable(row)


@pytest.mark.parametrize(
    "content, text",
    [
        ("A?", "A?"),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "?"}], "A?"),
        ([{"type": "text", "text": "A?"}, {"type": "image", "text": None}], None),
        ([{"type": "image_url", "image_url": "x"}], None),
        (None, None),
    ],
)
def test_content_is_text_or_parts_of_text(content, text):
    if text is None:
        with pytest.raises(RowError, match="the user message has no text"):
            text_content({"role": "user", "content": content})
    else:
        assert text_content({"role": "user", "content": content}) == text


def test_sharegpt_is_read():
    given = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    assert openai_messages(given) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]


# Output --------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str = "new") -> None:
    with atomic_output(path, "w") as file:
        file.write(text)


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    target = tmp_path / "there" / "data.jsonl"
    target.parent.mkdir()
    target.write_text("old")
    link = tmp_path / "data.jsonl"
    link.symlink_to(target)
    write(link)
    assert link.is_symlink() and target.read_text() == "new"
    dangling = tmp_path / "dangling.jsonl"
    dangling.symlink_to(tmp_path / "there" / "made.jsonl")
    write(dangling)
    assert dangling.is_symlink() and (tmp_path / "there" / "made.jsonl").read_text() == "new"


def test_two_runs_do_not_write_one_file(tmp_path):
    with atomic_output(tmp_path / "a.jsonl", "w") as file:
        file.write("first")
        with pytest.raises(DataError, match="a.jsonl: is being written by another run"):
            write(tmp_path / "a.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"] and (tmp_path / "a.jsonl").read_text() == "first"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_that_the_next_does_not_remove(tmp_path, end):
    main = (
        "with atomic_output(Path('out.jsonl'), 'w') as file:\n  print(file.write('x'), flush=True)\n  time.sleep(60)"
    )
    script = f"import time\nfrom retool.data_io import *\ndef main():\n {main}\nrun_script(main)"
    (tmp_path / "out.jsonl").write_text("older")
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"1\n"
        process.send_signal(end)
        assert process.wait(timeout=60) in (128 + end, -end)
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {".out.jsonl.partial"} == {"out.jsonl"}
    assert (".out.jsonl.partial" in left) == (end == signal.SIGKILL)
    assert (tmp_path / "out.jsonl").read_text() == "older"
    write(tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_never_replaced(tmp_path, kind):
    path = tmp_path / "out.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    before = os.stat(path).st_mode
    with pytest.raises(DataError, match="is no ordinary file"):
        write(path)
    assert os.stat(path).st_mode == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("script", ["rl_data_preprocess.py", "sft_data_processing.py"])
def test_the_file_that_is_read_is_not_written_over(tmp_path, script):
    source = tmp_path / ("in.parquet" if script.startswith("sft") else "in.jsonl")
    if script.startswith("sft"):
        pq.write_table(pa.Table.from_pylist([{"messages": [{"role": "user", "content": "A"}]}]), source)
    else:
        make(tmp_path, source.name)
    (tmp_path / "link").symlink_to(tmp_path)
    before = source.read_bytes()
    result = run_script(EXAMPLE / script, tmp_path, "--dataset", source, "--output", tmp_path / "link" / source.name)
    assert result.returncode == 1 and "is the file that is read; name another --output" in result.stderr
    assert source.read_bytes() == before
