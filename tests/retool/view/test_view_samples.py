"""What the page shows of a sample: its segments, calls and tokens, whatever version wrote it."""

import base64
import hashlib
import json
import math
import random
import re
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import view_rollouts
from retool import chat
from view.load import Rollout
from view.page import PARTS, Page, _hundredths, _json, _policy, _script
from view.samples import KINDS, Rule, advantages, read
from view.tokens import Vocabulary
from view_helpers import BARE, INLINE, QUESTION, TOOL, byte_tokenizer, call_record, raw, save

UNREADABLE = "Your previous action is invalid: no closing tag."


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return Vocabulary(byte_tokenizer(tmp_path_factory.mktemp("model")))


def shown(sample, vocabulary=None):
    gaps = Counter()
    return read(sample, vocabulary, gaps), gaps


PARTS_OF_ALL_KINDS = [
    ("think <tool_call>{}</tool_call>", 1),
    (TOOL.before + "Output:\n1" + TOOL.after, 0),
    ("oops" + chat.IM_END, 1),
    (BARE.before + UNREADABLE + BARE.after, 0),
    ("<code>2</code>", 1),
    (INLINE.before + "2" + INLINE.after, 0),
    ("by an older policy", 0),
    (INLINE.before + "made up" + INLINE.after, 1),
    ("end", 1),
]


def test_segments_with_tokens(vocabulary):
    sample, gaps = shown(raw(PARTS_OF_ALL_KINDS, calls=[call_record("ok"), call_record("timeout")]), vocabulary)
    assert [(segment.kind, segment.call) for segment in sample.segments] == [
        ("model", None),
        ("observation", 0),
        ("model", None),
        ("observation", None),
        ("model", None),
        ("observation", 1),
        ("masked", None),
        ("hallucinated", None),
        ("model", None),
    ]
    assert [segment.text for segment in sample.segments] == [text for text, _ in PARTS_OF_ALL_KINDS]
    assert sample.outcomes == ["ok", "unreadable", "timeout"]
    assert not gaps and set(KINDS) == {segment.kind for segment in sample.segments}


PROGRAMS = {
    "a closing tag in a string": ("<code>\ns = '</code>'\nprint(s)\n</code>", [("ran", "s = '</code>'\nprint(s)")]),
    "a closing tag in JSON": (
        'so <tool_call>\n{"name": "code_interpreter", "arguments": {"code": "s = \'</tool_call>\'"}}\n</tool_call>',
        [("prose", "so "), ("ran", "s = '</tool_call>'")],
    ),
    "Qwen3-Coder's form": (
        "<function=code_interpreter>\n<parameter=code>\nprint(1)\n</parameter>\n</function>",
        [("ran", "print(1)")],
    ),
    "the first of two": ("<code>1</code> and <code>2</code>", [("ran", "1"), ("prose", " and "), ("program", "2")]),
    "code beside an answer": (
        "```py\n1\n```\n\\boxed{1}" + chat.IM_END,
        [("program", "1"), ("prose", "\n\\boxed{1}" + chat.IM_END)],
    ),
    "another tool": (
        '<tool_call>{"name": "search", "arguments": {"q": "π"}}</tool_call>',
        [("ran", 'search {\n  "q": "π"\n}')],
    ),
    "what cannot be read": ("<tool_call>{</tool_call>", [("program", "<tool_call>{</tool_call>")]),
    "what is not closed": ("<code>print(1)", [("prose", "<code>print(1)")]),
    "a frame in a string": (
        f"<code>\ns = '''{INLINE.before}x{INLINE.after}'''\n</code>",
        [("ran", f"s = '''{INLINE.before}x{INLINE.after}'''")],
    ),
}


