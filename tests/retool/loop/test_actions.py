"""How a turn is read: the golden cases, their families, and that reading never raises."""

import json
from pathlib import Path

import generate_with_retool as plugin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retool import actions, reward
from retool.actions import Answer, Code, Incomplete, Invalid, ToolCall
from retool.blocks import scan
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
        ("<think>1 or 2?</think>\nSo \\boxed{2}<|im_end|>", "2"),
        ("<think>\n\n</think>\n\nAnswer: \\boxed{2}", "2"),
        ("Answer: \\boxed{2}\n<think>was that right?", "2"),
        ("So \\boxed{73}。<|im_end|>", "73"),
        ("故答案为 $\\boxed{73}$、<|im_end|>", "73"),
        ("I write `Answer: \\boxed{...}` at the end.\nAnswer: \\boxed{2}", "2"),
        ("Answer: \\boxed{2}\nI wrote Answer: \\boxed{answer} as asked.", "2"),
        ("I start <code> but no.\n# Answer: \\boxed{3}", "3"),
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
        "<think>Answer: \\boxed{1}</think>",
        "<think>still thinking. Answer: \\boxed{2}",
        "<think>so \\boxed{2}<|im_end|>",
        "<think>a</think> <think>Answer: \\boxed{2}",
        "<think>one <think>two</think>\n<think>Answer: \\boxed{2}",
        "I end with `Answer: \\boxed{...}`.",
        "I end with Answer: \\boxed{answer}<|im_end|>",
        "Answer: \\boxed{\\ldots}<|im_end|>",
        "Answer: \\boxed{\\text{your answer}}.",
        "<code>\nx = 1\n# Answer: \\boxed{5}\nprint(x",
        "<code>\nx = 1  # Answer: \\boxed{5}",
        "Let me see. <code>x = 1  # Answer: \\boxed{5}",
        "```python\n# Answer: \\boxed{5}\nprint(1",
        "```python\nx = 1 # so \\boxed{5}",
        "<tool_call>\n<function=code_interpreter>\n<parameter=code>\n# Answer: \\boxed{5}\nprint(1",
        "<function=code_interpreter>\n<parameter=code>\nAnswer: \\boxed{5}",
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
        ("Answer: \\boxed{4 <code>print(1)</code>}", "print(1)"),
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
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}}}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}} {"a": 1}</tool_call>', "not valid JSON"),
        ('<tool_call>{"function": {"arguments": {"code": "1"}}}</tool_call>', "no tool 'None'"),
        ("<tool_call>[]</tool_call>", "not a JSON object"),
        ("<function=code_interpreter>[1]</function>", "not complete"),
        ('<function=code_interpreter>{"code": "1"}', "not complete"),
        ('<function=code_interpreter>{"code": "1', "not complete"),
        ('<function=code_interpreter>{"code" "1"}</function>', "not valid JSON"),
        ('<function=code_interpreter>{"source": "1"}</function>', 'has no "code"'),
        ('<function=>{"code": "1"}</function>', "no tool"),
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


def json_of(code):
    return json.dumps({"code": code})


OTHER_FORMS = {
    "parameters": '<tool_call>\n{{"name": "code_interpreter", "parameters": {0}}}\n</tool_call>',
    "OpenAI's function": '<tool_call>{{"type": "function", "function": {{"name": "code_interpreter", "arguments": {0}}}}}</tool_call>',
    "OpenAI's arguments": '<tool_call>{{"id": "1", "function": {{"name": "code_interpreter", "arguments": {1}}}}}</tool_call>',
    "a list": '<tool_call>[{{"name": "code_interpreter", "arguments": {0}}}]</tool_call>',
    "JSON in <function=": "<function=code_interpreter>{0}</function>",
    "JSON on lines in <function=": "<function=code_interpreter>\n{0}\n</function>",
    "<function= in <tool_call>": "<tool_call>\n<function=code_interpreter>\n{0}\n</function>\n</tool_call>",
    "a surplus brace": '<tool_call>\n{{"name": "code_interpreter", "arguments": {0}}}}}\n</tool_call>',
    "a missing brace": '<tool_call>\n{{"name": "code_interpreter", "arguments": {0}\n</tool_call>',
    "a fence": '<tool_call>\n```json\n{{"name": "code_interpreter", "arguments": {0}}}\n```\n</tool_call>',
    "a bare fence": '<tool_call>```\n{{"name": "code_interpreter", "arguments": {0}}}\n```</tool_call>',
}


