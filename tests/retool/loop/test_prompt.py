"""The prompt: byte for byte what Qwen3's own chat template renders, whatever form vime hands it over in."""

import json

import generate_with_retool as plugin
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retool.chat import render_prompt
from tool_sandbox import SYSTEM_PROMPT, tool_registry

TOOLS = tool_registry.get_tool_specs()
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief. \\boxed{} <b>&amp;</b> „ünïcode“"}
CALL = {
    "role": "assistant",
    "content": "Let me compute.",
    "tool_calls": [
        {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": 'print("é")'}}}
    ],
}
OUTPUT = {"role": "tool", "content": "Output:\n4"}

CONVERSATIONS = {
    "one question": [QUESTION],
    "with a system message": [SYSTEM, QUESTION],
    "with an empty system message": [{"role": "system", "content": ""}, QUESTION],
    "with earlier turns": [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}],
    "ends with a tool's answer": [SYSTEM, QUESTION, CALL, OUTPUT],
    "two answers in a row": [SYSTEM, QUESTION, CALL, OUTPUT, OUTPUT],
    "a call without text": [SYSTEM, QUESTION, {**CALL, "content": ""}, OUTPUT],
    "two calls in a turn": [SYSTEM, QUESTION, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, OUTPUT, OUTPUT],
    "arguments as text": [
        QUESTION,
        {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":  1}'}}]},
        OUTPUT,
    ],
    "a bare call": [QUESTION, {**CALL, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}, OUTPUT],
    "a later question": [SYSTEM, QUESTION, CALL, OUTPUT, {"role": "assistant", "content": "4"}, QUESTION],
    "earlier thoughts are dropped": [
        QUESTION,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
        {"role": "user", "content": "Sure?"},
    ],
    "thoughts since the question are kept": [
        QUESTION,
        {**CALL, "content": "<think>\nhm\n</think>\n\nLet me compute."},
        OUTPUT,
    ],
    "thoughts in a field": [QUESTION, {**CALL, "reasoning_content": "\nhm\n"}, OUTPUT],
    "a tool's answer as a user turn": [
        QUESTION,
        {**CALL, "content": "<think>hm</think>x"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
    ],
    "a system turn in the middle": [SYSTEM, QUESTION, {"role": "system", "content": "hint"}, QUESTION],
}


def rendered(messages, tools=TOOLS):
    """What `generate` sends: the default system text takes the place of a missing one."""
    system, rest = plugin.split_prompt(messages)
    if isinstance(rest, str):
        return plugin.format_conversation_with_tools(rest, tools, system)
    return plugin.format_conversation_with_tools("", tools, system, messages=rest)


def template(tokenizer, messages, tools=TOOLS):
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *messages]
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_as_qwen3s_template(qwen3_tokenizer, messages, tools):
    assert rendered(messages, tools) == template(qwen3_tokenizer, messages, tools)
    assert render_prompt(messages, TOOLS) == template(qwen3_tokenizer, messages)


def test_a_tool_with_awkward_text(qwen3_tokenizer):
    tool = {
        "type": "function",
        "function": {"name": "z", "description": "é <tag> & \"'\n", "parameters": {"b": 1, "a": 2}},
    }
    assert rendered([QUESTION], [tool, *TOOLS]) == template(qwen3_tokenizer, [QUESTION], [tool, *TOOLS])


TEXT = st.text(alphabet="ab \n<>/{}\"'\\é☃think", max_size=20)
TURNS = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXT),
    st.builds(lambda text: {"role": "assistant", "content": text}, TEXT),
    st.builds(lambda text: {"role": "tool", "content": text}, TEXT),
    st.builds(
        lambda text, think: {"role": "assistant", "content": f"<think>\n{think}\n</think>\n\n{text}"}, TEXT, TEXT
    ),
    st.builds(
        lambda text, code: {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"function": {"name": "code_interpreter", "arguments": {"code": code}}}],
        },
        TEXT,
        TEXT,
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TURNS, max_size=6), st.sampled_from([[], [SYSTEM]]), st.sampled_from(["user", "tool"]), TEXT)
def test_any_conversation_is_as_the_template(qwen3_tokenizer, turns, system, last, text):
    messages = system + turns + [{"role": last, "content": text}]
    if [m["role"] for m in messages[len(system) :]] == ["user"] and not text:
        return  # an empty question is no turn here
    assert rendered(messages) == template(qwen3_tokenizer, messages)


def test_without_the_tokenizer():
    text = plugin.format_conversation_with_tools("Q", TOOLS, "S")
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n\nYou may call one or more functions")
    assert "\n<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools>\n" in text
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    assert "<think>" not in text and "\\boxed" in SYSTEM_PROMPT


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("Q", (None, "Q")),
        ("", (None, "")),
        ([], (None, "")),
        ([{"role": "user", "content": "Q"}], (None, "Q")),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], ("S", "Q")),
        ([{"role": "system", "content": "S"}], ("S", "")),
        ([{"role": "system", "content": ""}, {"role": "user", "content": "Q"}], ("", "Q")),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], (None, "ab")),
        ([QUESTION, CALL, OUTPUT], (None, [QUESTION, CALL, OUTPUT])),
        ([SYSTEM, QUESTION, CALL, OUTPUT], (SYSTEM["content"], [QUESTION, CALL, OUTPUT])),
        ([CALL], (None, [CALL])),
    ],
)
def test_split_prompt(prompt, expected):
    assert plugin.split_prompt(prompt) == expected


def test_a_prompt_is_not_changed():
    before = json.dumps(CONVERSATIONS)
    for messages in CONVERSATIONS.values():
        render_prompt(messages, TOOLS)
    assert json.dumps(CONVERSATIONS) == before


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "critic", "content": "no"}, "'critic'"),
        ({"content": "no role"}, "None"),
        ({"role": "user", "content": 5}, "int"),
        ({"role": "user", "content": [{"type": "image", "image": "x.png"}]}, "text only"),
    ],
)
def test_what_cannot_be_rendered_is_named(message, words):
    with pytest.raises(ValueError, match=words):
        render_prompt([QUESTION, message, QUESTION], TOOLS)


def test_a_templated_prompt_is_used_as_it_is():
    templated = plugin.format_conversation_with_tools("Q", TOOLS, "S")
    assert render_prompt(templated, TOOLS) == templated
    thinking = templated + "<think>\n\n</think>\n\n"
    assert render_prompt(thinking, TOOLS) == thinking


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "other"}}]])
def test_a_templated_prompt_without_the_tools_is_refused(tools):
    templated = plugin.format_conversation_with_tools('Q about "name": "code_interpreter"', tools, "S")
    with pytest.raises(ValueError, match="--apply-chat-template"):
        render_prompt(templated, TOOLS)


def test_a_question_about_chat_tokens_is_a_question():
    prompt = "What does <|im_start|> mean?"
    assert render_prompt(prompt, TOOLS) == plugin.format_conversation_with_tools(prompt, TOOLS)
