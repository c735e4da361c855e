"""Expressions of LaTeX in a normal form: sums, products, fractions, powers, functions, brackets, matrices.

Contract: `read_expression` reads the tokens of one expression, or raises Unreadable. Factors and terms are sorted,
rational coefficients gathered; nothing else is calculated, so `2+2` stays a sum. A bare number alone is ("num",
Fraction).

This module imports nothing of the project.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

MAX_EXPONENT = 300  # of a number of few characters that may have any value
MAX_DEPTH = 30  # of brackets

Form = tuple[
    Any, ...
]  # a kind and what it holds: ("num", Fraction), ("v", name), ("*", Fraction, factors), ("set", forms)


class Unreadable(Exception):
    """A text is no expression of the kinds that are read here."""


TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|[^\s\x01\x02]", re.S)
OPENS, CLOSES = ("(", "[", "{", r"\{", r"\begin"), (")", "]", "}", r"\}", r"\end")
_FUNCTIONS = frozenset("sqrt sin cos tan log ln exp pi infty infinity".split())  # that are written without a backslash
_ONE_CASE = frozenset("yes no true false none".split())


def tokens_of(text: str) -> list[str]:
    tokens: list[str] = []
    for token in TOKEN.findall(text):
        if not token.isalpha() or len(token) == 1 or not token.isascii():
            tokens.append(token)
            continue
        word = token.lower() if token.istitle() and len(token) > 2 or token.lower() in _ONE_CASE else token
        if word in _FUNCTIONS:
            tokens.append("\\" + word.replace("infinity", "infty"))
        else:
            tokens += word
    return tokens


def unordered(items: Iterable[Form]) -> Form:
    return ("set", tuple(sorted(items, key=repr)))


def read_expression(tokens: list[str]) -> Form:
    """The normal form of the tokens; Unreadable if they are no expression."""
    reader = _Reader(tokens)
    form = reader.sum()
    if reader.left:
        raise Unreadable
    return form


_TIMES, _OVER = ("*", r"\cdot", r"\times", r"\ast"), ("/", r"\div")
_SAME = dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac") | dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom")
_SAME |= dict.fromkeys((r"\lvert", r"\rvert", r"\vert"), "|") | {r"\varnothing": r"\emptyset"}
_DOTS = (r"\dots", r"\ldots", r"\cdots", "…", ".")
_CONSTANTS = frozenset(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu \xi \pi \rho"
    r" \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Pi \Sigma \Phi \Psi \Omega \infty"
    r" \emptyset \circ \ell".split()
)
_NUMERAL = re.compile(r"\.?[0-9]")
_MATRICES = {"{pmatrix}": "{matrix}", "{bmatrix}": "{matrix}"}
_BRACKETS = {"(": ")]", "[": ")]", "{": "}", r"\{": (r"\}",), "|": "|"}
_BEHIND = ("^", "_", "!", "'", "%", r"\%")
_TAKES_ARGUMENTS = {r"\sqrt": 1, r"\binom": 2} | dict.fromkeys(
    (r"\overline", r"\bar", r"\vec", r"\hat", r"\tilde", r"\overrightarrow", r"\widehat", r"\mathbb", r"\mathcal"), 1
)
_AFTER_A_PRODUCT = frozenset(("+", "-", ",", ";", "|", ")", "]", "}", r"\}", "&", r"\\", r"\end"))


class _Reader:
    """Recursive descent: each method returns a form and takes its tokens, or raises Unreadable."""

    def __init__(self, tokens: list[str]):
        self.left = [_SAME.get(token, token) for token in reversed(tokens)]
        self.depth = 0

    def next(self) -> str:
        return self.left[-1] if self.left else ""

    def take(self) -> str:
        if not self.left or self.left[-1] in _DOTS:
            raise Unreadable
        return self.left.pop()

    def sum(self) -> Form:
        terms: list[Form] = []
        while not terms or self.next() in ("+", "-"):
            sign = self.take() if self.next() in ("+", "-") else "+"
            term = self.product()
            terms.append(_negative(term) if sign == "-" else term)
        return terms[0] if len(terms) == 1 else ("+", tuple(sorted(terms, key=repr)))

    def product(self) -> Form:
        """Two numbers in a row are a mixed number, as in 3\frac12 or 3 1/2, or nothing that is read here."""
        factors = [(1, self.factor())]  # 1: above the line, -1: below it
        while self.next() and self.next() not in _AFTER_A_PRODUCT:
            token, last = self.next(), factors[-1][1]
            sign = token in _TIMES or token in _OVER
            if sign:
                self.take()
            is_power = self.left[-2:] == ["^", "10"]
            form = self.factor()
            numbers = last[0] == form[0] == "num"
            if numbers and not sign:
                form = self.rest_of_mixed(token, form)
                if len(factors) > 1 or last[1].denominator > 1 or not 0 < form[1] < 1:
                    raise Unreadable
                factors = [(1, ("num", last[1] + form[1]))]
            elif numbers and len(factors) == 1 and token in _OVER:
                factors = [(1, _quotient(last, form))]
            elif numbers and len(factors) == 1 and is_power:
                factors = [(1, ("num", last[1] * form[1]))]
            else:
                factors.append((-1 if token in _OVER else 1, form))
        return _product(factors) if len(factors) > 1 else factors[0][1]

    def rest_of_mixed(self, token: str, form: Form) -> Form:
        if token == r"\frac":
            return form
        if self.next() not in _OVER:
            raise Unreadable
        self.take()
        below = self.factor()
        if below[0] != "num":
            raise Unreadable
        return _quotient(form, below)

    def factor(self) -> Form:
        form = self.atom()
        while self.next() in _BEHIND:
            behind = self.take()
            script = self.argument() if behind in ("^", "_") else ("v", "")
            if behind == "^" and form == ("num", 10) and _is_small_integer(script):
                form = ("num", Fraction(10) ** int(script[1]))
            else:
                form = (behind, form, script)
        return form

    def atom(self) -> Form:
        """A factor without what stands behind it."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        form = self.atom_of(self.take())
        self.depth -= 1
        return form

    def atom_of(self, token: str) -> Form:
        if token in ("+", "-"):
            return _negative(self.factor()) if token == "-" else self.factor()
        if _NUMERAL.match(token):
            return ("num", Fraction(token))
        if token in _CONSTANTS or (len(token) == 1 and token.isalpha()):
            return ("v", token)
        if token in _BRACKETS:
            return self.brackets(token)
        if token == r"\frac":
            above, below = self.argument(), self.argument()
            return _quotient(above, below) if above[0] == below[0] == "num" else _product([(1, above), (-1, below)])
        if token == r"\begin":
            return self.matrix()
        if token[0] == "\\" and token[1:].isalpha():
            return self.function(token)
        raise Unreadable

    def argument(self) -> Form:
        """What a command takes: a group, or one digit or letter."""
        token = self.take()
        if _NUMERAL.match(token) and len(token) > 1:
            self.left.append(token[1:])
            token = token[0]
        self.left.append(token)
        return self.atom()

    def brackets(self, opening: str) -> Form:
        items, closing = [self.sum()], self.take()
        while closing in (",", ";"):
            items.append(self.sum())
            closing = self.take()
        if closing not in _BRACKETS[opening]:
            raise Unreadable
        if opening == r"\{":
            return unordered(items)
        if opening == "|":
            return ("abs", items[0])
        if len(items) == 1 and opening + closing in ("()", "{}"):
            return items[0]
        return ("seq", opening, tuple(items), len(items), closing)

    def function(self, name: str) -> Form:
        """A command and what it is of: its groups, or the factor after it."""
        if name in _TAKES_ARGUMENTS:
            index = self.brackets(self.take()) if name == r"\sqrt" and self.next() == "[" else ()
            return ("fn", name, index, tuple(self.argument() for _ in range(_TAKES_ARGUMENTS[name])))
        scripts = []
        while self.next() in ("^", "_"):
            scripts.append((self.take(), self.argument()))
        if self.next() in ("", *_AFTER_A_PRODUCT, *_TIMES, *_OVER):
            return ("fn", name, tuple(scripts), ())
        return ("fn", name, tuple(scripts), (self.factor(),))

    def matrix(self) -> Form:
        kind, rows, row = self.environment(), [], []
        while True:
            row.append(self.sum() if self.next() not in ("&", r"\\", r"\end") else ("v", ""))
            token = self.take()
            if token != "&":
                rows.append(tuple(row))
                row = []
            if token == r"\end":
                break
            if token not in ("&", r"\\"):
                raise Unreadable
        if self.environment() != kind:
            raise Unreadable
        return ("matrix", _MATRICES.get(kind, kind), tuple(row for row in rows if row != (("v", ""),)))

    def environment(self) -> str:
        name = ""
        while not name.endswith("}"):
            name += self.take()
        return name


