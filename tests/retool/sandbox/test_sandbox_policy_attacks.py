"""Programs that try to get past the source policy, each proven to work where the policy is off.

The goal of each is to have a string evaluated, or to hold a module, a frame, a namespace or a function that the policy
denies; a program prints GOT once it is there. With the policy on it must be refused, or at least not get there. Python
versions differ in what they offer: where this one itself denies what a program is after, the proof is skipped and says
so.
"""

import contextlib
import io

import jail
import pytest
from retool.sandbox import wire

# Never spelled out in a program, so that no look at its text can find them.
COMPUTED = """
line = "_" * 2
import_os = line + "import" + line + "('o' + 's')"
"""

# A comment to whoever reads text; code to whoever decodes bytes as the source asks.
ENCODINGS = {
    "coding-utf-7": "# coding: utf-7\n#+AAo-import os;print('GOT' if os else 0)\n",
    "coding-unicode-escape": "# coding: unicode_escape\n#\\x0aimport os;print('GOT' if os else 0)\n",
    "coding-raw-unicode-escape": "# coding: raw_unicode_escape\n#\\u000aimport os;print('GOT' if os else 0)\n",
    "coding-in-the-second-line": "#\n# vim: set fileencoding=utf-7 :\n#+AAo-import os;print('GOT' if os else 0)\n",
}
ATTACKS = {
    # -- what is denied, in unusual places and spellings
    "normalised-identifier": "print('GOT' if ｅｖａｌ('1') else 0)",
    "normalised-attribute": "print('GOT' if print.__ｓｅｌｆ__ else 0)",
    "normalised-import": "import ｏｓ\nprint('GOT')",
    "continued-line": "import \\\n    os\nprint('GOT')",
    "form-feed": "\fimport os\nprint('GOT')",
    "carriage-return": "#\rimport os\rprint('GOT')",
    "behind-a-semicolon": "x = 1; import os; print('GOT')",
    "in-a-dead-branch": "if 0: pass\nelse: import os\nprint('GOT')",
    "in-a-nested-function": """
def f():
    def g():
        import os
        return os
    return g()
if f(): print('GOT')
""",
    "in-a-class-body": "class A:\n    import os\nprint('GOT')",
    "in-a-comprehension": "print('GOT' if [eval('1') for _ in [1]] else 0)",
    "in-a-default-argument": "def f(x=eval('1')): return x\nif f(): print('GOT')",
    "in-a-decorator": "@lambda f: eval('f')\ndef f(): pass\nprint('GOT')",
    "in-a-metaclass": "class A(metaclass=lambda *a: eval('1')): pass\nif A: print('GOT')",
    "in-an-f-string": "print(f'{eval(chr(49))}' and 'GOT')",
    "in-a-nested-f-string": "print('GOT' if f'{f\"{eval(chr(49))}\"}' else 0)",
    "in-an-f-string-format": "print(f'{1:{eval(\"10\")}}' and 'GOT')",
    "in-a-match-guard": "match 1:\n    case x if eval('1'): print('GOT')",
    "in-a-lambda": "print((lambda: eval('\"GOT\"'))())",
    "in-a-star-argument": "print(*map(eval, ['\"GOT\"']))",
    "by-walrus": "(e := eval)\nprint(e('\"GOT\"'))",
    "by-deletion-of-a-shadow": "def eval(x): return 0\ndel eval\nprint(eval('\"GOT\"'))",
    # -- modules that hang on modules
    "module-of-a-module": "import random\nif random._os: print('GOT')",
    "module-of-a-module-by-from": "from random import _os\nprint('GOT')",
    "module-builtins-of-enum": "import enum\nprint(enum.bltns.eval('\"GOT\"'))",
    "module-through-a-list": "import enum\nprint([enum][0].bltns.eval('\"GOT\"'))",
    "module-through-a-parameter": "import enum\ndef f(module): return module.bltns\nprint(f(enum).eval('\"GOT\"'))",
    "module-through-a-lambda": "import enum\nprint((lambda m: m.bltns)(enum).eval('\"GOT\"'))",
    "module-through-a-loop": "import enum\nfor m in [enum]: print(m.bltns.eval('\"GOT\"'))",
    "module-through-a-tuple": "import enum\nm, n = enum, 1\nprint(m.bltns.eval('\"GOT\"'))",
    "module-through-an-attribute": "import enum\nclass A: m = enum\nprint(A.m.bltns.eval('\"GOT\"'))",
    "module-through-a-conditional": "import enum\nprint((enum if 1 else 0).bltns.eval('\"GOT\"'))",
    "module-through-getattr": "import enum\nprint(getattr([enum][0], 'bltns').eval('\"GOT\"'))",
    "module-through-attrgetter": "import enum, operator\nprint(operator.attrgetter('bltns.eval')(enum)('\"GOT\"'))",
    "module-through-a-class-pattern": "import enum\nmatch enum:\n    case object(bltns=b): print(b.eval('\"GOT\"'))",
    "module-codecs-of-json": "import json\nfor m in [json]:\n    if m.codecs.open: print('GOT')",
    "module-types-of-typing": "import typing\nfor m in [typing]:\n    if m.types.FunctionType: print('GOT')",
    "module-types-of-dataclasses": "import dataclasses\nif [dataclasses][0].types.CodeType: print('GOT')",
    "module-types-of-pprint": "import pprint\nif [pprint][0]._types.FunctionType: print('GOT')",
    "module-threads-of-dataclasses": "import dataclasses\nif [dataclasses][0]._thread.start_new_thread: print('GOT')",
    "module-of-a-star-import": "from enum import *\nfrom random import _os\nprint('GOT')",
    # -- special attributes without writing one out
    "attribute-through-a-false-super": """
import random
super = lambda: random.Random.shuffle
if super().__globals__["_os"]: print("GOT")
""",
    "attribute-through-a-super-function": """
import random
def super(): return random.Random.shuffle
if super().__globals__["_os"]: print("GOT")
""",
    "attribute-through-a-super-parameter": """
import random
def f(super):
    if super().__globals__["_os"]: print("GOT")
f(lambda: random.Random.shuffle)
""",
    "attribute-through-match-args": """
import random
class Meta(type):
    def __instancecheck__(cls, instance): return True
class Any(metaclass=Meta):
    __match_args__ = ("__globals__",)
match random.Random.shuffle:
    case Any(found):
        if found["_os"]: print("GOT")
""",
    "attribute-through-computed-match-args": """
import random
class Meta(type):
    def __instancecheck__(cls, instance): return True
class Any(metaclass=Meta):
    __match_args__ = ("_" * 2 + "globals" + "_" * 2,)
match random.Random.shuffle:
    case Any(found):
        if found["_os"]: print("GOT")
""",
    "attribute-through-update-wrapper": """
import functools, random
class Keep:
    def __setattr__(self, name, value):
        if name != "_" * 2 + "wrapped" + "_" * 2 and value["_os"]: print("GOT")
functools.update_wrapper(Keep(), random.Random.shuffle, assigned=["_" * 2 + "globals" + "_" * 2], updated=[])
""",
    "attribute-through-wraps": """
import functools, random
class Keep:
    def __setattr__(self, name, value):
        if name != "_" * 2 + "wrapped" + "_" * 2 and value["_os"]: print("GOT")
functools.wraps(random.Random.shuffle, assigned=["_" * 2 + "globals" + "_" * 2], updated=[])(Keep())
""",
    "attribute-by-attrgetter": "from operator import attrgetter as a\nif a('__class__')(1): print('GOT')",
    "attribute-by-computed-attrgetter": """
import operator
if operator.attrgetter('_' * 2 + 'class' + '_' * 2)(1): print('GOT')
""",
    "attribute-by-methodcaller": "import operator\nif operator.methodcaller('__reduce_ex__', 2)(1.5): print('GOT')",
    "attribute-by-partial-getattr": "import functools\nif functools.partial(getattr, 1)('__class__'): print('GOT')",
    "attribute-by-mapped-getattr": "if list(map(getattr, [1], ['__class__'])): print('GOT')",
    "attribute-by-reduced-getattr": "import functools\nif functools.reduce(getattr, ['__class__'], 1): print('GOT')",
    "attribute-by-type-getattribute": "if type.__getattribute__(int, '__subclasses__'): print('GOT')",
    "attribute-by-a-class-pattern": "match 1:\n    case int(__class__=c): print('GOT')",
    "attribute-by-format": "print('GOT' if '{0.__class__}'.format(1) else 0)",
    "attribute-by-format-map": "print('GOT' if '{a.__class__}'.format_map({'a': 1}) else 0)",
    "attribute-by-unbound-format": "print('GOT' if str.format('{0.__class__}', 1) else 0)",
    "attribute-by-mapped-format": "print('GOT' if list(map('{0.__class__}'.format, [1])) else 0)",
    "attribute-by-getattr-of-format": "print('GOT' if getattr('{0.__class__}', 'format')(1) else 0)",
    "attribute-by-methodcaller-of-format": """
import operator
if operator.methodcaller('format', 1)('{0.__class__}'): print('GOT')
""",
    "attribute-by-attrgetter-of-format": """
import operator
if operator.attrgetter('format')('{0.__class__}')(1): print('GOT')
""",
    "attribute-by-a-formatter": """
import string
if string.Formatter().get_field('0.__class__', (1,), {}): print('GOT')
""",
    "attribute-by-a-starred-formatter": """
from string import *
if Formatter().get_field('0.__class__', (1,), {}): print('GOT')
""",
    "frame-of-a-generator": "g = (1 for _ in [1])\nif g.gi_frame.f_back or g.gi_frame: print('GOT')",
    "frame-of-a-coroutine": "async def f(): pass\nc = f()\nif c.cr_frame: print('GOT')",
    "frame-of-an-exception": "try: 1 / 0\nexcept Exception as e:\n    if e.__traceback__.tb_frame: print('GOT')",
    "frame-by-a-context-manager": """
import contextlib
@contextlib.contextmanager
def f(): yield
if f().gen.gi_frame: print("GOT")
""",
    "traceback-by-an-exit-method": """
class Keep:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        if trace.tb_frame.f_builtins: print("GOT")
        return True
with Keep(): 1 / 0
""",
    "self-of-a-builtin": "if print.__self__: print('GOT')",
    "subclasses-of-object": "if object.__subclasses__(): print('GOT')",
    "subclasses-through-mro": "if type(1).mro()[-1].__subclasses__(): print('GOT')",
    "globals-of-a-function": "def f(): pass\nif f.__globals__: print('GOT')",
    "builtins-by-name": "if __builtins__: print('GOT')",
    "loader-by-name": "if __loader__ is None: print('GOT')",
    # -- strings that the standard library evaluates
    "evaluated-forward-reference": COMPUTED
    + """
import typing
reference = typing.get_args(typing.List[import_os])[0]
if reference._evaluate({}, {}, recursive_guard=frozenset()): print("GOT")
""",
    "evaluated-forward-reference-by-star": COMPUTED
    + """
from typing import *
if ForwardRef(import_os)._evaluate({}, {}, recursive_guard=frozenset()): print("GOT")
""",
    "evaluated-type-hints": COMPUTED
    + """
import typing
found = []
class A: x: "typing.cast(int, found.append(1))"
typing.get_type_hints(A)
if found: print("GOT")
""",
    "evaluated-type-hints-by-star": """
from typing import *
found = []
hint = "[found.append(1), int][1]"
class A: x: hint
get_type_hints(A)
if found: print("GOT")
""",
    # -- names that mean something where they are keys, or that functions of the library act upon
    "match-args-in-a-dict-for-type": """
import random
class Meta(type):
    def __instancecheck__(cls, instance): return True
Any = Meta("Any", (), {"__match_args__": ("__globals__",)})
match random.Random.shuffle:
    case Any(found):
        if found["_os"]: print("GOT")
""",
    "match-args-in-a-namespace": """
import random
class Meta(type):
    def __instancecheck__(cls, instance): return True
    def __new__(meta, name, bases, space):
        space["__match_args__"] = ("__globals__",)
        return super().__new__(meta, name, bases, space)
class Any(metaclass=Meta): pass
match random.Random.shuffle:
    case Any(found):
        if found["_os"]: print("GOT")
""",
    "match-args-by-three-arguments-of-type": """
line = "_" * 2
class Meta(type):
    def __instancecheck__(cls, instance): return True
Base = Meta
made = type("Any", (), {line + "match" + "_args" + line: ("real",)})
if made: print("GOT")
""",
    "private-member-of-a-module-in-a-list": "import random\nif [random][0]._inst: print('GOT')",
    "private-member-of-a-module-in-a-call": """
import random
def f(module): return module._inst
if f(random): print("GOT")
""",
    "private-member-of-a-module-by-keyword": """
import random
def f(module=None): return module._inst
if f(module=random): print("GOT")
""",
    "stream-of-a-subclass-of-redirect-stdout": """
import contextlib
class Redirect(contextlib.redirect_stdout):
    _stream = "path"
with Redirect(5): print("GOT")
""",
    "attribute-by-copy-with-slot-state": """
import copy
class Keep:
    def __setattr__(self, name, value): print("GOT", name)
    def __reduce_ex__(self, version): return Keep, (), (None, {"_" * 2 + "class" + "_" * 2: int})
copy.copy(Keep())
""",
    "attribute-by-object-setattr": """
class A: pass
class B: pass
x = A()
object.__setattr__(x, "_" * 2 + "class" + "_" * 2, B)
if isinstance(x, B): print("GOT")
""",
    "attribute-by-a-computed-format": """
parts = ["{0.", "real.__cl", "ass__}"]
if "".join(parts).format(1): print("GOT")
""",
}  # fmt: skip

