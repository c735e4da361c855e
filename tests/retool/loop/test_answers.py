"""Which answers are the same: the table, what no table can list, and that the time is bounded."""

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import generate_with_retool as plugin
import pytest
from answer_pairs import pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from retool import answers, reward

TABLE = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "answers.jsonl").read_text().splitlines()]


def equal(pred, label):
    return reward.is_correct(pred, label, plugin.compute_score)


@pytest.mark.parametrize("case", TABLE, ids=[f"{case['label']!r} {case['pred']!r}" for case in TABLE])
def test_the_table(case):
    assert equal(case["pred"], case["label"]) is case["equal"]


def test_the_table_covers_both_sides():
    assert len(TABLE) >= 115 and 40 <= sum(case["equal"] for case in TABLE) <= len(TABLE) - 40


def test_families_of_pairs():
    """No right answer is missed and no wrong one taken for right; `python answer_pairs.py` shows how others judge
    them."""
    judged = [pair for pair in pairs() if equal(pair.pred, pair.label) is not pair.equal]
    assert not judged and len(pairs()) > 1141


DRESSES = ["{}", "{}.", "+{}", "00{}", "{}.00", "${}$", "\\left({}\\right)", "\\mathbf{{{}}}", "x = {}", "\\({}\\)"]
DRESSES += ["\\frac{{{}}}{{1}}", "{}/1"]
MEASURED = ["{}^\\circ", "{}\\%", "{}\\text{{ cm}}", "{}\\,\\mathrm{{m}}"]


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.sampled_from(DRESSES + MEASURED), st.sampled_from(DRESSES))
def test_numbers_are_equal_if_their_values_are(one, other, dress, other_dress):
    assert equal(dress.format(one), other_dress.format(one))
    if "00{}" not in dress and "{}.00" not in dress:  # in parentheses a comma makes a pair
        assert equal(dress.format(f"{one:,}"), str(one)) is (one < 1000 or "left(" not in dress)
    assert equal(dress.format(one), other_dress.format(other)) is (one == other)


@settings(max_examples=300)
@given(st.text(alphabet="0123456789.,-+/= \\{}$^x°%", max_size=10), st.text(alphabet="0123456789.,-/ ", max_size=6))
def test_what_is_read_as_a_number_is_that_number(pred, label):
    """The digits that were written are those of the value: none is dropped, none is joined to another number."""
    form = answers.read(pred)[0] if pred.strip() else ()
    form = form[2][1] if form[:2] == ("rel", ("=",)) else form
    if form[:1] == ("num",) and not set("/^") & set(pred):
        value = form[1]
        written = "".join(
            character for character in pred.rpartition("=")[2] if character.isdigit() or character == "."
        )
        assert abs(value) == Fraction(written.rstrip(".") or "0")
    assert equal(pred, label) is (bool(pred and label.strip()) and equal(label.strip(), pred.strip()))


@given(st.text(max_size=90), st.text(max_size=90))
def test_what_the_strict_scorer_accepts_is_right(pred, label):
    if (
        pred
        and label.strip() == label
        and plugin.compute_score(f"\\boxed{{{pred}}}", label, strict_box_verify=True)["acc"]
    ):
        assert equal(pred, label)
    assert not (pred and pred.strip() == pred) or equal(pred, pred)


@pytest.mark.parametrize(
    "label, pred, right",
    [
        (34, "34.0", True),
        (34.0, "34", True),
        (1e16, "10000000000000000", True),
        (0.1, "0.1", True),
        (0.1, "1/10", True),
        (1e-7, "0.0000001", True),
        (Decimal("34.0"), "34", True),
        (Decimal("1E+3"), "1000", True),
        (Fraction(1, 2), "0.5", True),
        (float("nan"), "0", False),
        (float("inf"), "1", False),
        (Decimal("1E+999999999"), "1", False),
        (True, "1", False),
        ("None", "None", True),
        ("1e999999999", "1", False),
        ("1e999999999", "1e999999999", True),
    ],
)
def test_labels_of_any_type(label, pred, right):
    assert equal(pred, label) is right


def test_a_label_too_long_to_be_written_is_no_answer():
    assert not equal("1", 10**5000)
    assert answers.label_text(1e16) == "10000000000000000" and answers.label_text(Decimal("2.50")) == "2.50"


@pytest.mark.parametrize(
    "brackets", ["()", "[]", "{}", "\\{ \\}", "(1, )", "-( )", "\\frac{1}{ }", "\\sin( )", "|( )|"]
)
@pytest.mark.parametrize("depth", [20, 60])
def test_brackets_of_any_depth_are_compared(brackets, depth):
    opening, closing = brackets.split(" ") if " " in brackets else brackets
    deep = opening * depth + "1" + closing * depth
    equal(deep, "1")
    assert equal(deep, deep + " ") and not equal(deep, deep.replace("1", "2") + " ")


@pytest.mark.parametrize(
    "piece",
    [
        "word ",
        "9",
        "1,000",
        "$x",
        "$",
        "\\text{",
        "{",
        "(",
        "\\frac1",
        "frac",
        "=",
        "x=",
        " ",
        "1 000",
        "cm ",
        "\\,",
        "^2",
    ]
    + [
        "square feet ",
        "-",
        ".",
        "π",
        "\\left(",
        "{}",
        "\\boxed{",
        "or ",
        "\\overline{",
        "\\sqrt",
        "x^",
        "1/",
        "|",
        "{1 \\over ",
    ]
    + [
        "\\text{a} ",
        "\\pm",
        ",",
        "1:",
        "\\begin{pmatrix}",
        "&",
        "\\\\",
        "10^{300}",
        "\\{",
        "\\sin ",
        "!",
        "\x01",
        "0.\\overline{9}",
    ],
)
def test_comparing_takes_bounded_time(piece):
    def seconds(chars):
        text = (piece * chars)[:chars]
        best = float("inf")
        for _ in range(3):
            begun = time.thread_time()
            equal(text, "42")
            equal(text, text[:-1] + "!")
            equal("42", text)
            best = min(best, time.thread_time() - begun)
        return best

    assert seconds(answers.MAX_COMPARED_CHARS) < 0.05
    assert seconds(200_000) < 0.05
