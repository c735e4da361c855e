"""sft_data_processing: every form of a published row, what must be refused and why, and the file that vime reads."""

import json
import re
import time
from pathlib import Path

import pytest
from data_helpers import CODE, PREAMBLE, REMINDER, answered, block, code_of, roles, row
from hypothesis import example, given
from hypothesis import strategies as st
from retool import actions
from retool.chat import SYSTEM_PROMPT, tool_call_text
from retool.conversations import split_blocks
from retool.data_io import RowError
from retool.observations import Parts, word
from sft_data_processing import convert, final_text, question_of
from tool_sandbox import tool_registry

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "retool" / "sft_data_processing.py"


def test_a_published_row_becomes_the_conversation_that_rl_has():
    text = "I compute it.\n\n" + block("print(6 * 7)") + "\nSo it is 42.\n\n<answer>\n\\boxed{42}\n</answer>"
    converted = convert(row(text))
    call = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    assert converted["messages"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "What is 6 times 7?"},
        {"role": "assistant", "content": "I compute it.\n" + call},
        {"role": "tool", "content": "Output:\n42"},
        {"role": "assistant", "content": "So it is 42.\n\nAnswer: \\boxed{42}"},
    ]
    assert json.loads(converted["tools"]) == tool_registry.get_tool_specs()


def test_calls_are_written_as_the_chat_template_writes_them(qwen3_tokenizer):
    code = 'print("é\\n", \'"\')\n\tx = {"a": [1]}'
    arguments = {"name": "code_interpreter", "arguments": {"code": code}}
    rendered = [
        qwen3_tokenizer.apply_chat_template([message], tokenize=False)
        for message in (
            {"role": "assistant", "content": "Now.", "tool_calls": [{"type": "function", "function": arguments}]},
            {"role": "assistant", "content": "Now.\n" + tool_call_text("code_interpreter", {"code": code})},
        )
    ]
    assert rendered[0] == rendered[1]


