"""SFT teaches what RL does: the ids of a converted conversation in vime's SFT rollout are those of the RL loop.

Left side: `MultiTurnLossMaskGenerator` of type `qwen`, vime's own where VIME_ROOT is set, else a rendering by its
rules. Right side: `sample.tokens` after `generate` has replayed the conversation over a scripted engine, with the real
sandbox running its code. Both with Qwen3's own tokenizer and template. The masks may differ in nothing but turn
closers, `<|im_end|>` and the newline after it.

The rows are of our own making, in the published shape: their outputs are what plain Python writes when it runs their
code as a script, whose output and errors the published rows show as one text.
"""

import json
import subprocess
import sys
import time

import pytest
import tool_sandbox
from data_helpers import row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retool import actions, observations
from retool.chat import find_observations, neutralize
from scripted import Rollout, Turn
from sft_data_processing import convert

from vime.utils.types import Sample

END = "<|im_end|>"


def sft_ids(tokenizer, converted: dict) -> tuple[list[int], list[int]]:
    """Ids and loss mask as vime's SFT rollout makes them from a row of the parquet file."""
    messages, tools = converted["messages"], json.loads(converted["tools"])
    try:
        from vime.utils.mask_utils import MultiTurnLossMaskGenerator
    except ImportError:
        return rendered_by_vimes_rules(tokenizer, messages, tools)
    return MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen").get_loss_mask(messages, tools=tools)


def rendered_by_vimes_rules(tokenizer, messages, tools) -> tuple[list[int], list[int]]:
    """Message by message, the tools with the first; an assistant's words and their closer are trained on."""
    ids, mask = [], []
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for index, message in enumerate(messages):
        part = tokenizer.apply_chat_template(
            [message], tools=None if index else tools, tokenize=True, return_dict=False
        )
        ids += part
        untrained = len(header) if message["role"] == "assistant" else len(part)
        mask += [0] * untrained + [1] * (len(part) - untrained)
    return ids, mask


def replay(rollout: Rollout, texts: list[str], question: str) -> Sample:
    """Let `generate` run a conversation whose assistant says `texts`: a call's turn stops at its stop string."""
    script = [Turn(text) for text in texts[:-1]] + [Turn(texts[-1] + END)]
    sample = rollout.run(script, Sample(prompt=question, label="42"))
    assert sample.metadata["retool"]["end_reason"] == "answer"
    assert len(sample.metadata["retool"]["calls"]) == len(texts) - 1
    return sample


def check_same(rollout: Rollout, converted: dict) -> None:
    tokenizer, messages = rollout.tokenizer, converted["messages"]
    ids, mask = sft_ids(tokenizer, converted)
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    sample = replay(rollout, texts, messages[1]["content"])
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert ids == sample.tokens + newline, (tokenizer.decode(ids), tokenizer.decode(sample.tokens))

    rl_mask = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    (end,) = tokenizer(END, add_special_tokens=False)["input_ids"]
    for position, (sft, rl) in enumerate(zip(mask, rl_mask, strict=False)):
        closer = ids[position] == end or (ids[position : position + 1] == newline and ids[position - 1] == end)
        assert sft == rl or closer, tokenizer.decode(ids[: position + 1])
    trained = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    assert trained == "".join(f"{text}{END}\n" for text in texts)


@pytest.fixture
def rollout(monkeypatch, qwen3_tokenizer):
    made = Rollout(monkeypatch, qwen3_tokenizer)
    yield made
    made.close()


def written_by_python(code: str, folder) -> str:
    """What the code writes as a script, in a folder and under a name as sandboxes choose them."""
    script = folder / "tmpk3x_a1b2" / "tmp4c5d6e7f.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(actions.source(code))
    ended = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


def published_text(turns: list[tuple[str, str, str]], last: str) -> str:
    """Words, code and output inline, and the answer in its tags."""
    text = "".join(
        f"{words}\n<code>\n```python\n{code}\n```\n</code>\n<interpreter>\n{output}\n</interpreter>\n"
        for words, code, output in turns
    )
    return f"{text}\n{last}\n<answer>\n\\boxed{{42}}\n</answer>"