@pytest.mark.parametrize("text, parts", PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_is_the_one_that_ran(text, parts, vocabulary):
    sample, _ = shown(raw([(text, 1)], calls=[call_record() | {"kind": "search"}]), vocabulary)
    [segment] = sample.segments
    assert segment.text == text and [part for part in segment.parts if part.text] == parts


def test_a_thought_that_the_prompt_opened_is_read_as_the_loop_reads_it():
    from retool.actions import Code, read_action

    text = "<code>1</code>\n</think>\n```py\n2\n```"
    [segment] = shown(raw([(text, 1)], payload_text="<think>\n" + text))[0].segments
    ran = [part.text for part in segment.parts if part.kind == "ran"]
    assert [Code(one, "code") for one in ran] == [read_action(text, in_thought=True).action]


def test_segments_without_a_tokenizer():
    sample, _ = shown(raw(PARTS_OF_ALL_KINDS[:4], calls=[call_record("error")]))
    assert [segment.kind for segment in sample.segments] == ["model", "observation", "model", "observation"]
    assert sample.pieces is None and sample.outcomes == ["error", "unreadable"]


def test_an_observation_of_which_only_the_frame_had_room_is_no_calls():
    sample, _ = shown(raw([("x" + chat.IM_END, 1), (BARE.before + BARE.after, 0), ("y", 1)]))
    assert sample.outcomes == ["unreadable"]


def test_a_call_that_was_cut_off_is_still_counted():
    sample, _ = shown(raw([("<code>1</code>", 1)], calls=[call_record("ok")], end="abort"))
    assert sample.outcomes == ["ok"]


def test_the_observations_body_and_tag():
    text = "".join(text for text, _ in PARTS_OF_ALL_KINDS[:6])
    found = chat.find_observations(text)
    assert [(o.tag, o.body) for o in found] == [
        ("tool_response", "Output:\n1"),
        ("", UNREADABLE),
        ("interpreter", "2"),
    ]
    observations = [text for text, mask in PARTS_OF_ALL_KINDS[:6] if not mask]
    observations[1] = chat.IM_END + observations[1]  # as text, the end of the turn before it is the frame's
    assert [text[o.start : o.end] for o in found] == observations


NOTHING = {"response": "hello"}
WRONG = {name: object() for name in raw()} | {"response": "hello"}
OF_ANOTHER_VERSION = {
    "nothing": NOTHING,
    "wrong types": WRONG,
    "no mask": raw(loss_mask=None),
    "a short mask": raw(loss_mask=[1]),
    "a mask of text": raw(loss_mask=["1"]),
    "more response than tokens": raw(response_length=10**6),
    "a negative length": raw(response_length=-1),
    "a reward of nothing": raw(reward=None),
    "a reward of NaN": raw(reward=float("nan")),
    "a dict of other things": raw(reward={"other": 1}),
    "metadata of nothing": raw(metadata=None),
    "calls of another kind": raw(metadata={"retool": {"calls": ["x", {"seconds": "long"}, {}]}}),
    "calls that are none": raw(metadata={"retool": {"calls": {"a": 1}, "turns": "3"}}),
    "a prompt of messages": raw(prompt=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}, None, 3]),
    "token ids that there are none of": raw(tokens=[10**9, -5, 7], response_length=2, loss_mask=[1, 1]),
    "log-probs of NaN": raw(rollout_log_probs=[float("nan")] * raw()["response_length"]),
    "a list of bool as index": raw(index=True, group_index=[1]),
}


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("sample", OF_ANOTHER_VERSION.values(), ids=OF_ANOTHER_VERSION)
def test_another_versions_fields_are_shown_as_far_as_they_go(sample, with_tokens, vocabulary):
    page = Page(vocabulary if with_tokens else None)
    notes = page.add(Rollout("old.pt", None, False, [sample, raw()], []))
    assert page.samples == 2
    assert all(re.fullmatch(r"old\.pt: 1 of 2 samples have no usable [a-z_ ]+", note) for note in notes)


def test_what_is_missing_is_said():
    notes = Page().add(Rollout("old.pt", None, False, [NOTHING], []))
    fields = ["loss_mask", "rollout_log_probs", "tokens", "metadata of the plugin", "reward"]
    assert notes == [f"old.pt: 1 of 1 samples have no usable {field}" for field in fields]


@pytest.mark.parametrize(
    "prompt, preview",
    [
        (QUESTION, QUESTION),
        (
            [
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "b"},
            ],
            "b",
        ),
        (
            f"{chat.IM_START}system\nS{chat.IM_END}\n{chat.IM_START}user\nlast  one{chat.IM_END}\n{chat.OPEN_TURN}",
            "last one",
        ),
        ([], ""),
    ],
)
def test_the_problem_is_the_last_user_turn(prompt, preview):
    assert shown(raw(prompt=prompt))[0].problem == preview