@pytest.mark.parametrize(
    "code", ["print(1)", "s = '}</tool_call></function>{'\nprint(s)", 'print(f"{{1}} \\d `x`")', "```python\n1\n```"]
)
@pytest.mark.parametrize("form", OTHER_FORMS.values(), ids=OTHER_FORMS.keys())
def test_calls_as_other_models_write_them(form, code):
    text = form.format(json_of(code), json.dumps(json_of(code)))
    program = Code(actions.source(code), "tool_call")
    assert actions.read_action(text).action == actions.read_action(f"So:\n{text}<|im_end|>").action == program
    assert plugin.postprocess_responses(text + " and so on") == text


def test_python_in_a_fence_in_a_call_is_its_code():
    for fence in ("```python\nprint(1)\n```", "```py\n\nprint(1)\n```\n", "```\nprint(1)\n```"):
        assert actions.read_action(f"<tool_call>\n{fence}\n</tool_call>").action == Code("print(1)", "tool_call")


@pytest.mark.parametrize("quotes", ["'''", '"""', 'r"""'])
def test_a_fence_in_a_docstring_closes_nothing(quotes):
    code = f"def f():\n    {quotes}Example:\n    ```\n    f()  # it's 1\n    ```\n    {quotes[-3:]}\n    return 1  # `f`\n\nprint(f())"
    for text in (f"```python\n{code}\n```", f"<code>\n```python\n{code}\n```\n</code>"):
        assert actions.read_action(f"So:\n{text}\nlet me see", over=True).action == Code(code, "code")
    broken = f"x = {quotes} no end"
    assert actions.read_action(f"```python\n{broken}\n```\nSo.", over=True).action == Code(broken, "code")


# Tags that no call opens or closes -----------------------------------------------------------------------------------

MENTIONS = [
    "The format is <tool_call></tool_call>",
    'The format is <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "I write <tool_call>{...}</tool_call>",
    "I open with <tool_call> and close with </tool_call>",
    "Calls stand between `<tool_call>` and `</tool_call>",
    "I could use <code></code>",
    "Code goes between '<code>' and '</code>",
    "Code stands in `<code>`...`</code>",
    "As I said, no </code>",
    "There is no </tool_call>",
    "In HTML there is no </function>",
    "It ends in </function>",
]


@pytest.mark.parametrize("text", MENTIONS)
def test_a_tag_that_a_sentence_speaks_of_ends_no_turn(text):
    assert isinstance(actions.read_action(text).action, Incomplete)
    assert isinstance(actions.read_action(text, over=True).action, Invalid)
    assert actions.read_action(text + "` tags.\n" + json_call("1")).action == Code("1", "tool_call")
    assert actions.read_action(text + "` tags. So it is \\boxed{7}, then.<|im_end|>").action == Answer("7")


@pytest.mark.parametrize(
    "draft", [json_call("0"), "<function=code_interpreter><parameter=code>0</parameter></function>"]
)
def test_a_call_that_is_drafted_in_a_thought_is_not_run(draft):
    for said, told in (("<think>\nI could write " + draft, False), ("So " + draft, True)):
        assert isinstance(actions.read_action(said, in_thought=told).action, Incomplete)
        problem = actions.read_action(said, over=True, in_thought=told).action.problem
        assert "inside a thought" in problem and "</think>" in problem
        later = said + "\n</think>\n"
        assert actions.read_action(later + json_call("1"), in_thought=told).action == Code("1", "tool_call")
        assert actions.read_action(later + "It is \\boxed{2}, so.<|im_end|>", in_thought=told).action == Answer("2")
        assert actions.read_action(later + "<code>3</code>", in_thought=told).action == Code("3", "code")
    assert actions.read_action(f"a {draft} b</think> " + json_call("1")).action == Code(
        "1", "tool_call"
    )  # opened before
    assert actions.read_action("I use no `<think>` here. " + draft).action == Code("0", "tool_call")


