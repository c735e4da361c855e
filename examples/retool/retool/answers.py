r"""Whether two answers are the same, exactly and in bounded time.

    answer --number--> Fraction     "1{,}000\,\text{cm}" and "+1000." are 1000, "\dfrac12" and "0.50" are 1/2
           --spelling--> tokens     "\dfrac{\pi}{2}" and "π/2" are \frac \pi 2

Contract: two numbers are the same if their values are, and a number is never the same as what is not one. Anything else
is compared by its tokens, and then by vime's own normalization where that cannot drop or join what makes a difference.
Values are fractions, never floats. What is longer than MAX_COMPARED_CHARS is the same only as itself.

This module imports nothing of the project.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_COMPARED_CHARS = 300  # the regular expressions of vime's normalization take time by the square of what they get
MAX_LABEL_EXPONENT = 300  # of a label that is a number: a float or a Decimal of few characters may have any value


def same_answer(pred: str, label: str, normalize: Callable[[str], str]) -> bool:
    """Whether a prediction says what the label says.

    Args:
        pred: what a box holds.
        label: the right answer, from `label_text`.
        normalize: vime's normalize_final_answer.
    """
    if pred == label:
        return True
    if max(len(pred), len(label)) > MAX_COMPARED_CHARS:
        return False
    value, expected = number(pred), number(label)
    if value is not None or expected is not None:
        return value == expected
    pred, label = _without_name(_plain(pred)), _without_name(_plain(label))
    return spelling(pred) == spelling(label) or _normalized_alike(pred, label, normalize)


def label_text(label: Any) -> str:
    """A label of any type as text, "" for a missing one."""
    if label is None:
        return ""
    if isinstance(label, float | Decimal):
        exact = Decimal(repr(float(label))) if isinstance(label, float) else label
        if exact.is_finite() and abs(exact.adjusted()) <= MAX_LABEL_EXPONENT:
            return f"{exact:f}"
    try:
        return str(label).strip()
    except ValueError:  # an integer of more digits than Python writes: no answer has as many
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------

_DASHES = dict.fromkeys(map(ord, "−‐‑‒–—―﹣－"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2007\u2008\u2009\u200a\u202f"), " ")
_NOTHING = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")
_COMMANDS = {ord("π"): r"\pi ", ord("°"): r"^\circ ", ord("％"): "%", ord("²"): "^2", ord("³"): "^3"}
_CHARACTERS = {**_DASHES, **_SPACES, **_NOTHING, **_COMMANDS}
_SPACING = re.compile(r"\\[,;: ]|~|\\(?:q?quad|thinspace|displaystyle|textstyle)(?![A-Za-z])")
_INVISIBLE = re.compile(r"\\!|\\(?:left|right|bigg?|Bigg?)(?![A-Za-z])\.?")
_FONTS = r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf|normal)|mbox|boldsymbol|bm|underline|displaystyle)"
_WRAPPERS = (  # what may stand around a whole answer
    re.compile(r"\$\$(.*)\$\$", re.S),
    re.compile(r"\$(.*)\$", re.S),
    re.compile(r"\\\((.*)\\\)", re.S),
    re.compile(r"\\\[(.*)\\\]", re.S),
    re.compile(rf"(?:{_FONTS})?\s*\{{(.*)\}}", re.S),
)
_BRACKETS = re.compile(r"\((.*)\)", re.S)  # these make no difference to a number, but to a pair
_NAME = re.compile(r"\s*(?P<name>[A-Za-z\\|∠△][^=<>≤≥≠≈,;:!]*?)\s*=\s*(?P<value>[^=<>≤≥≠≈]*)")
_RELATION = r"\\(?:neq?|leq?|geq?|ll|gg|lt|gt|approx|equiv|not|sim|in|pm|mp)(?![A-Za-z])"
_NO_NAME = re.compile(rf"{_RELATION}|\bor\b|\band\b|\$|^(?:\\[dtc]?frac|\\sqrt|\\cdot|\\times|[-0-9{{}}()+*/^. ])+$")

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: +[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]? *{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) *(?:(?P<decimal>{_DECIMAL})(?: */ *(?P<by>{_DECIMAL}))?"
    rf"|\\[dtc]?frac *(?:\{{ *(?P<above>{_SIGNED}) *\}}|(?P<above1>[0-9])) *"
    rf"(?:\{{ *(?P<below>{_SIGNED}) *\}}|(?P<below1>[0-9])))"
)
_POWER = r"(?: *\^ *(?:[23]|\{ *[23] *\}))?"
_WORDS = (  # units that are read in plain text too
    "degrees? dollars? cents? points? units? feet foot inch(?:es)? miles? mph km cm mm gm kg meters? metres? "
    "hours? minutes? seconds? days? weeks? months? years? pounds? digits? integers? ways? students? people edges? "
    "meals? multiples? percent"
).split()
_SYMBOLS = (
    "m s g h l L min sec hr ft in yd mi lb oz mL ml rad deg km/h m/s mi/h Hz N J W V th".split()
)  # in \text only
_IN_WORDS = rf"(?:(?:square +)?(?:{'|'.join(_WORDS)}) *)+"
_UNIT = re.compile(
    rf" *(?:\^ *(?:\\circ|\{{ *\\circ *\}}) *[CF]?|\\degree|\\?%|\\\$"
    rf"|{_IN_WORDS}{_POWER}"
    rf"|\\(?:text|mathrm|textrm|mbox|rm|operatorname) *\{{ *(?:{_IN_WORDS}|(?:{'|'.join(_SYMBOLS)}))? *\.?{_POWER} *\}}"
    rf"{_POWER}) *"
)
_CURRENCY = re.compile(r"(?:\\\$|\$(?!.*\$)|€|£|\\pounds) *", re.S)
_MAX_UNITS = 3  # as in "5 square cm^2."
_MAX_WRAPPERS = 6


def number(answer: str) -> Fraction | None:
    """The number that an answer is, None where it is none, or more than one, or an expression to be evaluated."""
    if len(answer) > MAX_COMPARED_CHARS:
        return None
    text = _unwrapped(_without_name(_plain(answer)), (*_WRAPPERS, _BRACKETS))
    text = _CURRENCY.sub("", text, count=1) if _CURRENCY.match(text) else text
    found = _NUMBER.match(text)
    if found is None:
        return None
    rest = found.end()
    for _ in range(_MAX_UNITS):
        unit = _UNIT.match(text, rest)
        if unit is None or unit.end() == rest:
            break
        rest = unit.end()
    return None if text[rest:].strip() else _value(found)


def _plain(answer: str) -> str:
    """An answer without what changes its looks only."""
    text = answer.translate(_CHARACTERS).replace("{,}", ",")
    return _INVISIBLE.sub("", _SPACING.sub(" ", text)).strip()


def _unwrapped(text: str, wrappers: tuple[re.Pattern[str], ...] = _WRAPPERS) -> str:
    for _ in range(_MAX_WRAPPERS):
        text = text.strip(" \t\r\n,;。，；、")
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        inside = next((found[1] for wrapper in wrappers if (found := wrapper.fullmatch(text))), None)
        if inside is None or not _balanced(inside):
            break
        text = _without_name(inside)
    return text.strip()


def _balanced(text: str) -> bool:
    """Whether no bracket in a text belongs to one outside of it."""
    depth = 0
    for character in text:
        depth += (character in "({") - (character in ")}")
        if depth < 0:
            return False
    return depth == 0


def _without_name(text: str) -> str:
    """The right side of "x = 5"; the text itself where it says more than what one thing is equal to."""
    found = _NAME.fullmatch(text.strip().strip("$"))
    if found is None or _NO_NAME.search(found["name"]):
        return text
    return found["value"]


def _value(found: re.Match[str]) -> Fraction | None:
    above = found["decimal"] or found["above"] or found["above1"]
    below = found["by"] or found["below"] or found["below1"] or "1"
    divisor = _exact(below)
    if not divisor:
        return None
    value = _exact(above) / divisor
    return -value if found["sign"] == "-" else value


def _exact(text: str) -> Fraction:
    digits = text.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(digits)


# ---------------------------------------------------------------------------------------------------------------------
# What is not a number
# ---------------------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+|[^\s]", re.S)
_SAME_COMMAND = {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\lbrace": r"\{", r"\rbrace": r"\}"}
_ATOM = r"(\\[A-Za-z]+ *|[0-9]+|[A-Za-z])"
_SIMPLE_FRACTION = re.compile(rf"([+-]?) *{_ATOM} */ *{_ATOM}")
_TAKES_ONE_TOKEN = (r"\frac", r"\sqrt", "^", "_")


def spelling(answer: str) -> tuple[str, ...]:
    """The tokens of an answer in LaTeX, however it spells its fractions, its spaces and its single arguments."""
    text = _unwrapped(_plain(answer))
    text = _SIMPLE_FRACTION.sub(r"\1\\frac{\2}{\3}", text) if _SIMPLE_FRACTION.fullmatch(text) else text
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        before, earlier = tokens[-1:], tokens[-2:-1]
        is_argument = before and (before[0] in _TAKES_ONE_TOKEN or earlier == [r"\frac"])
        if token.isdigit() and is_argument:  # without braces an argument is one digit
            tokens += token
        else:
            tokens.append(_SAME_COMMAND.get(token, token))
    return tuple(_without_single_braces(tokens))


def _without_single_braces(tokens: list[str]) -> list[str]:
    kept: list[str] = []
    for token in tokens:
        kept.append(token)
        if token == "}" and len(kept) >= 3 and kept[-3] == "{" and kept[-2] not in "{}":
            kept[-3:] = [kept[-2]]
    return kept


# What vime's normalization drops or joins although it makes a difference.
_UNSAFE = re.compile(
    rf"{_RELATION}|[=$<>≠≈]|\.\.|…|\\[lc]?dots|\\overline *\{{? *[0-9.]|[0-9],|[0-9] +[0-9]|\bor\b|\ban? "
)


def _normalized_alike(pred: str, label: str, normalize: Callable[[str], str]) -> bool:
    if _UNSAFE.search(pred) or _UNSAFE.search(label) or re.findall("[0-9]+", pred) != re.findall("[0-9]+", label):
        return False
    return bool(normalize(pred) == normalize(label))
