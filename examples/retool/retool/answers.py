r"""Whether two answers are the same, exactly and in bounded time.

    answer --_plain--> LaTeX without looks --read--> normal form    "1{,}000\,\text{cm}" and "+1000." are 1000,
                                                                    "\dfrac{\pi}{2}" and "π/2" are 1/2 times \pi

Contract: two answers are the same if their normal forms are. Numbers are fractions, never floats, and only what is
written as a number is one: `4^2` is not 16, `2+2` is not 4. Factors, terms, sets and lists have no order, tuples and
intervals have. Nothing is evaluated, expanded or solved. What cannot be read is compared by its tokens, and what is
longer than MAX_COMPARED_CHARS is the same only as itself.

This module imports nothing of the project but the reading of one expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from retool.expressions import (
    CLOSES,
    MAX_DEPTH,
    MAX_EXPONENT,
    OPENS,
    TOKEN,
    Form,
    Unreadable,
    read_expression,
    tokens_of,
    unordered,
)

MAX_COMPARED_CHARS = 300  # reading takes time by the square of it at worst


def same_answer(pred: str, label: str) -> bool:
    """Whether a prediction says what the label says.

    Args:
        pred: what a box holds.
        label: the right answer, from `label_text`.
    """
    if pred == label:
        return True
    if max(len(pred), len(label)) > MAX_COMPARED_CHARS:
        return False
    (said, unit), (right, right_unit) = read(pred), read(label)
    if unit != right_unit and ((unit and right_unit) or _is_radian_number(said, unit, right_unit)):
        return False
    if said == right or (_is_equation(said) and _is_equation(right)):
        return said == right
    return _value(said) == right or (_value(right) == said and right[2][0][0] in _NAMES)


def label_text(label: Any) -> str:
    """A label of any type as text, "" for a missing one."""
    if label is None:
        return ""
    if isinstance(label, float | Decimal):
        exact = Decimal(repr(float(label))) if isinstance(label, float) else label
        if abs(exact.adjusted()) <= MAX_EXPONENT:
            return f"{exact:f}"
    try:
        return str(label).strip()
    except ValueError:  # an integer of more digits than Python writes: no answer has as many
        return ""


def _is_radian_number(form: Form, *units: str) -> bool:
    """An angle that is a number without a unit is in degrees."""
    return "rad" in units and form[0] == "num"


_NAMES = ("v", "word", "_", "fn")  # what may be the name of a thing


def _is_equation(form: Form) -> bool:
    return form[0] == "rel" and form[1] in (("=",), (r"\in",))


def _value(form: Form) -> Form:
    """What an answer says of what it names ("x = 5", "m + n = 5", "x \\in (1, 2)"), itself if it names nothing."""
    named = _is_equation(form) and _has_letter(form[2][0])
    return form[2][1] if named else form


def _has_letter(form: Any) -> bool:
    return isinstance(form, tuple) and (form[:1] in (("v",), ("word",)) or any(map(_has_letter, form)))


# ---------------------------------------------------------------------------------------------------------------------
# Looks
# ---------------------------------------------------------------------------------------------------------------------

_COMMANDS = "pi infty emptyset sqrt le ge ne in cup cap pm times cdot div theta alpha beta".split()
_CHARACTERS = {
    **dict.fromkeys(map(ord, "−‐‑‒–—―﹣－"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2007\u2008\u2009\u200a\u202f"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), ""),
    **{ord(character): rf" \{name} " for character, name in zip("π∞∅√≤≥≠∈∪∩±×·÷θαβ", _COMMANDS, strict=True)},
    **{ord("°"): r"^\circ ", ord("％"): "%", ord("²"): "^2", ord("³"): "^3", ord("∗"): "*"},
}
_TEXT, _END = "\x01", "\x02"  # around what was in \text
_LAYOUT = re.compile(
    r"(?P<line>\\\\)(?!\s*$)"
    r"|(?P<nothing>\\(?:!|(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|bf|rm|it|sf)(?![A-Za-z]))\.?)"
    r"|(?:\\\\|\\[,;:()\[\] ]|~|(?<!\\)\$|\\(?:q?quad|thinspace)(?![A-Za-z]))"  # spaces, and what stands around math
)
_GROUPED = r" *[+-]? *[1-9][0-9]{0,2}(?:,[0-9]{3})+"
_THOUSANDS = re.compile(rf"(?<!\\)\{{{_GROUPED} *\}}|={_GROUPED}(?! *[0-9,])")
_BASES = {word: str(value) for value, word in enumerate("two three four five six seven eight nine ten".split(), 2)}
_BASE = re.compile(rf"_ *\{{? *{_TEXT} *({'|'.join(_BASES)}) *{_END} *\}}?")
_LOOKS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:boxed|fbox|math(?:bf|it|sf|normal)|boldsymbol|bm|underline)(?![A-Za-z]) *(?=\{)"), ""),
    (re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mbox|operatorname) *\{([^{}]*)\}"), rf"{_TEXT}\1{_END}"),
    (re.compile(r"!=|\\not *="), r"\\ne "),
    (re.compile(r"\\([lr])brace(?![A-Za-z])"), lambda found: r"\{" if found[1] == "l" else r"\}"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<=sqrt) *\(([^()]*)\)"), r"{\1}"),
]


def _plain(answer: str) -> str:
    """An answer without what changes its looks only."""
    text = re.sub("√ *([0-9]+)", r"√{\1}", answer).translate(_CHARACTERS)
    text = _LAYOUT.sub(lambda found: found["line"] or ("" if found["nothing"] else " "), text)
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    for look, instead in _LOOKS:
        text = look.sub(instead, text)
    return _BASE.sub(lambda found: f"_{_BASES[found[1]]} ", text)


# ---------------------------------------------------------------------------------------------------------------------
# Units
# ---------------------------------------------------------------------------------------------------------------------

# What makes a difference where both answers have one. All other words behind a number say what is counted.
_MEASURES = {
    name: names.split()[0]
    for names in (
        "deg degree degrees,rad radian radians,% percent,$ dollar dollars,cent cents,mm millimeter millimeters,"
        "cm centimeter centimeters,m meter meters metre metres,km kilometer kilometers,in inch inches,ft foot feet,"
        "yd yard yards,mi mile miles,s sec second seconds,min minute minutes,h hr hour hours,day days,week weeks,"
        "month months,year years,g gram grams gm,kg kilogram kilograms,lb pound pounds"
    ).split(",")
    for name in names.split()
}
# Of one letter, or in text only.
_SYMBOLS = frozenset("l L N J W V K C F".split()) | _MEASURES.keys()
_NO_UNITS = frozenset(
    "or and to mod modulo base choose squared cubed factorial over times plus minus more less than not most least"
    " about half halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths hundredths hundred thousand"
    " million billion trillion dozen one two three four five six seven eight nine ten twelve bc bce pi".split()
)
_POWER = r"(?: *\^ *\{? *(?P<power>[23]) *\}?)?"
_UNITS = (
    re.compile(r"(?:\^ *(?:\\circ|\{ *\\circ *\}) *[CF]?|\\degree) *$"),
    re.compile(r"\\?(?P<sign>[%$]) *$"),
    re.compile(rf"{_TEXT}(?P<words>[^{_TEXT}{_END}]*){_END} *{_POWER} *$"),
    re.compile(rf"(?<=[\s)}}])(?P<words>[A-Za-z]{{3,}}(?: +[A-Za-z]{{2,}})*) *{_POWER} *$"),
    re.compile(rf"(?<=[0-9\s)}}])(?P<words>cm|mm|km|kg|ft|mph|[a-z]{{4,}}) *{_POWER} *$"),
)
_CURRENCY = re.compile(r" *(?:\\\$|€|£|\\pounds(?![A-Za-z])) *")
_MAX_UNITS = 3  # as in "5 square cm^2."
_TRIMMED = " \t\r\n,;:。，；、"


def _without_unit(text: str) -> tuple[str, str]:
    """(text, unit): the unit as in _MEASURES, "" for none or another one."""
    unit = ""
    text = _trimmed(text)
    if text[:1] == _TEXT and text.find(_END) == len(text) - 1:
        text = _trimmed(text[1:-1])
    if currency := _CURRENCY.match(text):
        text, unit = text[currency.end() :], "$"
    for _ in range(_MAX_UNITS):
        found = next((found for pattern in _UNITS if (found := pattern.search(text))), None)
        rest = _trimmed(text[: found.start()]) if found else ""
        if found is None or not re.search(r"[0-9]|\\(?:pi|infty)|[^A-Za-z]e$", rest) or rest[-1] in "+-*/^_=<>(":
            break
        named = _unit(found)
        if named is None:
            break
        text, unit = rest, named or unit
    return text, unit


def _unit(found: re.Match[str]) -> str | None:
    """The name of a unit, "" for one that is not measured, None where it is none."""
    groups = found.groupdict()
    if "words" not in groups:
        return _MEASURES.get(groups.get("sign") or "deg", "$")
    words = re.findall(r"[A-Za-z]+", groups["words"])
    if re.search(r"[^A-Za-z\s./()-]", groups["words"]) or not _NO_UNITS.isdisjoint(word.lower() for word in words):
        return None
    if any(len(word) == 1 and word not in _SYMBOLS for word in words):
        return None
    measures = [_MEASURES[word.lower()] for word in words if word.lower() in _MEASURES]
    power = {"square": "2", "squared": "2", "sq": "2", "cubic": "3"}.get(
        words[0].lower() if words else "", groups["power"]
    )
    return "/".join(measures) + (power or "") if measures else ""


def _trimmed(text: str) -> str:
    text = text.strip(_TRIMMED)
    return text[:-1].rstrip(_TRIMMED) if text.endswith(".") and not text.endswith("..") else text


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


_SEPARATORS = (",", ";", "and", "or")
_RELATIONS = {
    name: names.split()[0]
    for names in (
        r"=,< \lt,> \gt,\le \leq \leqslant,\ge \geq \geqslant,\ne \neq,\in,\cup,\cap,\approx,\equiv,\sim,\cong,\to"
    ).split(",")
    for name in names.split()
}
_TURNED = {">": "<", r"\ge": r"\le"}
_WITHOUT_ORDER = (r"\cup", r"\cap", r"\ne")
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_LITERALS = (
    re.compile(r"(?P<sign>[+-]?) *(?P<grouped>[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: +[0-9]{3})+)(?:\.[0-9]*)?)"),
    re.compile(rf"(?P<sign>[+-]?) *(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?"),
    re.compile(
        r"(?P<sign>[+-]?) *(?P<decimal>[0-9]*\.[0-9]*) *\\(?:overline|bar|dot) *"
        r"(?:\{ *(?P<cycle>[0-9]+) *\}|(?P<digit>[0-9]))"
    ),
)


def read(answer: str) -> tuple[Form, str]:
    """(normal form, unit of a measured value or "") of an answer of bounded length."""
    text, unit = _without_unit(_plain(answer))
    try:
        return _form(text, 0), unit
    except (Unreadable, ValueError):  # the second: of a number of more digits than Python writes
        return ("text", tuple(TOKEN.findall(text))), unit


def _form(text: str, depth: int) -> Form:
    """Of a whole answer, or of a part between separators."""
    if depth > MAX_DEPTH:
        raise Unreadable
    text = _without_unit(text)[0]
    while _enclosed(text, "{", "}"):
        text = _without_unit(text[1:-1])[0]
    values = [value for part in re.split("[/:]", text, maxsplit=1) if (value := _literal(part)) is not None]
    if len(values) == 1 and not re.search("[/:]", text):
        return ("num", values[0])
    if len(values) == 2 and values[1]:
        return ("num", values[0] / values[1])
    if _enclosed(text, r"\{", r"\}"):
        parts = _split(text[2:-2])
        return (
            unordered(_form(part, depth + 1) for part in parts) if any(map(str.strip, parts)) else ("v", r"\emptyset")
        )
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _enclosed(text, text[:1], text[-1:]):
        parts = _split(text[1:-1])
        if len(parts) == 1 and text[0] + text[-1] == "()":
            return _form(parts[0], depth + 1)
        return ("seq", text[0], tuple(_form(part, depth + 1) for part in parts if part.strip()), len(parts), text[-1])
    parts = [signed for part in _split(text) if part.strip() for signed in _both_signs(part)]
    if len(parts) > 1:
        return _list([_form(part, depth + 1) for part in parts])
    return _relation(tokens_of(text))


def _literal(text: str) -> Fraction | None:
    """The value of what is written as one decimal number."""
    found = next((found for literal in _LITERALS if (found := literal.fullmatch(text.strip()))), None)
    if found is None:
        return None
    groups = found.groupdict()
    digits = re.sub("[, ]", "", groups.get("grouped") or groups["decimal"]).rstrip(".")
    value = Fraction(digits or "0")
    if cycle := groups.get("cycle") or groups.get("digit"):
        places = len(digits.partition(".")[2])
        value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**places)
    if exponent := groups.get("exponent"):
        if abs(int(exponent)) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** int(exponent)
    return -value if groups["sign"] == "-" else value


def _enclosed(text: str, opening: str, closing: str) -> bool:
    """Whether the first bracket of a text is closed by its last one."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return False
    depth = 0
    for token in TOKEN.finditer(text):
        depth += (token[0] in OPENS) - (token[0] in CLOSES)
        if depth == 0:
            return token.end() == len(text)
    return False