@pytest.mark.parametrize(
    "written",
    [
        f"<code>\n```python\n{CODE}\n```\n</code>",
        f"<code>\n```py\n{CODE}\n```\n</code>",
        f"<code>\n```\n{CODE}\n```\n</code>",
        f"<code>```python\n{CODE}\n```</code>",
        f"<code>\n\n  ```python  \n{CODE}\n```  \n\n</code>",
        f"<code>\n{CODE}\n</code>",
        f"<code>{CODE}</code>",
        f"```python\n{CODE}\n```",
        f"```Py\n{CODE}\n```",
    ],
)
def test_every_form_of_a_code_block(written):
    messages = convert(row(answered(f"Go.\n{written}\n<interpreter>\n0\n1\n</interpreter>\n")))["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]
    assert code_of(messages[2]) == CODE
    assert messages[2]["content"].startswith("Go.\n<tool_call>\n")
    assert messages[3]["content"] == "Output:\n0\n1"


@pytest.mark.parametrize(
    "code",
    [
        "    x = 1\n    print(x)\n",
        "\n\nprint(1)\n\n",
        "print('a')   \n# end  ",
        'print("""```\nnot python\n```""")',
        'print("```python\\nx\\n```")',
        's = "</code>"\nprint(s, "<interpreter>", "<answer>\\\\boxed{1}</answer>")',
        "if 1:\n\tprint('\\t|\\\\d|\\u00e9|é|𝔸|\\r')",
        "print(r'Answer: \\boxed{7}')",
    ],
)
def test_code_is_kept_to_the_character(code):
    messages = convert(row(answered(block(code))))["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]
    assert code_of(messages[2]) == code


@pytest.mark.parametrize(
    "written",
    [
        "<code>\n```python\nx = 1  # </code>\nprint(x)\n```\n</code>",
        "<code>\nx = 1  # </code>",
        '<code>\n```python\ns = "</code>"\nprint(s)\n```\n</code>',
        "<CODE>\nprint(1)\n</code>",
        "```py\nprint(1)\n```",
        "<code>\n    if 1:\n        print(1)\n</code>",
        "<code>```python\nprint(1)```</code>",
    ],
)
def test_the_program_is_the_one_that_the_loop_reads(written):
    """However a block is written: the two have one reader."""
    try:
        messages = convert(row(answered(f"Go.\n{written}\n<interpreter>\n1\n</interpreter>\n")))["messages"]
    except RowError:
        return  # refused by name, never read in another way
    published = actions.read_action(f"Go.\n{written}").action
    taught = actions.read_action(messages[2]["content"]).action
    assert isinstance(published, actions.Code) and published.source == taught.source


def test_many_unclosed_boxes_take_linear_time():
    def seconds(count: int) -> float:
        begun = time.process_time()
        with pytest.raises(RowError):
            final_text("\\boxed{" * count, None)
        return time.process_time() - begun

    assert min(seconds(80_000) for _ in range(3)) < 8 * min(seconds(20_000) for _ in range(3))


@pytest.mark.parametrize("result", ["4", "  4\n\n", "", "a\n\n```python\nb\n```", "x < y", "<class 'int'>", "∑ é 𝔸"])
def test_output_is_kept_to_the_character(result):
    assert convert(row(answered(block("print(1)", result))))["messages"][3]["content"] == word(
        Parts(result.removesuffix("\n") or None), "tool_call"
    )


def test_output_without_its_line_breaks_is_the_same_output():
    text = answered("<code>print(4)</code><interpreter>4</interpreter>")
    assert convert(row(text))["messages"][3]["content"] == "Output:\n4"


def test_words_between_code_and_output_move_after_the_output():
    text = "One.\n<code>\nprint(1)\n</code>\nTwo.\n<interpreter>\n1\n</interpreter>\nThree."
    messages = convert(row(answered(text)))["messages"]
    assert messages[2]["content"].startswith("One.\n<tool_call>")
    assert messages[4]["content"] == "Two.\n\nThree.\n\nAnswer: \\boxed{42}"


# What SFT writes is what RL reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", ["```python", "  ```python", "```python3", "```PY"])
def test_fences_that_rl_reads_are_read(fence):
    text = answered(f"Go.\n{fence}\n{CODE}\n```\n<interpreter>\n0\n1\n</interpreter>\n")
    messages = convert(row(text))["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]
    assert code_of(messages[2]) == CODE


@pytest.mark.parametrize("written", [f"<CODE>\n{CODE}\n</CODE>", f"<Code>{CODE}</Code>"])
def test_tags_in_capitals_are_refused_since_rl_reads_no_program_in_them(written):
    assert not isinstance(actions.read_action(written).action, actions.Code)
    with pytest.raises(RowError, match="unclosed <code> block|unclosed <C"):
        convert(row(answered(f"Go.\n{written}\n<interpreter>\n0\n1\n</interpreter>\n")))


def test_an_indented_fence_holds_the_program_that_rl_would_run():
    written = "  ```python\n  x = 1\n  print(x)\n  ```"
    messages = convert(row(answered(f"{written}\n<interpreter>\n1\n</interpreter>\n")))["messages"]
    assert actions.source(code_of(messages[2])) == "x = 1\nprint(x)"


def test_the_answer_tag_named_in_prose_swallows_nothing():
    text = "I will close with <answer> and a box.\n" + block("print(1)", "1") + "Then.\n"
    messages = convert(row(answered(text)))["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["content"].startswith("I will close with <answer> and a box.\n<tool_call>")
    assert messages[4]["content"] == "Then.\n\nAnswer: \\boxed{42}"


@pytest.mark.parametrize(
    "before",
    ["**Answer**: \\boxed{41}", "Answer: $\\boxed{41}$", "<answer>\\boxed{41}</answer>", "answer:\n\\boxed{41}"],
)
def test_an_answer_before_a_call_would_end_the_episode(before):
    with pytest.raises(RowError, match="an answer stands before a code or interpreter block"):
        convert(row(answered(f"{before}\n" + block("print(1)"))))


def test_a_box_before_a_call_is_no_answer_where_rl_reads_none():
    messages = convert(row(answered("Perhaps \\boxed{41}, I check.\n" + block("print(1)"))))["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "written",
    [f"<code>\n~~~python\n{CODE}\n~~~\n</code>", f"~~~python\n{CODE}\n~~~"],
)
def test_fences_that_rl_does_not_know_are_refused(written):
    with pytest.raises(RowError, match="fence|without a code block"):
        convert(row(answered(f"{written}\n<interpreter>\n1\n</interpreter>\n")))


@pytest.mark.parametrize(
    "box, answer",
    [("'42'", "42"), ('"42"', "42"), ("' 42 '", "42"), ("f'(x)", "f'(x)"), ("'", "'"), ("x'y'", "x'y'"), ("''", "''")],
)
def test_the_quotes_of_the_published_format_are_no_part_of_the_answer(box, answer):
    text = f"Done.\n<answer>\n\\boxed{{{box}}}\n</answer>"
    assert convert(row(text))["messages"][-1]["content"] == f"Done.\n\nAnswer: \\boxed{{{answer}}}"


def test_the_code_that_is_taught_is_the_code_that_rl_runs():
    text = answered(block("x = 1  # </code>\nprint(x)"))
    call = convert(row(text))["messages"][2]["content"]
    assert actions.read_action(call).action == actions.Code("x = 1  # </code>\nprint(x)", "tool_call")


# Rows with a message for each call -----------------------------------------------------------------------------------


def call_message(code: str, text: str | None = None, as_text: bool = False) -> dict:
    arguments = {"code": code}
    call = {"name": "code_interpreter", "arguments": json.dumps(arguments) if as_text else arguments}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": call}]}


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_openai_tool_calls_give_the_same_conversation(as_text, system):
    published = convert(row("Go.\n" + block("print(1)", "1") + block("print(2)", "2") + "So 42.\nAnswer: \\boxed{42}"))
    messages = [
        *system,
        {"role": "user", "content": "What is 6 times 7?", "tool_calls": None},
        call_message("print(1)", "Go.", as_text),
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        call_message("print(2)", "" if as_text else None, as_text),
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "So 42.\nAnswer: \\boxed{42}", "tool_calls": None},
    ]
    assert convert({"messages": messages}) == published
    with pytest.raises(RowError, match="dialect code keeps one assistant text"):
        convert({"messages": messages}, "code")


def test_sharegpt_conversations_and_parts_of_text_are_read():
    published = row(answered("Go.\n" + block("print(1)")))
    user, assistant = (message["content"] for message in published["messages"])
    for form in (
        {"conversations": [{"from": "human", "value": user}, {"from": "gpt", "value": assistant}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": user}]},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": t} for t in assistant.partition("Go.")[1:]],
                },
            ]
        },
        {"messages": [{"role": "system", "content": "S"}, *published["messages"]]},
    ):
        assert convert(form) == convert(published)