def xml_call(code, name="code_interpreter", key="code"):
    return f"<tool_call>\n<function={name}>\n<parameter={key}>\n{code}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "import math\n\nfor i in range(2):\n    print(math.sqrt(i) < 2)",
        "s = '</parameter>'\nprint(s)",
        "s = '</parameter></function>'\nprint(s)",
        's = """\n</parameter>\n</function>\n</tool_call>\n"""\nprint(s)',
        "s = '<parameter=x>' + \"<function=y>\"",
        "print('{\"a\": 1}')",
        "print('broken)",
        "# don't\nprint(1)",
        "print('\\\\boxed{5}')  # Answer: \\boxed{5}",
        "if x:\n    print('<tool_call>')",
    ],
)
def test_xml_calls(code, wrapped):
    text = xml_call(code)
    text = text if wrapped else text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for before, end in (("", ""), ("Let me compute.\n\n", "<|im_end|>"), ("<think>\nhm </think>", "\n")):
        assert actions.read_action(before + text + end).action == Code(code, "tool_call"), (before, end)
    assert plugin.postprocess_responses(text + " and so on") == text


def test_an_xml_call_around_a_fence_is_its_code():
    assert plugin.postprocess_predictions(xml_call("```python\nprint(1)\n```")) == ("code", "print(1)")


def test_xml_calls_of_any_tool():
    properties = {"word": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}, "odd": {}}
    tools = {
        "look_up": {"type": "function", "function": {"name": "look_up", "parameters": {"properties": properties}}}
    }
    text = (
        "<tool_call>\n<function=look_up>\n<parameter=word>\n12\n</parameter>\n<parameter=count>\n20\n</parameter>\n"
        '<parameter=deep>\n{"a": [1]}\n</parameter>\n<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>'
    )
    arguments = {"word": "12", "count": 20, "deep": {"a": [1]}, "other": "7"}
    assert actions.read_action(text, tools=tools).action == ToolCall("look_up", arguments)
    text = "<function=look_up><parameter=count>many</parameter></function>"
    assert actions.read_action(text, tools=tools).action == ToolCall("look_up", {"count": "many"})
    assert actions.read_action("<function=look_up>\n</function>", tools=tools).action == ToolCall("look_up", {})
    assert actions.read_action("<function=look_up></function>", tools=["look_up"]).action == ToolCall("look_up", {})
    odd = {"look_up": object(), "other": {"function": {"parameters": None}}}
    for name in odd:
        assert actions.read_action(f"<function={name}></function>", tools=odd).action == ToolCall(name, {})


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint(1)\n</parameter>\n</function>",
        "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint('</tool_call>",
        "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint('</function>",
        "<function=code_interpreter>\n<parameter=code>\nprint('</code>",
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "s = \'</function>',
        "<code>\ns = '</function>",
        "```python\ns = '</function>",
        "In HTML there is no </function>",
    ],
)
def test_a_stop_tag_that_closes_no_call_leaves_the_turn_incomplete(text):
    assert any(text.endswith(stop) for stop in plugin.CODE_STOPS)
    assert isinstance(actions.read_action(text).action, Incomplete)
    assert not isinstance(actions.read_action(text, over=True).action, Incomplete)


def test_a_wrapped_xml_call_whose_turn_ended_is_whole():
    text = xml_call("print(1)").removesuffix("\n</tool_call>") + "<|im_end|>"
    assert actions.read_action(text).action == Code("print(1)", "tool_call")


@pytest.mark.parametrize(
    "text, words",
    [
        (xml_call("1", name="browse"), "no tool 'browse'"),
        (xml_call("1", key="source"), 'has no "code"'),
        (xml_call("\n"), "empty"),
        ("<function=code_interpreter>\n</function>", 'has no "code"'),
        ("<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint(1)", "not complete"),
        ("<function=code_interpreter>\n<parameter=code>\nprint(1)", "not complete"),
        ("<function=code_interpreter>\n<parameter=code>\nprint(1)\n</function>", "</parameter>"),
        ("<tool_call>\n<function=code_interpreter>\nprint(1)\n</function>\n</tool_call>", "not complete"),
        ("<tool_call>\n<function=code_interpreter>\nprint(1)\n</tool_call>", "not complete"),
    ],
)
def test_problems_of_xml_calls_are_named(text, words):
    action = actions.read_action(text, over=True).action
    assert isinstance(action, Invalid) and words in action.problem
    assert isinstance(actions.read_action(text + "<|im_end|>").action, Invalid)