def _split(text: str) -> list[str]:
    """The parts between commas, semicolons, "and" and "or" outside of brackets."""
    parts, depth, start = [], 0, 0
    for token in TOKEN.finditer(text):
        depth += (token[0] in OPENS) - (token[0] in CLOSES)
        if depth == 0 and token[0].lower() in _SEPARATORS:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _both_signs(text: str) -> list[str]:
    if r"\pm" not in text:
        return [text]
    return [text.replace(r"\pm", one).replace(r"\mp", other) for one, other in ("+-", "-+")]


def _list(items: list[Form]) -> Form:
    """Of "1, 2" or "x = 1 or x = 2", a set, or of "x = 3, y = -4", a tuple."""
    names = [item[2][0] if item[0] == "rel" and item[1] == ("=",) else None for item in items]
    named = [(name, item[2][1]) for name, item in zip(names, items, strict=True) if name is not None]
    if len(named) == len(items) and len(set(names)) == len(items):
        values = [value for _, value in sorted(named, key=repr)]
        return ("seq", "(", tuple(values), len(values), ")")
    if len({name for name, _ in named}) == 1:
        items = [item if name is None else item[2][1] for name, item in zip(names, items, strict=True)]
    return unordered(items)


def _relation(tokens: list[str]) -> Form:
    parts: list[list[str]] = [[]]
    relations: list[str] = []
    depth = 0
    for token in tokens:
        depth += (token in OPENS) - (token in CLOSES)
        if depth == 0 and token in _RELATIONS:
            relations.append(_RELATIONS[token])
            parts.append([])
        else:
            parts[-1].append(token)
    if relations == ["="] and not parts[0]:
        relations, parts = [], parts[1:]
    forms = [read_expression(part) for part in parts]
    if not relations:
        return forms[0]
    if set(relations) <= _TURNED.keys():
        forms, relations = forms[::-1], [_TURNED[relation] for relation in relations[::-1]]
    if relations == ["="] and forms[1][0] in _NAMES and forms[0][0] not in _NAMES:  # 5 = x
        forms.reverse()
    if len(set(relations)) == 1 and relations[0] in _WITHOUT_ORDER:
        forms.sort(key=repr)
    return ("rel", tuple(relations), tuple(forms))
