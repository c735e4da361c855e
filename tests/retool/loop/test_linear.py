"""Nothing that reads what a model wrote blocks the loop: time grows with the text, whatever is repeated in it.

The clock is the thread's own, so a busy machine changes little.
"""

import asyncio
import gc
import time

import generate_with_retool as plugin
import pytest
from retool import actions, chat

from vime.utils.types import Sample

SHORT, LONG = 20_000, 80_000  # characters; the longer one is a response of some 20k tokens
PIECES = {
    "words": "word ",
    "digits": "123456789",
    "user turns": "<|im_start|>user\n",
    "user turns on lines": "\n<|im_start|>user\n",
    "turns": "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n",
    "interpreters": "\n\n<interpreter>\n",
    "interpreter outputs": "\n\n<interpreter>\nx\n</interpreter>\n\n",
    "responses": "<tool_response>",
    "code": "<code>",
    "code and comments": "<code>\n```\n# ",
    "code that ends": "<code>1</code>",
    "code in strings": '"<code></code>" ',
    "code and quotes": "<code>'",
    "triple quotes": "<code>'''\"\"\"",
    "broken strings": "'\"\n",
    "escaped quotes": "\\'",
    "calls": "<tool_call>",
    "empty calls": "<tool_call>{}",
    "call objects": "<tool_call>{",
    "calls and names": '<tool_call>{"name": <tool_call>',
    "calls in strings": '<tool_call>{"a":"<tool_call>",',
    "call quotes": '<tool_call>{"',
    "objects and space": "}  ",
    "XML calls": "<function=f>",
    "XML parameters": "<function=f><parameter=p>",
    "XML values": "<function=f><parameter=p></parameter><parameter=p>",
    "XML values in strings": "<function=f><parameter=p>'</parameter><parameter=",
    "XML calls that end": "<function=f></function>",
    "XML calls of JSON": '<function=f>{"a": {}',
    "XML calls of JSON that end": "<function=f>{}</function>",
    "calls in fences": "<tool_call>```json\n{",
    "wrapped XML calls": "<tool_call><function=f><parameter=p>",
    "fences": "```python\n",
    "fences with words": "```python\n1\n```junk\n",
    "fences with fences in strings": "```python\n'''\n```\n'''\n",
    "backticks": "`",
    "quoted tags": "`<code>`",
    "mentions": "x <code></code> <tool_call></tool_call> ",
    "thoughts": "<think></think>",
    "open thoughts": "<think>",
    "closed thoughts": "</think>",
    "drafts": "<think><tool_call>{}</tool_call></think>",
    "open boxes": "\\boxed{",
    "boxes": "\\boxed{1} ",
    "boxes without braces": "\\boxed 2 \\boxed ",
    "placeholders": "\\boxed{value} \\fbox{",
    "dollars and spaces": "$ ",
    "answers": "Answer: \\boxed{1}",
    "labels": "Answer:\n",
    "answer tags": "<answer>",
    "stars": "answer*",
    "dots": ".",
    "dollars": "$x",
    "braces": "{",
    "spaces": " ",
    "lines": "\n",
    "hashes": "#",
    "backslashes": "\\",
}
# What the piece is repeated in. The last one holds boxes around code, none of which is one.
FRAMES = {
    "alone": "{}",
    "box": "Answer: \\boxed{{{}}}",
    "code": "<code>\n```python\nx{}\n```\n</code>",
    "string": "<code>'{}",
    "call": '<tool_call>{{"name": "code_interpreter", "arguments": {{"code": "{}"}}}}</tool_call>',
    "XML call": "<function=code_interpreter><parameter=code>{}</parameter></function>",
    "fence": "```python\n{}",
    "thought": "<think>{}",
    "ends in a tag": "{}\n<code><tool_call><function=",
}


def framed(frame, piece, chars):
    return FRAMES[frame].format((piece * (chars // len(piece) + 1))[:chars])


def work_of(text):
    sample = Sample(prompt="", response=text, label="42", status=Sample.Status.TRUNCATED)
    return {
        "reader": lambda: actions.read_action(text, over=False),
        "frames": lambda: chat.split_observations(text),
        "reward": lambda: asyncio.run(plugin.reward_func(None, sample)),
    }


def seconds(work, least=0.001):
    """Of one run; of so many in a row that together they take long enough to be measured."""
    runs = 1
    gc.disable()  # what a collection costs is up to the objects of all tests before this one
    try:
        while True:
            begun = time.thread_time()
            for _ in range(runs):
                work()
            taken = time.thread_time() - begun
            if taken > least:
                return taken / runs
            runs *= 4
    finally:
        gc.enable()


def assert_linear(short, long):
    """`long` has four times as much to do: quadratic work takes 16 times as long. A pause of the machine is no
    verdict."""
    ratios = []
    while len(ratios) < 4 and not any(ratio < 7 for ratio in ratios):
        ratios.append(seconds(long) / seconds(short))
    assert min(ratios) < 7, ratios


def yardstick():
    """What a machine like the one that 50 ms were asked of does in about 5 ms."""
    counts = {}
    for character in framed("alone", "word ", LONG):
        counts[character] = counts.get(character, 0) + 1


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
def test_four_times_the_text_takes_less_than_eight_times_as_long(frame, piece):
    """Quadratic work would take sixteen times as long: at these sizes no more of it than 2 ms goes unseen. A reward
    takes under 50 ms where that was measured, which is ten times the loop over the text; a busy machine is given twice
    that.
    """
    short, long = (work_of(framed(frame, piece, chars)) for chars in (SHORT, LONG))
    for name in long:
        for _ in range(4):  # a pause of the machine is no verdict
            few, many = seconds(short[name]), seconds(long[name])
            bound = 8 * few + 0.002
            if name == "reward":
                bound = min(bound, 20 * seconds(yardstick))
            if many < bound:
                break
        assert many < bound, (name, few, many)


def test_many_turns_are_read_once():
    def response(turns):
        return ("x = \\boxed{1} so <code>1</code>\n\n<interpreter>\n1\n</interpreter>\n\n") * turns

    assert_linear(*(work_of(response(turns))["reward"] for turns in (250, 1000)))