USER = {"role": "user", "content": "Why?"}
TOOL = {"role": "tool", "content": "1"}
LAST = {"role": "assistant", "content": "Answer: \\boxed{1}"}


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([USER, LAST, USER, LAST], "several user turns"),
        ([USER, call_message("print(1)"), LAST], "expected one user"),
        ([USER, call_message("print(1)"), TOOL], "expected one user"),
        ([USER, {"role": "assistant", "content": "Go."}, TOOL, LAST], "an interpreter block without a code block"),
        ([USER, {**call_message("x = 1"), "tool_calls": [{}, {}]}, TOOL, LAST], "2 calls in one message"),
        ([USER, {**call_message("x = 1"), "tool_calls": [{}]}, TOOL, LAST], "has no function"),
        ([USER, call_message(" "), TOOL, LAST], "without code"),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]},
                TOOL,
                LAST,
            ],
            "a call of the tool 'search', which RL does not have",
        ),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "code_interpreter", "arguments": "{"}}]},
                TOOL,
                LAST,
            ],
            "are not JSON",
        ),
        ([USER, call_message("print(1)", "Answer: \\boxed{1}"), TOOL, LAST], "an answer stands before"),
    ],
)
def test_calls_that_cannot_be_converted_say_why(messages, reason):
    with pytest.raises(RowError) as caught:
        convert({"messages": messages})
    assert reason in str(caught.value)


def test_many_blocks_and_a_call_without_words():
    text = block("a = 1") + "Then.\n" + block("b = 2", "") + block("c = 3")
    messages = convert(row(answered(text)))["messages"]
    assert roles(messages)[2:] == ["assistant", "tool"] * 3 + ["assistant"]
    assert [code_of(message) for message in messages[2:8:2]] == ["a = 1", "b = 2", "c = 3"]
    assert messages[2]["content"].startswith("<tool_call>")
    assert messages[8]["content"] == "Answer: \\boxed{42}"


def test_a_row_without_code_is_one_answer():
    assert convert(row(answered("Six sevens are 42.")))["messages"][2:] == [
        {"role": "assistant", "content": "Six sevens are 42.\n\nAnswer: \\boxed{42}"}
    ]