ROWS = {  # the words and the code of each turn, and the last words
    "one call": ([("I compute it.", "print(6 * 7)")], "So it is 42."),
    "no call": ([], "Six sevens are 42."),
    "no words": ([("", "print(6 * 7)")], ""),
    "three calls": ([("First.\n\nThen:", "a = 1\nprint(a)"), ("", "print(2)"), ("Last.", "print(3)")], "Done."),
    "nothing printed": ([("Go.", "x = 1"), ("Again.", "print(end='')")], "Nothing."),
    "an empty line printed": ([("Go.", "print()\nprint(' ')")], "Nothing."),
    "odd white space": (
        [("  A \n\n\n B", "\n\n    if 1:\n\tprint('\\n  1 \\n')\n\n"), ("  C", "  print(1, end=' ')")],
        "  D ",
    ),
    "unicode": ([("Soit é ∑ 𝔸 数", 'print("é", "∑\\n", \'𝔸\')')], "Fin é."),
    "box on the way": ([("Perhaps \\boxed{41}, I check.", "print(r'Answer: \\boxed{1}')")], "Yes."),
    "tags in output": ([("Go.", "print('<|', 'im_end|></tool_', 'response> a <| b <co', 'de>', sep='')")], "Ok."),
    "more than an observation shows": ([("Go.", "print('begin', list(range(3000)), 'end')")], "Ok."),
    "an exception": ([("Try.", "print('step')\nx = 0\nprint(1 / x)")], "Hm."),
    "functions and a library": (
        [
            (
                "",
                "import json\ndef g(t):\n    return (json\n        .loads(t))\n\ndef f(t):\n    return [g(t)]\n\nf('{')",
            ),
            ("", "class A:\n    def __init__(self):\n        raise ValueError('two\\n\\nlines')\nA()"),
        ],
        "Hm.",
    ),
    "a chain of exceptions": (
        [
            ("", "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('bad') from e"),
            ("", "try:\n    [][1]\nexcept IndexError:\n    print(undefined)"),
        ],
        "Hm.",
    ),
    "no program": ([("", "x = 1\ndef broken(:\n    pass"), ("", "print('a)"), ("", "a = 1\n  b = 2")], "Hm."),
    "out of memory": ([("", "print(1)\nx = bytearray(10 ** 15)")], "Hm."),
    "an exception handled": ([("", "try:\n    1 / 0\nexcept Exception as e:\n    print(f'ValueError: {e}')")], "Hm."),
    "an exception printed": ([("", "print('Traceback (most recent call last):')\nprint('Error: x')")], "Hm."),
    "numbers of numpy": ([("", "import numpy as np\nprint(np.linspace(0, 1, 3), np.float64(1) / 3)")], "So."),
    "an exception of numpy": ([("", "import numpy as np\nnp.zeros(2) @ np.zeros(3)")], "Hm."),
    "algebra of sympy": (
        [("", "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 2), factor(x**2 - 1))")],
        "So.",
    ),
}
# What RL shows otherwise than a converted row, and why: the rows cannot know better.
DIFFERENT = {
    "the value of the last line, which a script does not show": "x = 6 * 7\nx",
    "what draws at random": "import random\nprint(random.random())",
    "how long it took": "import time\nprint(time.time())",
    "why the program exits, which a script writes like an error of its own": "import sys\nsys.exit('no solution')",
    "an import that the policy refuses": "import os\nprint(os.sep)",
}


@pytest.fixture
def with_libraries(monkeypatch):
    sandbox = tool_sandbox.tool_registry.python_sandbox
    monkeypatch.setattr(sandbox, "allowed_modules", sandbox.allowed_modules | {"numpy", "sympy"})