# Let through, since the jail looks at it while it runs.
WATCHED = {
    "evaluated-singledispatch-annotation": """
import functools
found = []
hint = "[found.append(1), int][1]"
@functools.singledispatch
def f(x): pass
@f.register
def g(x: hint): pass
if found: print("GOT")
""",
    "evaluated-singledispatchmethod-annotation": """
import functools
found = []
hint = "[found.append(1), int][1]"
class A:
    @functools.singledispatchmethod
    def f(self, x): pass
    @f.register
    def g(self, x: hint): pass
if found: print("GOT")
""",
    "attribute-by-computed-getattr": "n = '_' * 2\nif getattr(print, n + 'self' + n): print('GOT')",
    "attribute-by-computed-setattr": """
class A: pass
class B: pass
x, n = A(), "_" * 2
setattr(x, n + "class" + n, B)
if isinstance(x, B): print("GOT")
""",
    "module-by-computed-getattr": "import random\nn = '_' + 'os'\nif getattr(random, n): print('GOT')",
    "a-name-before-it-is-bound": "print(eval('\"GOT\"'))\neval = 1",
    "a-name-bound-in-another-scope": "def f(eval): return 1\nprint(eval('\"GOT\"'))",
    "a-name-bound-in-a-class": "class A: eval = 1\nprint(eval('\"GOT\"'))",
    "a-name-bound-never": "if 0: vars = 1\nif vars(): print('GOT')",
    "modules-of-sys": "import sys\nn = 'mod' + 'ules'\nif getattr(sys, n): print('GOT')",
    "sys-through-a-loop": "import sys as s\nn = 'mod' + 'ules'\nfor x in [n]:\n    if getattr(s, x): print('GOT')",
}  # fmt: skip