def test_prose_may_speak_of_xml_calls():
    assert actions.read_action("Use <function=name> tags. Answer: \\boxed{3}").action == Answer("3")
    assert actions.read_action("Use <function=f> as in " + xml_call("1")).action == Code("1", "tool_call")
    again = "<tool_call>\n<function=code_interpreter>\nno: " + xml_call("1")
    assert actions.read_action(again).action == Code("1", "tool_call")


def test_a_box_in_a_thought_does_not_end_the_episode():
    """Else the call that checks it would never run."""
    thought = "Perhaps. Answer: \\boxed{4}? Let me check.\n<code>print(4)</code>"
    assert actions.read_action("<think>" + thought).action == Code("print(4)", "code")
    assert actions.read_action(thought, in_thought=True).action == Code("print(4)", "code")
    assert actions.read_action("a</think>\nAnswer: \\boxed{4}", in_thought=True).action == Answer("4")
    assert isinstance(actions.read_action("Answer: \\boxed{4}<|im_end|>", in_thought=True).action, Invalid)
    assert isinstance(actions.read_action("<think>Answer: \\boxed{4}<|im_end|>", in_thought=True).action, Invalid)


def test_where_a_thought_stands():
    def flags(text, in_thought=False):
        found = scan(text, over=True, in_thought=in_thought)
        return found.in_thought, found.ends_thought

    assert flags("x") == (False, False) and flags("x", True) == (True, False)
    assert flags("<think>x") == (True, False) and flags("<think>x</think>") == (False, False)
    assert flags("x</think>") == (False, True) and flags("x</think>", True) == (False, True)
    assert flags("x</think>y<think>z", True) == (True, True)


