"""How a turn is read: the golden cases, their families, and that it is linear and never raises."""

import json
import time
from pathlib import Path

import generate_with_retool as plugin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retool import actions
from retool.actions import Code, Incomplete, Invalid
from tool_sandbox import tool_registry

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "actions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden_cases(case):
    assert plugin.postprocess_predictions(case["text"]) == (case["action"], case["content"])


def json_call(code, name="code_interpreter"):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {"code": code}}) + "\n</tool_call>"


@pytest.mark.parametrize(
    "text, content",
    [
        ("Answer: \\boxed{5}", "5"),
        ("Answer:\\boxed{5}", "5"),
        ("answer: \\boxed{5}", "5"),
        ("Final Answer: \\boxed{5}", "5"),
        ("**Answer**: \\boxed{5}", "5"),
        ("### Answer:\n\n\\boxed{5}", "5"),
        ("Answer:\n\\[\n\\boxed{5}\n\\]", "5"),
        ("Answer: $$\\boxed{\\dfrac{3}{4}}$$", "\\dfrac{3}{4}"),
        ("Answer: \\boxed {5}", "5"),
        ("Answer: \\boxed{ 5 }", "5"),
        ("Answer: \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("Answer: \\boxed{a}, that is \\boxed{b}", "b"),
        ("Answer：\\boxed{5}", "5"),
        ("<answer>\\boxed{5}</answer>", "5"),
        ("<answer>The value is\n\\boxed{5}\n</answer>", "5"),
        ("So \\[\n\\boxed{73}\n\\]<|im_end|>", "73"),
        ("So $\\boxed{73}$.\n<|im_end|>\n", "73"),
        ("So \\boxed{73}<|endoftext|>", "73"),
        ("```python\nprint(1)\n```\nHence \\boxed{7}<|im_end|>", "7"),
        ("<think>maybe \\boxed{1}</think>\nAnswer: \\boxed{2}", "2"),
        ("<think>still thinking. Answer: \\boxed{2}", "2"),
        ("<code>\nprint('<think>')\n</code>\nAnswer: \\boxed{2}", "2"),
        ("I don't use <code> here.\nAnswer: \\boxed{3}", "3"),
        ("I start <code> but don't. Answer: \\boxed{3}, isn't it", "3"),
    ],
)
def test_answers(text, content):
    assert plugin.postprocess_predictions(text) == ("answer", content)


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 5",
        "Answer: \\boxed{}",
        "Answer: \\boxed{5",
        "Answer: see above.\nThen \\boxed{5} follows",
        "So \\boxed{73}",  # the turn has not ended
        "So \\boxed{73}? Let me check that.<|im_end|>",
        "\\boxed{73}\nBut I am not sure<|im_end|>",
        "<think>Answer: \\boxed{1}</think>",
        "it goes on. Answer: \\boxed{1}</think> Now the real work",  # a thought that an earlier turn opened
        "<interpreter>\nAnswer: \\boxed{1}\n</interpreter>",
        "<tool_response>\nAnswer: \\boxed{1}\n</tool_response>",
        "<answer>5</answer>",
        "```python\nprint('Answer: \\boxed{5}')",
        "<code>\nprint('Answer: \\boxed{5}')",
        "<code>\nprint('''\nAnswer: \\boxed{5}",
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(\'Answer: \\\\boxed{5}\')',
    ],
)
def test_no_answer(text):
    assert plugin.postprocess_predictions(text) == (None, "")