def test_prompts(vocabulary):
    rendered = f"{chat.IM_START}user\n{QUESTION}{chat.IM_END}\n{chat.OPEN_TURN}"
    assert shown(raw(), vocabulary)[0].prompt == rendered  # from the tokens
    assert shown(raw(payload_text="PROMPT" + raw()["response"]))[0].prompt == "PROMPT"
    assert shown(raw())[0].prompt == QUESTION


def scored(score, **changes):
    reward = {"score": score, "acc": score > 0, "pred": ""}
    return shown(raw(**{"reward": reward, **changes}))[0]


def test_advantages_are_grpos():
    samples = [scored(score, group_index=group) for score, group in [(1, 0), (-1, 0), (1, 0), (1, 1), (1, 1)]]
    assert advantages(samples) == [pytest.approx(x, abs=1e-5) for x in (0.57735, -1.1547, 0.57735, 0, 0)]


def test_a_group_that_is_all_wrong_has_no_advantages():
    assert advantages([scored(-1.0), scored(-0.9)]) == [0.0, 0.0]
    without_accuracy = [scored(0, reward=-1.0), scored(0, reward=-0.9)]
    assert advantages(without_accuracy) == [pytest.approx(-0.7071, abs=1e-3), pytest.approx(0.7071, abs=1e-3)]


@pytest.mark.parametrize(
    "lost", [{"remove_sample": True}, {"status": "aborted"}, {"loss_mask": [0] * raw()["response_length"]}]
)
def test_a_lost_sample_changes_nobodys_advantage(lost):
    whole = [scored(score) for score in (1, -1, -1)]
    assert advantages([*whole, scored(0, **lost)]) == [*advantages(whole), 0.0]


def test_without_a_score_or_a_group_there_is_no_advantage():
    assert advantages([scored(0, reward=None), scored(1, group_index=None)]) == [None, None]