def _is_small_integer(form: Form) -> bool:
    return bool(form[0] == "num" and form[1].denominator == 1 and abs(form[1]) <= MAX_EXPONENT)


def _negative(form: Form) -> Form:
    return ("num", -form[1]) if form[0] == "num" else _product([(1, ("num", Fraction(-1))), (1, form)])


def _quotient(above: Form, below: Form) -> Form:
    if not below[1]:
        raise Unreadable
    return ("num", above[1] / below[1])


def _product(factors: list[tuple[int, Form]]) -> Form:
    coefficient, others = Fraction(1), []
    for way, form in factors:
        value, inside = (form[1], ()) if form[0] == "num" else (form[1], form[2]) if form[0] == "*" else (1, (form,))
        if way < 0 and not value:
            raise Unreadable
        coefficient *= Fraction(value) ** way
        inside = tuple(("v", letter) for letter in form[1]) if form[0] == "word" else inside
        others += [one if way > 0 else one[1] if one[0] == "below" else ("below", one) for one in inside]
    if coefficient == 1 and len(others) == 1:
        return others[0]
    if coefficient == 1 and others and all(form[0] == "v" for form in others):  # a word, or names in their order
        return ("word", tuple(form[1] for form in others))
    return ("*", coefficient, tuple(sorted(others, key=repr)))
