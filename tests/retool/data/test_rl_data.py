"""rl_data_preprocess: published layouts, duplicates, contradictions, exclusion, bad rows, memory on a large file."""

import json
import resource
import sys
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rl_data_preprocess
from data_helpers import run_script, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from retool.chat import CODE_INTERPRETER, render_prompt
from retool.data_io import RowError
from rl_data_preprocess import NoAnswer, evaluation_key, parse_row, problem_key, row_label, strip_instruction

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "retool" / "rl_data_preprocess.py"
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo(problem: str, label="34", wrap: bool = True) -> dict:
    text = BEFORE + problem + AFTER if wrap else problem
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": label, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


@pytest.mark.parametrize(
    "layout",
    [
        dapo("What is $1+1$?", "2"),
        {"prompt": [{"role": "user", "content": BEFORE + "What is $1+1$?" + AFTER}], "label": "2"},
        {"prompt": "What is $1+1$?", "label": 2},
        {"problem": "What is $1+1$?", "answer": 2.0},
        {"question": "What is $1+1$?", "answer": " 2\n"},
        {"input": "What is $1+1$?", "output": "2"},
        {"prompt": "What is $1+1$?", "label": None, "reward_model": {"ground_truth": 2}},
        # GSM8K, MATH, and other data sets as they are published
        {"question": "What is $1+1$?", "answer": "One and one is <<1+1=2>>2 apples.\nSo it is 2.\n#### 2"},
        {"problem": "What is $1+1$?", "level": "Level 1", "solution": "First \\boxed{1}, then $\\boxed{2}$."},
        {"problem": "What is $1+1$?", "solution": "First \\boxed{1}, so \\boxed{2.0}", "answer": "2"},
        {"problem": "What is $1+1$?", "answer": "Adding gives\n\\[\\boxed{2}\\]"},
        {"prompt": "What is $1+1$?", "solution": "2", "reward_model": {"ground_truth": "2"}},
        {"prompt": json.dumps([{"role": "user", "content": "What is $1+1$?"}]), "label": "2"},
        {"prompt": json.dumps({"role": "user", "content": "What is $1+1$?"}), "label": "2"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What is $1+1$?"}]}], "label": "2"},
        {"prompt": [{"from": "human", "value": "What is $1+1$?"}], "label": "2"},
        {"conversations": [{"from": "human", "value": "What is $1+1$?"}, {"from": "gpt", "value": "So \\boxed{2}."}]},
        {"messages": [{"role": "user", "content": "What is $1+1$?"}, {"role": "assistant", "content": "#### 2"}]},
        {"messages": [{"role": "user", "content": "What is $1+1$?"}], "label": "2"},
        {"problem": "What is $1+1$?", "label": "2", "answer": "02"},
    ],
)
def test_every_published_layout_gives_the_same(layout):
    problem = parse_row(layout)
    assert (problem.text, problem.prompt, problem.label) == ("What is $1+1$?", "What is $1+1$?", "2")
    assert not problem.has_system


@pytest.mark.parametrize(
    "before, after",
    [
        (BEFORE, AFTER),
        (BEFORE.replace("$Answer (without quotes)", "\\boxed{$Answer}"), AFTER),
        (BEFORE.replace("$Answer", "$ANSWER"), AFTER[:-1] + ", and you do not need to use a \\boxed command."),
        ("\n " + BEFORE.rstrip() + "\n", AFTER.rstrip(".") + "  \n"),
        (BEFORE.replace(". The", ".\nThe"), AFTER.replace('"', "“", 1).replace('"', "”", 1)),
    ],
)
def test_both_sentences_go_in_their_published_wordings(before, after):
    assert strip_instruction(before + "A\n\n B?" + after) == ("A\n\n B?", True)


@pytest.mark.parametrize(
    "prompt, text",
    [
        ("A?", "A?"),
        (BEFORE + "A?", "A?"),
        ("A?" + AFTER, "A?"),
        ("Why does one solve the following math problem step by step?", None),
        ('"Remember to put your answer on its own line after "Answer:"." is a sentence of how many words?', None),
        ("A? " + BEFORE + "B?", None),
    ],
)
def test_what_is_not_wrapped_stays_and_is_marked(prompt, text):
    assert strip_instruction(prompt) == ((prompt if text is None else text).strip(), False)


def test_keep_instruction_keeps_the_prompt_and_still_knows_the_problem():
    problem = parse_row(dapo("A?"), keep_instruction=True)
    assert problem.prompt == BEFORE + "A?" + AFTER and problem.text == "A?"


@pytest.mark.parametrize(
    "label, text",
    [
        (34, "34"),
        (34.0, "34"),
        ("34", "34"),
        (" 025 ", "025"),
        (0, "0"),
        (-3, "-3"),
        (2.5, "2.5"),
        ("so 1,234 + 0\n#### 1,234", "1234"),
        ("... #### $70,000\n", "70000"),
        ("#### -5", "-5"),
        ("$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("\\begin{pmatrix}\n1 & 2\n\\end{pmatrix}", "\\begin{pmatrix}\n1 & 2\n\\end{pmatrix}"),
        ("\\frac12", "\\frac12"),
        (["5"], "5"),
        ([5.0], "5"),
        ('["5"]', "5"),
        ("['34']", "34"),
        ("[ -2.5 ]", "-2.5"),
        ("[1, 2]", "[1, 2]"),
        ("Answer: 34", "34"),
        ("**Answer:** $34$", "$34$"),
        ("The answer is 34.", "34"),
        ("So, the final answer is: \\frac{1}{2}", "\\frac{1}{2}"),
        ("1e-07", "0.0000001"),
        (1e-07, "0.0000001"),
        ("2.5E3", "2500"),
        (1e22, "10000000000000000000000"),
        (0.30000000000000004, "0.3"),
        ("0.30000000000000004", "0.3"),
        ("3.14159265358979", "3.14159265358979"),
        (Decimal("34.5"), "34.5"),
        ("A long way.\n#### A heading\nSo \\boxed{5}.", "5"),
    ],
)
def test_labels_are_strings(label, text):
    assert row_label({"label": label}) == text


@pytest.mark.parametrize(
    "bad, reason",
    [
        ({}, "no prompt"),
        ({"prompt": None, "label": "1"}, "no prompt"),
        ({"prompt": 5, "label": "1"}, "no prompt"),
        ({"prompt": "A?"}, "no label"),
        ({"prompt": "A?", "label": None}, "no label"),
        ({"prompt": "A?", "label": " "}, "no label"),
        ({"prompt": "A?", "label": True}, "no label"),
        ({"prompt": "A?", "label": ["1", "2"]}, "no label"),
        ({"prompt": "A?", "reward_model": None}, "no label"),
        ({"prompt": "A?", "reward_model": {"ground_truth": None}}, "no label"),
        ({"prompt": "A?", "label": float("nan")}, "no label"),
        ({"prompt": "A?", "label": float("inf")}, "no label"),
        ({"prompt": "A?", "label": "3", "answer": "4"}, "label is '3', but answer is '4'"),
        ({"prompt": "A?", "answer": "4", "reward_model": {"ground_truth": "5"}}, "answer is '4', but reward_model"),
        ({"prompt": "A?", "label": 1 / 3}, "label is 0.3333333333333333, which is cut off or rounded"),
        ({"prompt": "A?", "label": "2", "images": ["a.png"]}, "the problem comes with images"),
        ({"prompt": "What is in <image>?", "label": "2"}, "speaks of a picture"),
        ({"prompt": "A?", "label": '["5", "6"]'}, "label is a list of answers"),
        ({"prompt": "A?", "label": 10**5000}, "no label"),
        (
            {"prompt": "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n", "label": "2"},
            "put through a chat template that does not list the tool 'code_interpreter'",
        ),
        ({"prompt": "A?", "answer": "First we add.\nThen we are done."}, "answer is a worked solution"),
        ({"prompt": "A?", "answer": "word " * 50}, "answer is a worked solution"),
        ({"problem": "A?", "solution": "It is \\boxed{3}.", "answer": "2"}, "answer is '2', but solution is '3'"),
        ({"problem": "A?", "solution": "It is 3."}, "the worked solution has no '#### ...' and no box"),
        ({"prompt": "A?", "text": "x"}, "the row has prompt, text"),
        ({"text": "A?", "label": "1"}, "the row has text, label"),
        ({"prompt": [{"role": "user", "content": "A"}] * 2, "label": "1"}, "2 user messages"),
        (
            {"prompt": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], "label": "1"},
            "assistant",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": "1"}, "no text alone"),
        (
            {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "3"}]},
            "the worked solution",
        ),
        ({"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}] * 2}, "assistant"),
        ({"prompt": " ", "label": "1"}, "the problem is empty"),
        (dapo(""), "the problem is empty"),
        ({"prompt": [], "label": "1"}, "not of one user message"),
        ({"prompt": ["A?"], "label": "1"}, "not of one user message"),
        ({"prompt": [{"role": "system", "content": "A"}], "label": "1"}, "not of one user message"),
        ({"prompt": [{"role": "user", "content": "A"}] * 2, "label": "1"}, "not of one user message"),
        ({"prompt": [{"role": "user", "content": None}], "label": "1"}, "the user message has no text"),
    ],
)
def test_what_cannot_be_used_says_why(bad, reason):
    with pytest.raises(RowError, match=reason):
        parse_row(bad)


def test_a_templated_prompt_that_lists_the_tool_stays_as_rl_takes_it():
    prompt = render_prompt("A?", [CODE_INTERPRETER])
    assert parse_row({"prompt": prompt, "label": "2"}).prompt == prompt.strip()


@pytest.mark.parametrize(
    "none", ["proof", "notfound", "N/A", "None", "not found", "NULL", "nan", "Unknown.", "-", "?"]
)
@pytest.mark.parametrize("field", ["label", "answer"])
def test_words_that_say_that_there_is_no_answer_are_no_label(none, field):
    with pytest.raises(NoAnswer, match=f"{field} is"):
        parse_row({"prompt": "A?", field: none, "solution": "So \\boxed{2}."})


@pytest.mark.parametrize(
    "mark", [{"question_type": "proof"}, {"problem_is_valid": "Incomplete"}, {"solution_is_valid": "No"}]
)
def test_a_problem_that_its_data_set_marks_as_none_is_left_out_and_counted(tmp_path, mark):
    good = {"question_type": "MCQ", "problem_is_valid": "Yes", "solution_is_valid": "Yes"}
    rows = [{"problem": f"{n}?", "answer": "A", **good, **(mark if n % 2 else {})} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "numina.parquet")
    result = run(tmp_path, "--dataset", "numina.parquet", "--output", "out.jsonl")
    assert result.returncode == 0 and len(read_jsonl(tmp_path / "out.jsonl")) == 4
    assert "4 without an answer, as the data set says itself" in result.stdout
    pq.write_table(pa.Table.from_pylist(rows[1::2]), tmp_path / "numina.parquet")
    result = run(tmp_path, "--dataset", "numina.parquet", "--output", "out.jsonl", "--force")
    assert result.returncode == 1 and len(read_jsonl(tmp_path / "out.jsonl")) == 4
    assert "no problem of 4 rows is left (0 with two labels, 0 of an evaluation file, 4 without an" in result.stderr


def test_labels_that_the_reward_takes_for_the_same_are_one(tmp_path):
    pairs = [
        ("34", "34.0"),
        ("\\frac12", "0.5"),
        ("\\dfrac{\\pi}{2}", "\\frac{\\pi}{2}"),
        ("1{,}000", "1000"),
        ("1", "2"),
    ]
    rows = [dapo(f"{n}?", label) for n, pair in enumerate(pairs) for label in pair]
    write_jsonl(tmp_path / "in.jsonl", rows)
    result = run(tmp_path, "--dataset", "in.jsonl", "--output", "out.jsonl")
    assert [row["label"] for row in read_jsonl(tmp_path / "out.jsonl")] == [one for one, _ in pairs[:-1]]
    assert "left out: 1 with two labels" in result.stdout
    write_jsonl(tmp_path / "in.jsonl", rows[-2:])
    result = run(tmp_path, "--dataset", "in.jsonl", "--output", "other.jsonl")
    assert "error: no problem of 2 rows is left (1 with two labels, 0 of an evaluation file)" in result.stderr


def test_another_configuration_or_split_takes_another_name(tmp_path):
    write_jsonl(tmp_path / "GSM8K" / "main" / "test.jsonl", [dapo("A?")])
    assert run(tmp_path, "--dataset", "GSM8K", "--split", "test", "--config", "main").returncode == 0
    assert (tmp_path / "data" / "retool" / "gsm8k-main-test.jsonl").exists()


@given(st.text(max_size=60).map(str.strip).filter(bool))
def test_wrapping_and_stripping_is_the_identity(problem):
    assert strip_instruction(BEFORE + problem + AFTER) == (problem, True)


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("Find  $x$.", "Find $x$.\n", True),
        ("Find $x$", "Find $y$", False),
        ("Find $x$", "find $x$", False),
    ],
)
def test_duplicates_are_told_by_white_space_alone(one, other, same):
    assert (problem_key(one) == problem_key(other)) is same


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("Find $\\tfrac{m}{n}$ where $m+n$ is odd.", "Find \\(\\frac{m}{n}\\), where $ m + n $ is odd", True),
        ("Let $x=\\left( a \\right)$", "let x = (a)", True),
        ("\\[|z| = 4\\]", "$|z|=4$", True),
        ("Find $x+1$", "Find $x-1$", False),
        ("Find 12.", "Find 1.2", False),
        ("\\leftarrow", "\\rightarrow", False),
    ],
)
def test_evaluation_problems_are_told_by_their_content(one, other, same):
    assert (evaluation_key(one) == evaluation_key(other)) is same