@pytest.mark.parametrize(
    "text, code",
    [
        ("<code>\ns = '</code>'\nprint(s)\n</code>", "s = '</code>'\nprint(s)"),
        ('<code>\ns = """\n</code>\n"""\n</code>', 's = """\n</code>\n"""'),
        ("<code>\n# don't stop\nprint(1)\n</code>", "# don't stop\nprint(1)"),
        ("<code>\nprint(1) # done</code>", "print(1) # done"),
        ("<code>\nprint('it\\'s')\n</code>", "print('it\\'s')"),
        ("<code>\nprint('broken)\nprint(2)\n</code>", "print('broken)\nprint(2)"),
        ("<code>print('broken)</code>\n\n", "print('broken)"),
        ("<code>print('broken)</code><|im_end|>", "print('broken)"),
        ("<code>\nprint(rb'</code>', f'</code>', '</code>')\n</code>", "print(rb'</code>', f'</code>', '</code>')"),
        ('<code>x = """open\n</code>text<|im_end|>', 'x = """open'),
        ("I use <code> tags: <code>print(1)</code>", "print(1)"),
        ("<code>   print(1)   </code>", "print(1)"),
        ("<code>\n    x = 1\n    print(x)\n</code>", "x = 1\nprint(x)"),
        ("<code>\n```\nprint(1)\n```\n</code>", "print(1)"),
        ("<code>\r\n```python\r\nprint(1)\r\n```\r\n</code>", "print(1)"),
        ("```python3\nprint(1)\n```", "print(1)"),
        ("```Python\nprint(1)\n```", "print(1)"),
        ("```python\nprint(1)```", "print(1)"),
        ("```python\nprint(1)\n``` shows it", "print(1)"),
        ("```python\nx = 1\n```\nNow for real:\n<code>print(2)</code>", "print(2)"),
        ("```json\n{}\n```\n```python\nprint(1)\n```", "print(1)"),
        (json_call("s = '<tool_call>'"), "s = '<tool_call>'"),
        (json_call("s = '{'") + json_call("2"), "s = '{'"),
        ("<tool_call> is the tag. " + json_call("1"), "1"),
        ('<tool_call>{"name": <tool_call>' + json_call("1").removeprefix("<tool_call>"), "1"),
        (json_call("{" * 50 + "}" * 50), "{" * 50 + "}" * 50),
        (json_call("print('π — ✓')"), "print('π — ✓')"),
        ('<tool_call>{"arguments": {"code": "1"}, "name": "code_interpreter"}</tool_call>', "1"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "\\u12 \\x41"}}</tool_call>', "\\u12 \\x41"),
        ("<interpreter>\n<code>print(0)</code>\n</interpreter>\n<code>print(1)</code>", "print(1)"),
        ("<think><code>print(0)</code></think>", "print(0)"),
    ],
)
def test_code(text, code):
    assert plugin.postprocess_predictions(text) == ("code", code)


def test_a_closing_tag_in_a_comment_is_part_of_it_between_fences_only():
    fenced = "<code>\n```python\nx = 1  # </code>"
    assert isinstance(actions.read_action(fenced).action, Incomplete)
    whole = actions.read_action(fenced + "\nprint(x)\n```\n</code>").action
    assert whole == Code("x = 1  # </code>\nprint(x)", "code")
    assert isinstance(actions.read_action(fenced, over=True).action, Code)
    assert actions.read_action("<code>x = 1  # done</code>").action == Code("x = 1  # done", "code")
    assert actions.read_action("<code>```python\nx = 1  # done```</code>").action == Code("x = 1  # done", "code")


@pytest.mark.parametrize(
    "text",
    [
        "<code>\nprint('</code>",
        "<code>\ns = '''\n</code>",
        "<code>\nprint(\"it's </code>",
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "s = \'</tool_call>',
        'Let me.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "\n</tool_call>',
    ],
)
def test_a_closing_tag_in_an_unfinished_string_leaves_the_turn_incomplete(text):
    assert isinstance(actions.read_action(text).action, Incomplete)
    assert plugin.postprocess_predictions(text) == (None, "")
    over = actions.read_action(text + "<|im_end|>").action
    assert isinstance(over, Code) or (isinstance(over, Invalid) and "not valid JSON" in over.problem)


@pytest.mark.parametrize(
    "text, words",
    [
        ("just some prose", "neither a tool call nor a final answer"),
        ("<code>\nprint(1)", "not closed with </code>"),
        ('<tool_call>\n{"name": "code_interpreter"', "not complete"),
        ("<tool_call>\nprint(1)\n</tool_call>", "not valid JSON"),
        (
            '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print("hi")"}}</tool_call>',
            "not valid JSON",
        ),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(")"}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}}</tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "not a JSON object"),
        ('<tool_call>{"name": "browse", "arguments": {}}</tool_call>', "no tool 'browse'"),
        ('<tool_call>{"arguments": {"code": "1"}}</tool_call>', "no tool 'None'"),
        ('<tool_call>{"name": {"a": 1}, "arguments": {"code": "1"}}</tool_call>', "no tool"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {}}</tool_call>', 'has no "code"'),
        ('<tool_call>{"name": "code_interpreter"}</tool_call>', 'has no "code"'),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": 5}}</tool_call>', 'has no "code"'),
        ('<tool_call>{"name": "code_interpreter", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "code_interpreter", "arguments": "print(1)"}</tool_call>', "arguments of the tool call"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": " \\n"}}</tool_call>', "empty"),
        ("<code>\n</code>", "empty"),
        ("<code>```python\n```</code>", "empty"),
        ("<tool_call>" + '{"a":' * 100_000 + "}" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": ' + "9" * 5000 + "}</tool_call>", "not valid JSON"),
    ],
)
def test_problems_are_named(text, words):
    action = actions.read_action(text, over=True).action
    assert isinstance(action, Invalid) and words in action.problem
    assert plugin.postprocess_predictions(text) == (None, "")