RULES = [
    Rule(),
    Rule(advantage_spread="score"),
    Rule(grpo_std_normalization=False),
    Rule(rewards_normalization=False),
    Rule(advantage_estimator="reinforce_plus_plus_baseline"),
    Rule(advantage_estimator="ppo"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_advantages_are_those_that_are_trained_on(rule):
    """Over random groups, by the function that the plugin gives to vime."""
    from retool.advantages import normalize

    from vime.utils.types import Sample

    rng = random.Random(0)
    length = raw()["response_length"]
    args = SimpleNamespace(**rule._asdict(), n_samples_per_prompt=4, reward_key="score")
    for _ in range(50):
        raws = []
        for index in range(12):
            score = rng.choice([1.0, -1.0, -0.95, -0.6])
            change = rng.choice(
                [{}, {}, {}, {"remove_sample": True}, {"status": "aborted"}, {"loss_mask": [0] * length}]
            )
            reward = {"score": score, "acc": score > 0, "pred": ""}
            raws.append(raw(index=index, group_index=index // 4, reward=reward, **change))
        samples = [Sample(**{name: value for name, value in one.items() if name != "status"}) for one in raws]
        for sample, one in zip(samples, raws, strict=True):
            sample.status = Sample.Status(one["status"])
        _, expected = normalize(args, samples, rule.advantage_spread)
        assert advantages([shown(one)[0] for one in raws], rule) == pytest.approx(expected)


def test_the_rule_is_named_as_the_run_named_it(tmp_path):
    scores = [-1.0, -0.9, -0.8, -0.7]
    samples = [raw(index=n, reward={"score": one, "acc": False, "pred": ""}) for n, one in enumerate(scores)]
    file = save(tmp_path / "a.pt", samples)
    for flags, expected in (
        ([], [0, 0, 0, 0]),
        (["--advantage-spread", "score"], [-1.161886, -0.387295, 0.387295, 1.161886]),
        (["--advantage-spread", "score", "--disable-grpo-std-normalization"], [-0.15, -0.05, 0.05, 0.15]),
    ):
        assert view_rollouts.main([str(file), *flags]) == 0
        index = re.search(r'id="index">(.*?)</script>', (tmp_path / "a.html").read_text())[1]
        assert json.loads(index)["samples"]["advantage"] == pytest.approx(expected, abs=1e-5)


def test_the_page_has_a_letter_for_every_outcome():
    from retool.metrics import OUTCOMES

    letters = re.search(r"const LETTERS = \{(.*?)\};", (PARTS / "page.js").read_text(), re.S)
    assert letters and {*OUTCOMES, "unreadable", "other"} <= set(re.findall(r"(\w+): ", letters[1]))


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "naïve 三 🎉 ∑", "tab\tline\n", "", "\x00\x7f"])
def test_pieces_are_the_text(vocabulary, text):
    assert "".join(vocabulary.pieces(list(text.encode()))) == text


def test_bytes_that_are_no_text_become_replacement_characters(vocabulary):
    for broken in (b"\xff", b"a\xe4\xb8", b"\xe4\xb8a", b"\x80\x80"):
        pieces = vocabulary.pieces(list(broken))
        assert len(pieces) == len(broken) and "".join(pieces) == broken.decode("utf-8", "replace")


def test_pieces_of_the_real_tokenizer(qwen3_tokenizer):
    import os

    vocabulary = Vocabulary(Path(os.environ["RETOOL_QWEN3_TOKENIZER"]))
    text = f"{chat.IM_START}user\nSum 三十 of 🎉🎉 \\boxed{{x}}  \n\n<tool_call>{chat.IM_END}\n é\u0301"
    ids = qwen3_tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = vocabulary.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == qwen3_tokenizer.decode(ids)


def test_pieces_of_a_tokenizer_of_another_kind(tmp_path):
    """SentencePiece's, with its leading spaces and single bytes."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "<0xE4>": 3, "<0xB8>": 4, "<0x89>": 5}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary(tmp_path).pieces([0, 1, 2, 3, 4, 5]) == [" the", " cat", "s", "", "", "三"]


# --- the page's format -----------------------------------------------------------------------------------------------


def chunks(page: Path, letter: str):
    found = re.findall(rf'<script type="text/plain" id="{letter}\d+">([^<]*)</script>', page.read_text())
    return [json.loads(zlib.decompress(base64.b64decode(chunk), -zlib.MAX_WBITS)) for chunk in found]


def test_a_sample_is_whole_in_the_page(tmp_path, vocabulary):
    page = Page(vocabulary)
    text = "a🎉b" + "x" * 5
    page.add(Rollout("a.pt", 0, False, [raw([(text, 1), ("\ud800", 1)]), raw()], []))
    page.write(tmp_path / "page.html", "a")
    [sample, _] = chunks(tmp_path / "page.html", "s")
    assert sample["text"] == text + "?"  # the byte in the place of a surrogate, which has none
    count = len((text + "?").encode())
    assert len(sample["lengths"]) == len(sample["logProbs"]) == count
    assert sum(sample["lengths"]) == len(sample["text"]) == sample["segments"][0][1]
    assert len(chunks(tmp_path / "page.html", "p")) == 1  # two samples of one prompt


def test_log_probs_keep_their_size():
    values = [-1e-6, -0.01, -0.5, -1.0, -3.0, -12.0, -23.0]
    assert [value / 100 for value in _hundredths(values)] == pytest.approx(values, rel=0.06, abs=1e-5)
    extremes = (0.0, 1e-9, -9999.0, -math.inf, -(10**400), None, math.nan)
    assert _hundredths(extremes) == [0, 0, -9900, -9900, -9900, None, None]


def test_the_index_cannot_end_its_element():
    assert json.loads(_json("</script><!--\u2028\ud800")) == "</script><!--\u2028\ud800"
    assert "<" not in _json("</script>") and _json("\u2028\ud800").isascii()


def test_the_parts_can_stand_in_a_page():
    script = _script()
    for text, end in ((script, "</script"), ((PARTS / "page.css").read_text(), "</style")):
        assert end not in text.lower() and "<!--" not in text
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        ".href",
        ".src",
    ):
        assert sink not in script, sink


def test_the_policy_names_our_own_style_and_scripts_and_nothing_else():
    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    rules = dict(
        rule.strip().split(" ", 1) for rule in re.search('content="(.*)"', _policy("a {}", "b()"))[1].split(";")
    )
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest('a {}')}'",
        "script-src": f"'sha256-{digest('b()')}'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