@pytest.mark.parametrize("name", ROWS)
def test_the_ids_of_sft_are_those_of_rl(rollout, with_libraries, tmp_path, name):
    turns, last = ROWS[name]
    ran = [(words, code, written_by_python(code, tmp_path)) for words, code in turns]
    check_same(rollout, convert(row(published_text(ran, last), "Où est $\\frac{1}{2}$ ?")))


def converted_output(code: str, output: str) -> str:
    return convert(row(published_text([("", code, output)], "So.")))["messages"][3]["content"]


def shown_by_rl(rollout: Rollout, code: str, dialect: str) -> str:
    said = f"<code>\n{code}\n</code>"
    if dialect == "tool_call":
        said = convert(row(published_text([("", code, "")], "So.")))["messages"][2]["content"]
    sample = replay(rollout, [said, "Answer: \\boxed{42}"], "Why?")
    return find_observations(sample.response)[0].body


def test_the_wording_differs_where_a_row_cannot_know_better_and_nowhere_else(rollout, with_libraries, tmp_path):
    codes = {f"{name} {n}": code for name, (turns, _) in ROWS.items() for n, (_, code) in enumerate(turns)} | DIFFERENT
    differing = set()
    for name, code in codes.items():
        output = written_by_python(code, tmp_path)
        if converted_output(code, output) != shown_by_rl(rollout, code, "tool_call"):
            differing.add(name)
    assert differing == DIFFERENT.keys(), f"{len(differing)} of {len(codes)} outputs are worded otherwise"


def test_without_the_library_rl_refuses_what_a_row_shows(rollout, tmp_path):
    code = "import numpy as np\nprint(np.ones(2))"
    assert converted_output(code, written_by_python(code, tmp_path)) == "Output:\n[1. 1.]"
    assert shown_by_rl(rollout, code, "tool_call").startswith("Error: not allowed: line 1: module 'numpy'")


RAW = ["print(6 * 7)", "x = 1", "print('a')\nprint('b ')", "print('a')\n\nx = 0\n1 / x", "def broken(:\n    pass"]


@pytest.mark.parametrize("code", RAW)
def test_in_the_dialect_of_the_published_rows_rl_shows_what_they_show(rollout, tmp_path, code):
    raw = written_by_python(code, tmp_path).replace(str(tmp_path / "tmpk3x_a1b2" / "tmp4c5d6e7f.py"), "<string>")
    raw = "\n".join(line for line in raw.split("\n") if set(line) - set(" ~^") or not line or "broken" in code)
    assert shown_by_rl(rollout, code, "code") == neutralize(raw.removesuffix("\n"))
    text = published_text([("", code, raw)], "So.")
    assert convert(row(text), "code")["messages"][1]["content"] == text


def test_vimes_rules_are_vimes(qwen3_tokenizer):
    try:
        from vime.utils.mask_utils import MultiTurnLossMaskGenerator
    except ImportError:
        pytest.skip("VIME_ROOT names no vime checkout with vime.utils.mask_utils")
    generator = MultiTurnLossMaskGenerator(qwen3_tokenizer, tokenizer_type="qwen")
    for turns, last in ROWS.values():
        converted = convert(row(published_text([(*turn, "42") for turn in turns], last)))
        messages, tools = converted["messages"], json.loads(converted["tools"])
        assert rendered_by_vimes_rules(qwen3_tokenizer, messages, tools) == generator.get_loss_mask(messages, tools)


TEXT = st.text("ab \n\t.,é∑\"'\\{}()[]=+#1", max_size=25)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["", "\n", "!"])), max_size=3), TEXT)
def test_the_ids_of_any_conversation_are_the_same(rollout, turns, last):
    printed = [(words, f"print({text!r}, end={end!r})", text + end) for words, text, end in turns]
    check_same(rollout, convert(row(published_text(printed, last))))


# Outputs as other machines have written them -------------------------------------------------------------------------

CODE = "def f(x):\n    return 1 / x\n\nprint('a')\nf(0)"
SHORT = (
    "Error: Traceback (most recent call last):\n  line 5, in <module>\n    f(0)\n  line 2, in f\n    return 1 / x\n"
)
TIMED_OUT = "Error: timed out: used 10 s of processor time. Use a faster method or a smaller case."


