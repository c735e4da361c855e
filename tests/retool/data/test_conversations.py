"""Tool conversations in the forms in which people have them: each gives the conversation that RL has, or says why
not."""

import json

import pytest
from data_helpers import answered, block, code_of, roles, row
from retool.conversations import fields_left_out
from retool.data_io import RowError
from sft_data_processing import convert

CODE = "x = 'é'\nprint(1)\n\nprint(\"</code>\")"
QUESTION, LAST = "What is 6 times 7?", "So it is \\boxed{42}."
USER, ASSISTANT = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": LAST}
HUMAN, GPT = {"from": "human", "value": QUESTION}, {"from": "gpt", "value": LAST}


def call(name: str = "code_interpreter", **arguments: str) -> dict:
    return {"name": name, "arguments": arguments or {"code": CODE}}


def as_text(function: dict) -> str:
    return f"<tool_call>\n{json.dumps(function)}\n</tool_call>"


def with_text(function: dict) -> dict:
    return {**function, "arguments": json.dumps(function["arguments"])}


def openai(function: dict) -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


HERMES_OUTPUT = '<tool_response>\n{"name": "code_interpreter", "content": "1\\n2"}\n</tool_response>\n'
TIR = f"Go.\n```python\n{CODE}\n```\n```output\n1\n2\n```\n{LAST}"
TAGGED = f"Go.\n{as_text(call())}<tool_response>\n1\n2\n</tool_response>\n{LAST}"
FORMS = {
    "OpenAI tool_calls": {
        "messages": [USER, openai(with_text(call())), {"role": "tool", "content": "1\n2"}, ASSISTANT]
    },
    "OpenAI tool_calls as parquet fills them": {
        "messages": [
            {**USER, "tool_calls": None, "name": None},
            openai({"name": "code_interpreter", "arguments": {"code": CODE, "query": None}}),
            {"role": "tool", "content": "1\n2", "tool_calls": []},
            ASSISTANT,
        ]
    },
    "OpenAI function_call": {
        "messages": [
            USER,
            {"role": "assistant", "content": "Go.", "function_call": with_text(call())},
            {"role": "function", "name": "code_interpreter", "content": "1\n2"},
            ASSISTANT,
        ]
    },
    "LLaMA-Factory": {
        "conversations": [
            HUMAN,
            {"from": "function_call", "value": json.dumps(call())},
            {"from": "observation", "value": "1\n2"},
            GPT,
        ],
        "tools": "[]",
    },
    "Hermes": {
        "conversations": [
            {"from": "system", "value": "You are a function calling model."},
            HUMAN,
            {"from": "gpt", "value": f"Go.\n{as_text(call())}"},
            {"from": "tool", "value": HERMES_OUTPUT},
            GPT,
        ]
    },
    "Qwen's template": {
        "messages": [
            USER,
            {"role": "assistant", "content": f"<think>\nGo.\n</think>\n\n{as_text(call())}"},
            {"role": "user", "content": "<tool_response>\n1\n2\n</tool_response>"},
            ASSISTANT,
        ]
    },
    "calls and responses in one text": {"messages": [USER, {"role": "assistant", "content": TAGGED}]},
    "Qwen3-Coder": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "<tool_call>\n<function=code_interpreter>\n<parameter=code>\n" + CODE + "\n</parameter>\n"
                "</function>\n</tool_call>",
            },
            {"role": "tool", "content": "1\n2"},
            ASSISTANT,
        ]
    },
    "NuminaMath-TIR": {
        "problem": "other",
        "solution": "other",
        "messages": [USER, {"role": "assistant", "content": TIR}],
    },
    "ToRA": {"prompt": QUESTION, "completion": TIR},
    "prompt and response": {"prompt": QUESTION, "response": f"Go.\n{block(CODE, chr(10).join('12'))}{LAST}"},
    "prompt and completion as messages": {"prompt": [USER], "completion": [{"role": "assistant", "content": TIR}]},
    "Alpaca": {"instruction": "What is 6", "input": "times 7?", "output": TIR},
    "Alpaca without input": {"instruction": QUESTION, "input": "", "output": TIR, "system": "S", "history": []},
    "messages as JSON text, with a developer's": {
        "messages": json.dumps(
            [
                {"role": "developer", "content": "Use Python."},
                {"role": "user", "content": [{"text": QUESTION}]},
                openai(call()),
                {"role": "tool", "content": [{"type": "text", "text": "1\n2"}]},
                ASSISTANT,
            ]
        )
    },
    "another tool": {"messages": [USER, openai(call("python")), {"role": "tool", "content": "1\n2"}, ASSISTANT]},
    "another argument": {
        "messages": [USER, openai(call("python", input=CODE)), {"role": "tool", "content": "1\n2"}, ASSISTANT]
    },
    "another tool in a text": {
        "messages": [
            USER,
            {"role": "assistant", "content": as_text(call("python"))},
            {"role": "tool", "content": "1\n2"},
            ASSISTANT,
        ]
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_conversation_of_rl(name):
    converted = convert(FORMS[name], tool_name="python")
    messages = converted["messages"]
    assert roles(messages) == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[1]["content"].split() == QUESTION.split()
    assert code_of(messages[2]) == CODE and messages[3]["content"] == "Output:\n1\n2"
    assert messages[4]["content"] == f"{LAST}\n\nAnswer: \\boxed{{42}}"
    assert convert(converted) == converted  # what the script writes it reads


def test_words_after_a_call_in_its_message_stand_after_the_output():
    messages = [
        USER,
        {**ASSISTANT, "content": f"{as_text(call())}\nWait."},
        {"role": "tool", "content": "1"},
        ASSISTANT,
    ]
    assert convert({"messages": messages})["messages"][4]["content"].startswith(f"Wait.\n\n{LAST}")


PRINTS = {"role": "assistant", "content": f"Go.\n{as_text(call())}"}


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"messages": [USER, openai(call("get_weather", city="Rome")), {"role": "tool", "content": "1"}, ASSISTANT]},
         "a call of the tool 'get_weather', which RL does not have; --tool-name"),
        ({"messages": [USER, {**PRINTS, "content": as_text(call("search", q="x"))}, ASSISTANT]}, "found user, assistant"),
        ({"messages": [USER, {**PRINTS, "content": PRINTS["content"] * 2}, {"role": "tool", "content": "1"}, ASSISTANT]},
         "2 calls in one message, and RL runs one at a time"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "{'name': 1}"}, {"from": "observation", "value": ""}, GPT]},
         "a function_call is not JSON"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": json.dumps([call(), call()])},
                            {"from": "observation", "value": "1"}, GPT]}, "2 calls in one message"),
        ({"messages": [USER, {"role": "assistant", "content": f"<think>\n{as_text(call())}\n</think>\n{LAST}"}]},
         "inside a thought"),
        ({"messages": [USER, {"role": "assistant", "content": TIR.replace("2\n```", "2")}]}, "unclosed"),
        ({"messages": [USER, {"role": "assistant", "content": f"```python\n{CODE}\n```\n{LAST}"}]}, "without an interpreter"),
        ({"messages": [{**USER, "images": ["a.png"]}, ASSISTANT]}, "comes with images, and RL has text alone"),
        ({"messages": [USER, {"role": "ipython", "content": "1"}, ASSISTANT]}, "unknown role 'ipython'"),
        ({"instruction": "A?", "output": LAST, "history": [["B?", "C"]]}, "several user turns: history"),
        ({"instruction": "A?", "output": ""}, "empty conversation"),
        ({"prompt": "A?", "chosen": LAST, "rejected": "x"}, "empty conversation"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_of_rl_says_why(given, reason):
    with pytest.raises(RowError) as caught:
        convert(given)
    assert reason in str(caught.value)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("content", [None, "", "I run it."])
def test_reasoning_beside_the_content_stays_as_the_same_words_inline_do(field, content):
    inline = {**openai(call()), "content": f"<think>\nI think.\n</think>\n\n{content or ''}"}
    beside = {**openai(call()), "content": content, field: "I think."}
    end = [{"role": "tool", "content": "1"}, ASSISTANT]
    converted = convert({"messages": [USER, beside, *end]})
    assert converted == convert({"messages": [USER, inline, *end]})
    assert converted["messages"][2]["content"].startswith("I think.\n")


def test_fields_of_messages_that_are_not_read_are_named():
    given = {"messages": [{**USER, "weight": 1, "audio": None}, {**ASSISTANT, "annotations": ["x"], "name": "a"}]}
    assert fields_left_out(given) == {"weight", "annotations"}


@pytest.mark.parametrize("text", [TIR, TAGGED])
def test_dialect_code_takes_only_what_rl_shows_so(text):
    with pytest.raises(RowError, match="RL does not show outputs as this text does"):
        convert({"messages": [USER, {"role": "assistant", "content": text}]}, "code")
    assert convert(row(answered(block("print(1)"))), "code")["tools"] == "[]"