@pytest.mark.parametrize("code", WATCHED.values(), ids=WATCHED)
def test_the_jail_stops_it_while_it_runs(code):
    output = jail.run(code, policy=True)
    assert "Output" not in output and output.outcome == "error", output


@pytest.mark.parametrize("code", WATCHED.values(), ids=WATCHED)
def test_nothing_but_the_guards_stops_it(code, monkeypatch):
    monkeypatch.setattr(wire, "GUARDED", 0)
    output = jail.run(code, policy=True)
    assert output.startswith("Output") and "GOT" in output, output


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
def test_policy_refuses_it(code):
    output = jail.run(code, policy=True)
    assert "GOT" not in output
    assert output.outcome == "refused", output
    assert jail.run("print(6 * 7)", policy=True) == "Output:\n42"


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
def test_it_works_without_the_policy(code):
    output = jail.run(code)
    if "GOT" not in output and output.outcome == "error":
        pytest.skip(f"this Python denies it by itself: {output}")
    assert output.outcome == "ok" and "GOT" in output


@pytest.mark.parametrize("code", ENCODINGS.values(), ids=ENCODINGS)
def test_what_runs_is_the_text_that_was_checked(code):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code.encode(), "<code>", "exec"), {})
    assert "GOT" in printed.getvalue()
    output = jail.run(code, policy=True)
    assert output.outcome == "ok" and "GOT" not in output