def test_think_tags_go_and_their_words_stay():
    text = "<think>\nI try.\n" + block("print(1)") + "Good.\n</think>\n" + answered("Done.")
    messages = convert(row(text))["messages"]
    assert messages[2]["content"].startswith("I try.\n<tool_call>")
    assert messages[4]["content"] == "Good.\n\nDone.\n\nAnswer: \\boxed{42}"


@pytest.mark.parametrize(
    "text, answer, expected",
    [
        ("Done.", "\\boxed{42}", "Done.\n\nAnswer: \\boxed{42}"),
        ("", "\n$\\boxed{42}$.\n", "Answer: \\boxed{42}"),
        ("Done.", "It is \\boxed{42}, as shown.", "Done.\n\nIt is \\boxed{42}, as shown.\n\nAnswer: \\boxed{42}"),
        ("Done.", "Answer: \\boxed{42}", "Done.\n\nAnswer: \\boxed{42}"),
        ("", "\\boxed{\\frac{1}{\\sqrt{2}}}", "Answer: \\boxed{\\frac{1}{\\sqrt{2}}}"),
        ("", "\\boxed{\\{1, 2\\}}", "Answer: \\boxed{\\{1, 2\\}}"),
        ("", "\\boxed {7}", "Answer: \\boxed{7}"),
        ("", "\\boxed{7} and again \\boxed{7}", "\\boxed{7} and again \\boxed{7}\n\nAnswer: \\boxed{7}"),
        ("First \\boxed{1}. Hence \\boxed{2}.", None, "First \\boxed{1}. Hence \\boxed{2}.\n\nAnswer: \\boxed{2}"),
        ("So.\nAnswer: \\boxed{2}", None, "So.\nAnswer: \\boxed{2}"),
    ],
)
def test_the_last_text_ends_in_the_answer_line(text, answer, expected):
    assert final_text(text, answer) == expected


@pytest.mark.parametrize(
    "user, question",
    [
        (PREAMBLE + "Why?" + REMINDER, "Why?"),
        (PREAMBLE + "Why?\n", "Why?"),
        ("Why?", "Why?"),
        (PREAMBLE.replace("*user question:*", "*User Question:*") + "Why?" + REMINDER, "Why?"),
        (
            PREAMBLE
            + "Answer the following Math Problem and put the answer in the format of \\boxed{answer}\n\nA\n\n  B?\n\n"
            + REMINDER,
            "A\n\n  B?",
        ),
        (PREAMBLE + "What does *user question:* mean?" + REMINDER, "What does *user question:* mean?"),
    ],
)
def test_the_question_stands_without_its_preamble(user, question):
    assert question_of(user) == question