def trace(first: int, file: str = "/tmp/tmpa/tmpb.py", source: bool = True, marks: bool = False) -> str:
    calls = [(first, "<module>", "f(0)", ""), (first - 3, "f", "return 1 / x", "           ~~^~~")]
    lines = ["Traceback (most recent call last):"]
    for line, name, text, mark in calls:
        lines += (
            [f'  File "{file}", line {line}, in {name}'] + [f"    {text}"] * source + [mark] * (marks and bool(mark))
        )
    return "\n".join([*lines, "ZeroDivisionError: division by zero"])


@pytest.mark.parametrize(
    "code, published, worded",
    [
        (CODE, f"a\n{trace(5)}", f"Output:\na\n\n{SHORT}ZeroDivisionError: division by zero"),
        (CODE, f"a\n{trace(5, marks=True)}\n", f"Output:\na\n\n{SHORT}ZeroDivisionError: division by zero"),
        (CODE, trace(5, "<string>", source=False), f"{SHORT}ZeroDivisionError: division by zero"),
        (CODE, trace(17), f"{SHORT}ZeroDivisionError: division by zero"),  # twelve lines stood before the code
        (f"\n\n{CODE}\n", trace(7), f"{SHORT}ZeroDivisionError: division by zero"),
        (CODE, "ZeroDivisionError: division by zero", "Error: ZeroDivisionError: division by zero"),
        (
            CODE,
            "a\nNameError: name 'y' is not defined",
            "Output:\na\n\nError: NameError: name 'y' is not defined\n" + observations.AFRESH,
        ),
        ("try:\n    f()\nexcept Exception as e:\n    print(repr(e))", "ValueError: x", "Output:\nValueError: x"),
        (CODE, "a\nError: 3", "Output:\na\nError: 3"),
        (CODE, "TimeoutError", TIMED_OUT),
        (CODE, "Execution timed out after 5 seconds.", TIMED_OUT),
        (CODE, "a\n[Timeout]", f"Output:\na\n\n{TIMED_OUT}"),
        (CODE, "Time Limit Exceeded", TIMED_OUT),
        (CODE, trace(5).rpartition("\n")[0] + "\nTimeoutError: Operation timed out", TIMED_OUT),
        ("print('timed out')", "timed out", "Output:\ntimed out"),
        (
            "import warnings",
            "1\n/tmp/x.py:3: RuntimeWarning: divide by zero\n  f(0)",
            "Output:\n1\n\nErrors:\n/tmp/x.py:3: RuntimeWarning: divide by zero\n  f(0)",
        ),
        # What the sandbox has said already stays.
        (CODE, "Output:\na\n\nError: x", "Output:\na\n\nError: x"),
        (CODE, observations.NO_OUTPUT, observations.NO_OUTPUT),
        ("print('Output:')\nprint(1)", "Output:\n1", "Output:\nOutput:\n1"),
    ],
)
def test_published_outputs_are_worded_as_the_sandbox_words_them(code, published, worded):
    assert converted_output(code, published) == worded


@pytest.mark.parametrize("piece", ["Traceback (most recent call last):\n", "  [x", f"\n{trace(5)}\n\n", "a\n\nb: c"])
def test_reading_a_long_output_takes_linear_time(piece):
    def seconds(count: int) -> float:
        begun = time.process_time()
        observations.read_published(f"{trace(5)}\n{piece * count}", CODE, 10, 2**30)
        return time.process_time() - begun

    assert min(seconds(8_000) for _ in range(3)) < 8 * min(seconds(2_000) for _ in range(3))


def test_a_recursion_of_any_length_is_cut():
    lines = trace(5).split("\n")
    deep = "\n".join([*lines[:-1], "  [Previous line repeated 999999999 more times]", lines[-1]])
    assert "more calls ..." in converted_output(CODE, deep)
