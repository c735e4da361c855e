"""sft_data_processing as a user runs it: what it reads, writes, counts and refuses."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from data_helpers import answered, block, row, run_script, write_jsonl
from sft_data_processing import MAX_ROW_TOKENS, convert
from tool_sandbox import tool_registry

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "retool" / "sft_data_processing.py"


def run(tmp_path, *arguments, **options):
    return run_script(SCRIPT, tmp_path, *arguments, **options)


def write_parquet(path: Path, rows) -> Path:
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


GOOD = row(answered("Go.\n" + block("print('é')", "é")))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory"])
def test_the_script_writes_what_vime_reads(tmp_path, kind):
    rows = [GOOD, row(answered("No code."))]
    if kind == "jsonl":
        source = write_jsonl(tmp_path / "in.jsonl", rows)
    elif kind == "parquet":
        source = write_parquet(tmp_path / "in.parquet", rows)
    else:  # what `hf download --local-dir` leaves
        source = tmp_path / "JoeYing" / "ReTool-SFT"
        write_parquet(source / "data" / "train-00000-of-00001.parquet", rows)
        write_jsonl(source / ".cache" / "huggingface" / "junk.jsonl", ["junk"])
        (source / "README.md").write_text("x")
    result = run(tmp_path, "--dataset", source)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 rows" in result.stdout and "0: 1 rows, 1: 1 rows" in result.stdout
    # exactly how vime.utils.data.read_file reads it
    output = tmp_path / "data" / "retool" / ("ReTool-SFT.parquet" if kind == "directory" else "in.parquet")
    read = [r for batch in pq.ParquetFile(output).iter_batches() for r in batch.to_pylist()]
    assert read == [convert(r) for r in rows]
    assert {p.name for p in output.parent.iterdir()} == {output.name, ".gitignore"}


def test_vimes_own_dataset_reads_it(tmp_path):
    vime_data = pytest.importorskip("vime.utils.data", reason="the stand-in has no Dataset; VIME_ROOT names a vime")
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD])
    assert run(tmp_path, "--dataset", source, "--output", "out.parquet").returncode == 0
    dataset = vime_data.Dataset(
        str(tmp_path / "out.parquet"), None, None, None, prompt_key="messages", tool_key="tools"
    )
    (sample,) = dataset.samples
    assert sample.prompt == convert(GOOD)["messages"]
    assert sample.metadata["tools"] == tool_registry.get_tool_specs()


def test_token_lengths_are_printed(tmp_path, qwen3_tokenizer):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD] * 3)
    result = run(tmp_path, "--dataset", source, "--tokenizer", qwen3_tokenizer.name_or_path)
    message = convert(GOOD)
    ids = qwen3_tokenizer.apply_chat_template(
        message["messages"], tools=json.loads(message["tools"]), tokenize=True, return_dict=False
    )
    assert f"tokens per conversation: p50 {len(ids)}, p90 {len(ids)}, p99 {len(ids)}, max {len(ids)}" in result.stdout


@pytest.mark.parametrize("there", [False, True])
def test_without_a_tokenizer_the_lengths_are_characters_and_it_says_so(tmp_path, there):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD])
    folder = tmp_path / "tokenizer"
    if there:  # half a download
        write_jsonl(folder / "config.json", [{"model_type": "qwen3"}])
        write_jsonl(folder / "tokenizer.json", [{}])
    result = run(tmp_path, "--dataset", source, "--tokenizer", folder)
    assert result.returncode == 0 and "Traceback" not in result.stderr
    assert "--tokenizer DIR" in result.stderr and "characters per conversation: p50" in result.stdout
    assert ("cannot be loaded" in result.stderr) is there


def test_one_bad_row_in_a_hundred_is_named_and_left_out(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD] * 6 + ["{"] + [GOOD] * 93)
    result = run(tmp_path, "--dataset", source)
    assert result.returncode == 0, result.stderr
    assert "in.jsonl row 7: not JSON" in result.stdout + result.stderr
    assert "99 of 100 rows, 1 left out" in result.stdout


def test_two_bad_rows_in_a_hundred_stop_it_and_an_older_output_stays(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD] * 97 + [{"messages": []}, "[1]"] + [GOOD])
    (tmp_path / "out.parquet").write_text("older")
    result = run(tmp_path, "--dataset", source, "--output", "out.parquet", "--force")
    assert result.returncode != 0
    assert "row 98: empty conversation" in result.stdout + result.stderr
    assert "row 99: expected a JSON object, found list" in result.stdout + result.stderr
    assert result.stderr.splitlines()[-1] == "error: 2 of 100 rows cannot be converted; nothing was written"
    assert (tmp_path / "out.parquet").read_text() == "older"


def test_limit_reads_the_first_rows_only(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD] * 3 + ["{"] * 3)
    result = run(tmp_path, "--dataset", source, "--limit", 3)
    assert result.returncode == 0 and "3 of 3 rows" in result.stdout


def test_what_rl_would_cut_or_refuse_is_counted(tmp_path, qwen3_tokenizer):
    rows = [
        row(answered(block("import os\nprint(os.listdir())") + block("print(1)"))),
        row(answered(block("print(1)") * 17)),
        row(answered(block("print(1)") * 16)),
        row(answered("word " * 10_000)),
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    result = run(tmp_path, "--dataset", source, "--tokenizer", qwen3_tokenizer.name_or_path)
    assert result.returncode == 0, result.stderr
    assert "calls that the sandbox would refuse: 1 of 35" in result.stdout
    assert "rows with more than the 16 calls that RL allows: 1" in result.stdout
    assert "rows with more than the 9216 tokens that a GPU is given: 1" in result.stdout


def test_the_token_budget_is_that_of_the_launch_scripts():
    for stage in ("sft", "rl"):
        script = (SCRIPT.parent / f"retool_qwen3_4b_{stage}.sh").read_text()
        assert f"--max-tokens-per-gpu {MAX_ROW_TOKENS}\n" in script


def test_without_arguments_it_reads_the_published_download_and_writes_where_the_launch_script_looks(tmp_path):
    write_parquet(tmp_path / "downloads" / "JoeYing" / "ReTool-SFT" / "data" / "train-00000-of-00001.parquet", [GOOD])
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert pq.read_table(tmp_path / "data" / "retool" / "ReTool-SFT.parquet").to_pylist() == [convert(GOOD)]
    assert (tmp_path / "data" / "retool" / ".gitignore").read_text() == "*\n"


def test_line_ends_of_windows_are_not_taught(tmp_path):
    windows = json.loads(json.dumps(GOOD).replace("\\n", "\\r\\n"))
    assert "\r\n" in windows["messages"][1]["content"]
    source = write_jsonl(tmp_path / "in.jsonl", [windows])
    result = run(tmp_path, "--dataset", source, "--output", "out.parquet")
    assert result.returncode == 0, result.stderr
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [convert(GOOD)]


def test_the_output_is_what_its_name_says(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD])
    result = run(tmp_path, "--dataset", source, "--output", "out.jsonl")
    assert result.returncode == 2 and "--output must end in .parquet" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_dialect_code_warns(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [GOOD])
    result = run(tmp_path, "--dataset", source, "--dialect", "code", "--output", "out.parquet")
    assert result.returncode == 0 and "is trained on" in result.stderr
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [convert(GOOD, "code")]


@pytest.mark.parametrize(
    "prepare, arguments, says",
    [
        (lambda d: None, ["--dataset", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (lambda d: None, ["--dataset", "/nowhere/dir"], "/nowhere/dir: no such file"),
        (lambda d: None, ["--dataset", "some/dataset"], "hf download --repo-type dataset some/dataset"),
        (lambda d: (d / "empty").mkdir(), ["--dataset", "empty"], "no .parquet, .jsonl, "),
        (
            lambda d: (d / "a.csv").write_text("x"),
            ["--dataset", "a.csv"],
            "ends in .parquet, .jsonl, .json, .jsonl.gz, .json.gz or .arrow",
        ),
        (lambda d: (d / "a.parquet").write_text("x"), ["--dataset", "a.parquet"], "cannot be read as parquet"),
        (
            lambda d: write_parquet(d / "a.parquet", [{"text": "x"}]),
            ["--dataset", "a.parquet"],
            "has no column messages, conversations, instruction or prompt but text",
        ),
        (lambda d: (d / "a.jsonl").write_text(""), ["--dataset", "a.jsonl"], "the file is empty"),
        (
            lambda d: [write_jsonl(d / "two/a.jsonl", [GOOD]), write_parquet(d / "two/a.parquet", [GOOD])],
            ["--dataset", "two"],
            "name the one file",
        ),
        (
            lambda d: [write_jsonl(d / "a.jsonl", [GOOD]), (d / "file").write_text("x")],
            ["--dataset", "a.jsonl", "--output", "file/out.parquet"],
            "cannot be written",
        ),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, prepare, arguments, says):
    prepare(tmp_path)
    result = run(tmp_path, *arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert says in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_another_tool_name_and_fields_that_are_not_read(tmp_path):
    messages = [
        {"role": "user", "content": "Why?", "weight": 1},
        {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": {"code": "print(1)"}}}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "Answer: \\boxed{1}", "weight": 1},
    ]
    write_jsonl(tmp_path / "in.jsonl", [{"messages": messages}])
    result = run(tmp_path, "--dataset", "in.jsonl")
    assert "a call of the tool 'python', which RL does not have; --tool-name" in result.stdout + result.stderr
    result = run(tmp_path, "--dataset", "in.jsonl", "--tool-name", "python")
    assert result.returncode == 0 and "fields of messages that are not read: weight (1 rows)" in result.stdout


def test_only_the_whole_published_data_in_the_default_dialect_takes_the_name_that_the_launch_reads(tmp_path):
    write_jsonl(tmp_path / "downloads" / "JoeYing" / "ReTool-SFT" / "train.jsonl", [GOOD] * 3)
    write_jsonl(tmp_path / "other.jsonl", [GOOD])
    write_jsonl(tmp_path / "two" / "test.jsonl", [GOOD])
    names = {
        "ReTool-SFT.parquet": [],
        "ReTool-SFT-first2.parquet": ["--limit", 2],
        "ReTool-SFT-code.parquet": ["--dialect", "code"],
        "ReTool-SFT-code-first1.parquet": ["--dialect", "code", "--limit", 1, "--split", "train"],
        "other.parquet": ["--dataset", "other.jsonl"],
        "two-test.parquet": ["--dataset", "two/", "--split", "test"],
    }
    folder = tmp_path / "data" / "retool"
    for count, (name, arguments) in enumerate(names.items(), start=1):
        assert run(tmp_path, *arguments).returncode == 0
        assert (folder / name).exists() and len(list(folder.glob("[!.]*"))) == count, name
    (folder / "other.parquet").write_text("mine")
    result = run(tmp_path, *names["other.parquet"])
    assert result.returncode == 1 and (folder / "other.parquet").read_text() == "mine"
    assert "other.parquet: is there already; --force replaces it, --output names another" in result.stderr
    assert run(tmp_path, *names["other.parquet"], "--force").returncode == 0
    assert pq.read_table(folder / "other.parquet").num_rows == 1