@pytest.mark.parametrize(
    "bad, reason",
    [
        ({}, "empty conversation"),
        ({"messages": []}, "empty conversation"),
        ({"messages": None}, "empty conversation"),
        ({"messages": "hello"}, "not a list of objects"),
        ({"messages": ["hello"]}, "not a list of objects"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role 'human'"),
        ({"messages": [{"role": None, "content": "a"}]}, "unknown role None"),
        ({"messages": [{"role": "user", "content": "a"}]}, "found user"),
        ({"messages": row(answered("x"))["messages"] * 2}, "found user, assistant, user, assistant"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "no text"),
        ({"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "a"}]}, "no text"),
        ({"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": "a"}]}, "no text"),
        (row(""), "the assistant message has no text"),
        (row("No answer."), "no final answer"),
        (row("<answer>\n42\n</answer>"), "no final answer"),
        (row("<answer>\n\\boxed{}\n</answer>"), "no final answer"),
        (row("<answer>\n\\boxed{4\n</answer>"), "no final answer"),
        (row("<answer>\n\n</answer>"), "empty answer block"),
        (row("<answer>\\boxed{1} or \\boxed{2}</answer>"), "more than one box"),
        (row(answered("a") + answered("b")), "more than one answer block"),
        (row("<answer>\\boxed{1}"), "unclosed <answer>"),
        (row("<code>print(1)"), "unclosed <code>"),
        (row("<code>\n```python\nprint(1)\n</code>"), "unclosed <code>"),
        (row("<code>print(1)</code><interpreter>1"), "unclosed <interpreter>"),
        (row("```python\nprint(1)"), "unclosed ```python"),
        (row(answered("</code>")), "</code> closes no block"),
        (row(answered("x</interpreter>")), "</interpreter> closes no block"),
        (row(answered("<code>\n\n</code><interpreter></interpreter>")), "empty code block"),
        (row(answered("<code>\n```python\n```\n</code><interpreter></interpreter>")), "empty code block"),
        (row(answered("<code>\nHere:\n```python\nprint(1)\n```\n</code><interpreter>1</interpreter>")), "beside its"),
        (row(answered("<code>print(1)</code>")), "without an interpreter block"),
        (row(answered("<code>a=1</code>" + block("print(1)"))), "without an interpreter block"),
        (row(answered("<interpreter>1</interpreter>")), "an interpreter block without a code block"),
        (row(answered(block("print(1)") + "<interpreter>1</interpreter>")), "without a code block"),
        (row(answered("x") + block("print(1)")), "an answer stands before"),
        (row(answered("Answer: \\boxed{1}\n" + block("print(1)"))), "an answer stands before"),
        (row(answered("x<|im_end|>")), "<|im_end|>"),
        (row(answered("a <tool_call> b")), "<tool_call>"),
        (row(answered("<tool_call>\n{}\n</tool_call>")), "<tool_call>"),
        (row(answered(block("print('</tool_call>')"))), "</tool_call>"),
        (row(answered(block("print('</think>')"))), "</think>"),
        (row(answered("x"), question="<|im_start|>system"), "<|im_start|>"),
        (row(answered("x"), question=" "), "the question is empty"),
        (
            {
                "messages": [
                    {"role": "user", "content": "Use <code>."},
                    {"role": "assistant", "content": answered("x")},
                ]
            },
            "block tag",
        ),
    ],
)
@pytest.mark.parametrize("dialect", ["tool_call", "code"])
def test_what_cannot_be_converted_says_why(bad, reason, dialect):
    with pytest.raises(RowError, match=".") as caught:
        convert(bad, dialect)
    assert reason in str(caught.value)


def test_dialect_code_keeps_the_published_messages():
    published = row(answered(block("print(1)")))
    assert convert(published, "code") == {"messages": published["messages"], "tools": "[]"}


def test_convert_leaves_its_row_alone():
    given_row = row(answered(block("print(1)")))
    before = json.dumps(given_row)
    convert(given_row)
    assert json.dumps(given_row) == before


plain_text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="<`\\"), max_size=40)


printed = plain_text.filter(
    lambda text: not re.search("error|exception|time|iteration", text, re.I)
)  # else no plain output


@given(st.lists(st.tuples(plain_text, plain_text.filter(str.strip), printed), max_size=5), plain_text)
@example([("", "print(1)", "Warning: ")], "")  # a category of warnings, which no traceback ends in
def test_nothing_is_lost_in_any_row(turns, last):
    text = "".join(f"{words}\n{block(code, result)}" for words, code, result in turns)
    messages = convert(row(answered(text + last)))["messages"]
    assert len(messages) == 3 + 2 * len(turns)
    for (words, code, result), call, output in zip(turns, messages[2::2], messages[3::2], strict=False):
        assert code_of(call) == code
        assert output["content"] == word(Parts(result.removesuffix("\n") if result else None), "tool_call")
        assert words.split() == call["content"].rpartition("<tool_call>")[0].split()
    assert messages[-1]["content"].split() == last.split() + ["Answer:", "\\boxed{42}"]


@given(st.text("<>/codeinterpretanswer`\npython{}\\b ", max_size=200))
def test_any_text_gives_blocks_or_a_reason(text):
    try:
        blocks = list(split_blocks(text))
    except RowError:
        return
    assert all(block.content for block in blocks if block.kind != "result")


def test_output_is_shown_as_the_loop_shows_it():
    messages = convert(row(answered(block("print(1)", "a <| b </tool_response><CODE>"))))["messages"]
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["Output:\na < | b < /tool_response>< CODE>"]


def test_the_tools_are_those_that_rl_shows_with_widened_modules(monkeypatch):
    import tool_sandbox
    from retool.chat import CODE_TOOL, code_interpreter_spec

    monkeypatch.setitem(tool_registry.tools, CODE_TOOL, code_interpreter_spec(("numpy", "sympy")))
    tools = json.loads(convert(row(answered("x")))["tools"])
    assert tools == tool_sandbox.tool_registry.get_tool_specs() and "sympy" in tools[0]["function"]["description"]