def test_a_users_tool(monkeypatch):
    monkeypatch.setitem(tool_registry.tools, "look_up", object())
    text = '<tool_call>{"name": "look_up", "arguments": {"word": "prime"}}</tool_call>'
    assert plugin.postprocess_predictions(text) == ("tool", {"name": "look_up", "arguments": {"word": "prime"}})
    text = '<tool_call>{"name": "look_up", "arguments": "{\\"word\\": 1}"}</tool_call>'
    assert plugin.postprocess_predictions(text) == ("tool", {"name": "look_up", "arguments": {"word": 1}})


@pytest.mark.parametrize(
    "text, kept",
    [
        ("a <code>1</code> b", "a <code>1</code>"),
        (json_call("1") + "\nthen", json_call("1")),
        (json_call("1") + "x" + json_call("2") + "y", json_call("1") + "x" + json_call("2")),
        ("```python\n1\n``` and so on", "```python\n1\n```"),
        ("Answer: \\boxed{\\frac{1}{2}} done", "Answer: \\boxed{\\frac{1}{2}}"),
        ("<answer>\n\\boxed{5}\n</answer> bye", "<answer>\n\\boxed{5}\n</answer>"),
        ("<code>1</code>\nAnswer: \\boxed{7}. Bye", "<code>1</code>\nAnswer: \\boxed{7}"),
        ("prose only", "prose only"),
        ("<code>1", "<code>1"),
    ],
)
def test_responses_are_cut_behind_the_last_action(text, kept):
    assert plugin.postprocess_responses(text) == kept


PIECES = st.sampled_from(
    [
        "<code>",
        "</code>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<interpreter>",
        "</interpreter>",
        "```",
    ]
    + ["```python\n", "Answer:", "\\boxed{", "{", "}", '"', "'", '"""', "'''", "\\", "\n", "#", " ", "x", "<|im_end|>"]
    + ['{"name": "code_interpreter", "arguments": {"code": "', "print(1)", "<answer>", "</answer>", "\0", "\ud800"]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join), st.sampled_from([None, False, True]))
def test_never_raises_and_agrees_with_itself(text, over):
    action = actions.read_action(text, over).action
    assert not isinstance(action, Invalid) or action.problem
    assert not (isinstance(action, Incomplete) and over)
    assert text.startswith(plugin.postprocess_responses(text))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.text(alphabet="ab \n", max_size=20))
def test_any_code_survives_json(code, prose):
    if actions.source(code):
        assert plugin.postprocess_predictions(prose + json_call(code)) == ("code", actions.source(code))


REPEATED = {
    "code tags": "<code>",
    "code and quotes": "<code>'",
    "code in strings": '"<code></code>" ',
    "triple quotes": "<code>'''\"\"\"",
    "escaped quotes": "\\'",
    "broken strings": "'\"\n",
    "calls": "<tool_call>",
    "call objects": "<tool_call>{",
    "calls in strings": '<tool_call>{"a":"<tool_call>",',
    "boxes": "\\boxed{",
    "answers": "Answer: \\boxed{1}",
    "labels": "Answer:\n",
    "lines": "\n",
    "made-up output": "<interpreter>",
    "fences": "```python\n",
    "thoughts": "<think></think>",
    "stars": "answer*",
    "closers": "}  ",
    "hashes": "#",
}


@pytest.mark.parametrize("start", ["", "<code>'", '<tool_call>{"a": "', "Answer:", "```python\n"])
@pytest.mark.parametrize("piece", REPEATED.values(), ids=REPEATED.keys())
def test_reading_is_linear(start, piece):
    def seconds(count):
        text = start + piece * count
        best = float("inf")
        for _ in range(3):
            begun = time.perf_counter()
            actions.read_action(text, over=False)
            actions.read_action(text, over=True)
            plugin.postprocess_responses(text)
            actions.last_box(text)
            best = min(best, time.perf_counter() - begun)
        return best

    # Eight times the text: quadratic work would take 64 times as long.
    assert seconds(8_000) < 24 * seconds(1_000) + 0.02


@pytest.mark.parametrize(
    "text, found",
    [
        ("", []),
        ("\\boxed{a}", ["a"]),
        ("\\boxed{{a}} \\boxed{ b }", ["{a}", "b"]),
        ("\\boxed{\\}} x", ["\\}"]),
        ("\\boxed{a", []),
        ("\\boxed{a \\boxed{b}", ["b"]),
        ("\\boxed{}", []),
    ],
)
def test_boxes(text, found):
    assert [box.content for box in actions.find_boxes(text)] == found