def test_a_system_message_is_left_out_and_counted():
    problem = parse_row(
        {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "A?"}], "label": 1}
    )
    assert (problem.prompt, problem.has_system) == ("A?", True)


@pytest.mark.parametrize("text", ["[a, b] is an interval. What?", "[1, 2]", '{"a": 1}', "[{]", "[]"])
def test_a_problem_that_begins_with_a_bracket_is_a_problem(text):
    assert parse_row({"prompt": text, "label": 1}).text == text


# The script as a user runs it ----------------------------------------------------------------------------------------


def run(tmp_path, *arguments, **options):
    return run_script(SCRIPT, tmp_path, *arguments, **options)


def read_jsonl(path: Path) -> list:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = [
    dapo("Last by name, first by place?", "1"),
    dapo("Alpha  é?", "2"),
    dapo("Two labels?", "3"),
    dapo("Alpha é?", "2"),
    dapo("Leading zero?", "025"),
    dapo("Two labels?", "4"),
    dapo("Bare?", "5", wrap=False),
    dapo("Leading zero?", "25"),
    dapo("Last by name, first by place?", "1"),
]


def test_each_problem_once_in_order_of_appearance_without_contradictions(tmp_path):
    source = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), source, row_group_size=2)
    result = run(tmp_path, "--dataset", source, "--output", "out.jsonl")
    assert result.returncode == 0, result.stderr
    assert read_jsonl(tmp_path / "out.jsonl") == [
        {"prompt": "Last by name, first by place?", "label": "1"},
        {"prompt": "Alpha  é?", "label": "2"},
        {"prompt": "Leading zero?", "label": "025"},
        {"prompt": "Bare?", "label": "5"},
    ]
    assert "two labels for one problem: train.parquet row 6: label '4', earlier '3'" in result.stdout
    assert "4 of 9 rows" in result.stdout
    assert "different problems: 5, duplicates removed: 4, bad rows: 0" in result.stdout
    assert "left out: 1 with two labels, 0 of an evaluation file" in result.stdout
    assert "without DAPO's instruction sentences, taken as they are: 1" in result.stdout
    again = run(tmp_path, "--dataset", source, "--output", "again.jsonl")
    assert again.returncode == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_parquet_and_jsonl_give_the_same_file(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", ROWS)
    for name, output in (("a.parquet", "a.out.jsonl"), ("b.jsonl", "b.out.jsonl")):
        assert run(tmp_path, "--dataset", name, "--output", output).returncode == 0
    assert (tmp_path / "a.out.jsonl").read_bytes() == (tmp_path / "b.out.jsonl").read_bytes()


def test_keep_instruction_still_finds_duplicates_and_contradictions(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ROWS)
    result = run(tmp_path, "--dataset", "in.jsonl", "--output", "out.jsonl", "--keep-instruction")
    assert result.returncode == 0
    prompts = [r["prompt"] for r in read_jsonl(tmp_path / "out.jsonl")]
    assert prompts[0] == BEFORE + "Last by name, first by place?" + AFTER and prompts[-1] == "Bare?"
    assert len(prompts) == 4


@pytest.mark.parametrize(
    "evaluation",
    [
        {"input": "Alpha $é$", "output": "2"},
        {"prompt": [{"role": "user", "content": BEFORE + "alpha é?" + AFTER}], "label": 2},
        {"problem": "ALPHA é."},
    ],
)
def test_problems_of_an_evaluation_file_are_left_out(tmp_path, evaluation):
    write_jsonl(tmp_path / "in.jsonl", ROWS)
    write_jsonl(tmp_path / "one.jsonl", [evaluation])
    write_jsonl(tmp_path / "two.jsonl", [{"problem": "Bare?"}])
    result = run(tmp_path, "--dataset", "in.jsonl", "--output", "out.jsonl", "--exclude", "one.jsonl", "two.jsonl")
    assert result.returncode == 0, result.stderr
    assert "2 of an evaluation file" in result.stdout
    prompts = {r["prompt"] for r in read_jsonl(tmp_path / "out.jsonl")}
    assert prompts == {"Last by name, first by place?", "Leading zero?"}


def test_the_aime_layout_comes_out_as_an_evaluation_file(tmp_path):
    rows = [{"input": f"Find ${n}$.", "output": str(n)} for n in range(30)]
    write_jsonl(tmp_path / "aime.jsonl", rows)
    result = run(tmp_path, "--dataset", "aime.jsonl", "--output", "data/out.jsonl")
    assert result.returncode == 0
    assert read_jsonl(tmp_path / "data/out.jsonl") == [{"prompt": r["input"], "label": r["output"]} for r in rows]


def test_without_arguments_it_reads_the_published_download_and_writes_where_the_launch_script_looks(tmp_path):
    write_jsonl(tmp_path / "downloads" / "dapo-math-17k" / "dapo-math-17k.jsonl", ROWS)
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(read_jsonl(tmp_path / "data" / "retool" / "dapo-math-17k.jsonl")) == 4
    write_jsonl(tmp_path / "downloads" / "aime-2024" / "aime-2024.jsonl", [{"prompt": "A?", "label": "1"}])
    result = run(tmp_path, "--dataset", "zhuzilin/aime-2024")
    assert result.returncode == 0, result.stderr
    assert read_jsonl(tmp_path / "data" / "retool" / "aime-2024.jsonl") == [{"prompt": "A?", "label": "1"}]


def test_a_test_split_is_never_merged_into_the_training_data(tmp_path):
    for folder, question in (("main", "M"), ("socratic", "S")):
        for split in ("train", "test"):
            row = {"question": f"{question} {split}?", "answer": "so\n#### 1"}
            target = tmp_path / "gsm8k" / folder / f"{split}-00000-of-00001.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist([row]), target)
    result = run(tmp_path, "--dataset", "gsm8k", "--output", "out.jsonl")
    assert result.returncode == 1
    assert "holds the configurations main, socratic; choose one with --config" in result.stderr.splitlines()[-1]
    for flags, prompt in ([], "M train?"), (["--split", "test"], "M test?"):
        result = run(tmp_path, "--dataset", "gsm8k", "--output", "out.jsonl", "--force", "--config", "main", *flags)
        assert result.returncode == 0, result.stderr
        assert read_jsonl(tmp_path / "out.jsonl") == [{"prompt": prompt, "label": "1"}]


def test_line_ends_of_windows_are_not_taught(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "A\\r\\nB?", "label": "1\\r\\n"}\r\n')
    result = run(tmp_path, "--dataset", source, "--output", "out.jsonl")
    assert result.returncode == 0, result.stderr
    assert read_jsonl(tmp_path / "out.jsonl") == [{"prompt": "A\nB?", "label": "1"}]


def test_bad_rows_are_named_and_more_than_one_in_a_hundred_stops_it(tmp_path):
    good = [dapo(f"Problem {n}?") for n in range(99)]
    write_jsonl(tmp_path / "one.jsonl", good[:50] + ["{"] + good[50:])
    result = run(tmp_path, "--dataset", "one.jsonl", "--output", "out.jsonl")
    assert result.returncode == 0
    assert "one.jsonl row 51: not JSON" in result.stdout + result.stderr
    assert "99 of 100 rows" in result.stdout and "bad rows: 1" in result.stdout
    before = (tmp_path / "out.jsonl").read_bytes()
    write_jsonl(tmp_path / "two.jsonl", good + [{"prompt": "x"}, '{"prompt": "\\ud800", "label": "1"}'])
    result = run(tmp_path, "--dataset", "two.jsonl", "--output", "out.jsonl", "--force")
    assert result.returncode == 1
    assert "two.jsonl row 100: no label" in result.stdout + result.stderr
    assert "two.jsonl row 101: not JSON in UTF-8" in result.stdout + result.stderr
    assert result.stderr.splitlines()[-1] == "error: 2 of 101 rows cannot be used; nothing was written"
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.jsonl", "out.jsonl", "two.jsonl"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--dataset", "nowhere.jsonl"], "error: nowhere.jsonl: no such file"),
        (["--dataset", "in.jsonl", "--exclude", "nowhere.jsonl"], "error: nowhere.jsonl: no such file"),
        (["--dataset", "in.jsonl", "--exclude", "bad.jsonl"], "--exclude bad.jsonl: bad.jsonl row 1: no prompt"),
        (["--dataset", "in.jsonl", "--exclude", "in.jsonl"], "no problem of 9 rows is left"),
        (["--dataset", "in.jsonl", "--output", "out.parquet"], "must end in .jsonl"),
        (["--dataset", "in.jsonl", "--output", "in.jsonl/out.jsonl"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, arguments, says):
    write_jsonl(tmp_path / "in.jsonl", ROWS)
    write_jsonl(tmp_path / "bad.jsonl", [{"text": "x"}])
    result = run(tmp_path, *arguments)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert says in result.stderr.splitlines()[-1]


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """400 MB of prompts in one row group, as the published file has it, under an address space of 1 GB."""
    problems = [dapo(f"{n} " + f"word{n} " * 250, str(n)) for n in range(1000)]
    table = pa.Table.from_pylist(problems)
    schema = table.schema
    with pq.ParquetWriter(tmp_path / "large.parquet", schema, compression="snappy") as writer:
        writer.write_table(pa.concat_tables([table] * 200), row_group_size=200_000)
    assert pq.ParquetFile(tmp_path / "large.parquet").metadata.num_row_groups == 1

    result = run(
        tmp_path,
        "--dataset",
        "large.parquet",
        "--output",
        "out.jsonl",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)),
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "1000 of 200000 rows" in result.stdout


def test_nothing_is_kept_in_tmpdir_which_may_be_small(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "1+1?", "label": "2"}])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "argv", ["x", "--dataset", str(source), "--output", str(tmp_path / "out.jsonl")])
    assert rl_data_preprocess.main() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