@pytest.mark.parametrize(
    "text, kept",
    [
        ("a <code>1</code> b", "a <code>1</code>"),
        (json_call("1") + "\nthen", json_call("1")),
        (json_call("1") + "x" + json_call("2") + "y", json_call("1") + "x" + json_call("2")),
        ("```python\n1\n``` and so on", "```python\n1\n```"),
        ("```python\n1\n```junk", "```python\n1\n```"),
        ("```python\n1\n```junk\n```python\n2", "```python\n1\n```"),
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
    + ["<function=code_interpreter>", "<parameter=code>", "</parameter>", "</function>"]
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


@pytest.mark.parametrize(
    "text, found",
    [
        ("", []),
        ("\\boxed{a}", ["a"]),
        ("\\boxed{{a}} \\boxed{ b }", ["{a}", "b"]),
        ("\\boxed{\\}} x", ["\\}"]),
        ("\\boxed 2 \\fbox{3} \\boxed-7 \\boxed{\n4\n}", ["2", "3", "-7", "4"]),
        ("the \\boxed command, a \\boxedarrow, \\boxed{...}", []),
        ("\\boxed{b} \\boxed{a", ["b", ""]),
        ("\\boxed{a \\boxed{b}", ["", "b"]),
        ("\\boxed{b} \\boxed{}", ["b", ""]),
        ("\\boxed{b} \\boxed ", ["b", ""]),
    ],
)
def test_boxes(text, found):
    assert [box.content for box in actions.find_boxes(text)] == found
    assert actions.last_box(text) == (found or [""])[-1]


# An answer --------------------------------------------------------------------------------------------------------

LAST_SENTENCES = [
    "The area is $\\boxed{42}$ square units.",
    "There are \\boxed{42} such pairs.",
    "Hence $x = \\boxed{42}$ is the only solution.",
    "\\boxed{42}\n\nThis matches the direct count, so we are done.",
    "Therefore, the remainder is **\\boxed{42}** when divided by 100.",
    "\\[\\boxed{42}\\]\nLet me know if you would like the details!",
    "So \\boxed{42}? Let me check that.",
    "Perhaps \\boxed{41}. No: \\boxed{42}, by the same argument.",
    "### Final Answer\nThe answer is: $$\\boxed{42}$$ (in lowest terms).",
    "<think>\\boxed{7}?</think>\n\nThere are \\boxed{42} ways.",
    "The sum equals \\fbox{42} as claimed",
    "It is $\\boxed 42$ by symmetry.",
    "<think>a draft:\n```python\nprint(7)\n```\n</think>\nThe answer is \\boxed{42} again.",
]


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>\n", "<｜end▁of▁sentence｜>", "<|eot_id|>"])
@pytest.mark.parametrize("text", LAST_SENTENCES)
def test_a_turn_that_ended_by_itself_without_a_call_answers_with_its_last_box(text, end):
    assert plugin.postprocess_predictions(text + end) == ("answer", "42")
    assert actions.read_action(text, over=True).action == Answer("42")
    assert reward.prediction(text + end, cut=True) == reward.prediction(text) == "42"
    for call in ("\n<code>print(1)</code>", "\n" + json_call("print(1)"), "\n```python\nprint(1)\n```\nLet me see."):
        said = text.replace("Answer\n", "\n") + call
        assert actions.read_action(said).action.source == actions.read_action(said + end).action.source == "print(1)"
        assert reward.prediction(said, cut=True) == ""


@pytest.mark.parametrize("end", ["", "<|im_end|>", " Let me think again."])
@pytest.mark.parametrize(
    "last, pred",
    [
        ("Answer: \\boxed{4", ""),
        ("Answer: \\boxed{", ""),
        ("Answer: \\boxed{}", ""),
        ("So \\boxed{4", ""),
        ("So \\boxed{ }", ""),
        ("Answer: \\boxed{\\frac{4}{2}", ""),
        ("<answer>\\boxed{4</answer>", ""),
        ("Answer: \\boxed{41}", "41"),
        ("I was to write Answer: \\boxed{...}", "42"),
    ],
)
def test_the_last_answer_counts_and_a_broken_one_is_none(last, pred, end):
    for between in ("\nWait, that double counts.\n", ". Wait, that is wrong. "):
        text = f"Answer: \\boxed{{42}}{between}{last}{end}"
        assert plugin.postprocess_predictions(text) == (("answer", pred) if pred else (None, "")), text
        assert reward.prediction(text, cut=True) == reward.prediction(text) == pred


def test_an_unlabeled_box_takes_the_place_of_the_answer_before_it():
    text = "Answer: \\boxed{42}.\nWait, that is wrong. So it is \\boxed{41}. Hmm"
    assert plugin.postprocess_predictions(text) == (None, "") and reward.prediction(text, cut=True) == ""
    assert plugin.postprocess_predictions(text + "<|im_end|>") == ("answer", "41") and reward.prediction(text) == "41"
    assert plugin.postprocess_predictions(text + "\n<code>1</code>") == ("code", "1")


CALLS = ["<code>\nprint(1)\n</code>", json_call("print(1)"), "```python\nprint(1)\n```"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "content",
    ["value", "result", "final_answer", "final\\_answer", "X", "n", "integer", "m+n", "?", "\\_\\_\\_", "___"]
    + ["the answer", "your final answer", "\\text{answer here}", "x_1", "a_{10}", "m+n+p", "\\square", "(value)"],
)
def test_a_placeholder_does_not_end_the_episode_before_a_call(content, call):
    text = f"I will end with Answer: \\boxed{{{content}}}.\n{call}"
    assert actions.read_action(text).action.source == actions.read_action(text, over=True).action.source == "print(1)"
    assert reward.prediction(text + "<|im_end|>") == ""
    unfinished = f"I will end with Answer: \\boxed{{{content}}}.\n<code>print('</code>"
    assert isinstance(actions.read_action(unfinished).action, Incomplete)
    spoken_of = f"I will write Answer: \\boxed{{{content}}}, without </code>"
    assert isinstance(actions.read_action(spoken_of).action, Incomplete)
    assert isinstance(actions.read_action("Answer: \\boxed{5} without </code>").action, Answer)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "content",
    ["5", "-\\frac{1}{2}", "\\pi", "π", "A", "(B)", "\\text{C}", "\\text{Yes}", "false", "\\infty", "\\emptyset"]
    + ["No solution", "3n", "2\\sqrt{x}", "(1, 2)", "\\text{12 cm}"],
)
def test_a_value_ends_it(content, call):
    assert actions.read_action(f"Answer: \\boxed{{{content}}}\n{call}").action == Answer(content)


@pytest.mark.parametrize("content", ["m+n", "X", "x^2+x", "\\sqrt{n}"])
def test_without_a_call_a_box_of_letters_is_an_answer(content):
    assert actions.read_action(f"Answer: \\boxed{{{content}}}").action == Answer(content)
