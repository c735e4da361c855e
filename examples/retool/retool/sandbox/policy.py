"""What of a compiled program is refused. Runs in the call's own child, before the program does.

Advisory, not a security boundary: it turns away what a model tries by habit, all problems of a program at once, with
words that say what may be used instead. Whoever builds a name on purpose gets past it, and is in the jail.

Refused: modules outside `allowed`, and those that hang on modules; the names of functions that evaluate, open or look
into scopes, unless the program binds them itself; special attributes that lead on, written out, given to `getattr` and
its kin, or in a class pattern; private names of modules; attributes that lead to frames and code. Ordinary code stays:
special methods, `x.__class__`, private attributes of one's own objects.

Read from code objects, which takes linear time. Of most programs a look at the tables of names is enough; of the
others the instructions are read once.
"""

import sys
from collections import namedtuple
from collections.abc import Iterable, Iterator
from types import CodeType

import opcode
from retool.sandbox.policy_tables import (
    ATTRIBUTE_FUNCTIONS,
    FORBIDDEN_ATTRIBUTES,
    FORBIDDEN_MODULES,
    FORBIDDEN_NAMES,
    MODULE_HINTS,
    NAME_HINTS,
    READABLE_DUNDERS,
    SPECIAL_METHODS,
    STAND_INS,
)

MAX_PROBLEMS = 8  # that a refusal lists
MAX_NAME_CHARS = 200

# Names that compilers of some version put into every class, module or annotation.
_ORDINARY = READABLE_DUNDERS | SPECIAL_METHODS | {"__class__", "__module__", "__annotations__"}
_SUSPICIOUS = FORBIDDEN_NAMES | FORBIDDEN_ATTRIBUTES | FORBIDDEN_MODULES | ATTRIBUTE_FUNCTIONS

# What instructions that matter here do with the name that their argument numbers, and by how many bits it is shifted.
_IMPORT, _FROM, _LOAD, _STORE, _ATTRIBUTE, _ASSIGN, _CONSTANT, _PATTERN = range(8)
_KINDS: dict[int, tuple[int, int]] = {
    opcode.opmap[name]: (kind, shift)
    for name, kind, shift in (
        ("IMPORT_NAME", _IMPORT, 0),
        ("IMPORT_FROM", _FROM, 0),
        ("LOAD_NAME", _LOAD, 0),
        ("LOAD_GLOBAL", _LOAD, int(sys.version_info >= (3, 11))),
        ("LOAD_FROM_DICT_OR_GLOBALS", _LOAD, 0),
        ("STORE_NAME", _STORE, 0),
        ("STORE_GLOBAL", _STORE, 0),
        ("LOAD_ATTR", _ATTRIBUTE, int(sys.version_info >= (3, 12))),
        ("LOAD_METHOD", _ATTRIBUTE, 0),
        ("LOAD_SUPER_ATTR", _ATTRIBUTE, 2),
        ("STORE_ATTR", _ASSIGN, 0),
        ("DELETE_ATTR", _ASSIGN, 0),
        ("LOAD_CONST", _CONSTANT, 0),
        ("MATCH_CLASS", _PATTERN, 0),
    )
    if name in opcode.opmap
}
_IMPORT_NAME, _EXTENDED = opcode.opmap["IMPORT_NAME"], opcode.EXTENDED_ARG


# What an instruction does with a name.
_Use = namedtuple(
    "_Use",
    (
        "kind",
        "name",
        "of",  # the module that it is taken from, or the name whose attribute it is; "" where that is no name
        "code",
        "position",  # of the instruction in its code, in instructions
    ),
)


def _line(code: CodeType, position: int) -> int:
    offset = 2 * position
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return next(lines, None) or code.co_firstlineno


def refusal(codes: Iterable[CodeType], allowed: frozenset[str]) -> str:
    """What is refused and what may be used instead, or "".

    Args:
        codes: the program, which may be compiled in parts.
        allowed: the modules that it may use, packages with all that lies in them.
    """
    codes, ordinary = list(codes), True
    for code in codes:  # plain loops: a comprehension is a function that each child would make anew
        for constant in code.co_consts:
            if constant.__class__ is CodeType:
                codes.append(constant)
        ordinary = ordinary and _is_ordinary(code, allowed)
    if ordinary:
        return ""
    uses = [use for code in codes for use in _uses(code)]
    bound = {use.name for use in uses if use.kind == _STORE}
    modules = {use.name for use in uses if use.kind == _STORE and use.of}
    problems: dict[str, _Use] = {}  # each once, since it would cost another call
    for use in uses:
        problem = _problem(use, allowed, bound, modules)
        if problem:
            problems.setdefault(problem, use)
    if not problems:
        return ""
    shown = sorted((_line(use.code, use.position), problem) for problem, use in list(problems.items())[:MAX_PROBLEMS])
    listed = [f"line {line}: {problem}" for line, problem in shown]
    if len(problems) > MAX_PROBLEMS:
        listed.append(f"and {len(problems) - MAX_PROBLEMS} more")
    if any(problem.startswith("module ") for problem in problems):
        listed.append(f"Available modules: {', '.join(sorted(allowed | STAND_INS.keys()))}.")
    return "\n".join(listed)


def is_allowed(module: str, allowed: frozenset[str]) -> bool:
    """Whether the module or a package it lies in is allowed; private modules never are."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in allowed for end in range(min(len(parts), 9))) and not any(
        part.startswith("_") and part not in allowed for part in parts
    )


def _is_ordinary(code: CodeType, allowed: frozenset[str]) -> bool:
    """By its tables alone. Short, since each object that a child touches is on a page that is copied for it."""
    names = code.co_names
    if not _SUSPICIOUS.isdisjoint(names):
        return False
    for name in names:
        if name[:1] == "_" and name not in _ORDINARY:
            return False
    for constant in code.co_consts:
        if constant.__class__ is tuple and _names_special(constant):
            return False
    operations = code.co_code[::2]
    position = operations.find(_IMPORT_NAME)
    while position >= 0:
        if operations[position - 1] == _EXTENDED or names[code.co_code[2 * position + 1]] not in allowed:
            return False
        position = operations.find(_IMPORT_NAME, position + 1)
    return True


def _names_special(constant: object) -> bool:
    """Of a tuple, whether it may hold a class pattern's attributes, one of them special."""
    return isinstance(constant, tuple) and any(isinstance(name, str) and _is_special(name) for name in constant)


def _is_special(name: str) -> bool:
    dunder = len(name) > 4 and name.startswith("__") and name.endswith("__")
    return (dunder and name not in READABLE_DUNDERS | SPECIAL_METHODS) or name in FORBIDDEN_ATTRIBUTES


def _uses(code: CodeType) -> Iterator[_Use]:
    """In the order of the instructions."""
    raw, names, constants = code.co_code, code.co_names, code.co_consts
    takes_names = not ATTRIBUTE_FUNCTIONS.isdisjoint(names)
    extended = 0
    subject = imported = ""  # what the instruction before has loaded, or imported
    module = ""  # that was imported last
    constant: object = None  # that was loaded last
    for position, operation in enumerate(raw[::2]):
        if operation == _EXTENDED:
            extended = (extended | raw[2 * position + 1]) << 8
            continue
        kind, shift = _KINDS.get(operation, (-1, 0))
        if kind < 0:
            extended = 0
            if operation:  # 0 fills up the space after an instruction
                subject = imported = ""
            continue
        number, extended = (extended | raw[2 * position + 1]) >> shift, 0
        if kind == _CONSTANT:
            constant, subject = constants[number], ""
            if takes_names and isinstance(constant, str) and _is_special(constant):
                yield _Use(_ASSIGN, constant, "", code, position)
            continue
        if kind == _PATTERN:
            if isinstance(constant, tuple):
                for name in constant:
                    yield _Use(_ASSIGN, str(name), "", code, position)
            continue
        name = names[number]
        of = module if kind == _FROM else imported if kind == _STORE else subject
        yield _Use(kind, name, of, code, position)
        subject = name if kind == _LOAD else ""
        imported = name if kind == _IMPORT else ""
        module = imported or module


def _problem(use: _Use, allowed: frozenset[str], bound: set[str], modules: set[str]) -> str:
    name = use.name[:MAX_NAME_CHARS]
    if use.kind == _IMPORT:
        if not name:
            return "relative imports are not available. Import a module by its name."
        if is_allowed(use.name, allowed) or (use.name in STAND_INS):
            return ""
        return _with_hint(f"module {name!r} is not available.", MODULE_HINTS.get(name.split(".")[0]))
    if use.kind == _LOAD:
        if use.name in FORBIDDEN_NAMES and use.name not in bound:
            return _with_hint(f"{name!r} is not available.", NAME_HINTS.get(name))
    elif use.kind == _FROM or (use.kind == _ATTRIBUTE and use.of in modules):
        if name.startswith("_") and name not in READABLE_DUNDERS:
            return f"{name!r} is private to {use.of[:MAX_NAME_CHARS]!r}. Use the module's public names."
        if use.name in FORBIDDEN_MODULES and use.name not in allowed:
            return f"module {name!r}, reached through {use.of[:MAX_NAME_CHARS]!r}, is not available."
        if use.name in FORBIDDEN_ATTRIBUTES:
            return f"the attribute {name!r} is not available."
    elif use.kind in (_ATTRIBUTE, _ASSIGN) and _is_special(use.name) and (use.kind, name) != (_ATTRIBUTE, "__class__"):
        if use.name in FORBIDDEN_ATTRIBUTES:
            return f"the attribute {name!r} is not available."
        instead = "type(x)" if name == "__class__" else "operators, built-in functions or super()"
        return f"the special attribute {name!r} is not available. Use {instead}."
    return ""


def _with_hint(problem: str, hint: str | None) -> str:
    return f"{problem} {hint}" if hint else problem
