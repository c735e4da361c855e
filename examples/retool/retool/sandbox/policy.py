"""What the host has to know of a source before it runs: may it, and how. Read off the syntax tree, never off the text.

This is the first layer of the sandbox, advisory and not a security boundary: it turns away what a model tries by habit,
with words that say what may be used instead, and leaves the rest to the jail (``worker.py``). It takes linear time, recurses
nowhere, imports nothing that the source names beyond a fixed set of standard modules, and turns every way in which the
parser fails into a result. Python's parser needs a millisecond for a kilobyte and holds the interpreter meanwhile, so
the host has longer sources reviewed by a process of its own, which runs `main`.

Refused: modules outside `allowed`, however they are reached (plain and star imports, aliases, attributes of other
modules, assignments, walrus), and modules used as values, which could not be followed; the names of functions that
evaluate, open or look into scopes; special attributes that lead on, be they written out, in `getattr` and its kin, in
format strings, in class patterns, as keys of a class's namespace or in strings that `typing` evaluates; private names of
modules; attributes that lead to frames and code. Ordinary code stays: special methods, their definition, their call and
their reading, `x.__class__`, private attributes of one's own objects, one's own names and attributes such as `input` or
`types`. Where a name is computed, or is one's own only if it is bound in time, the source is `guarded`: the jail looks at
it while it runs (``notebook.py``). Whoever builds such names on purpose gets past all of this, and then meets the jail.
"""

import ast
import functools
import importlib
import json
import re
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from types import ModuleType
from typing import Any, NamedTuple

from retool.sandbox.names import (
    ATTRIBUTE_FUNCTIONS,
    DEFAULT_MODULES,
    FORBIDDEN_ATTRIBUTES,
    FORBIDDEN_KEYS,
    FORBIDDEN_METHODS,
    FORBIDDEN_MODULES,
    FORBIDDEN_NAMES,
    GUARDED_FUNCTIONS,
    MAX_RECURSION,
    MODULE_ATTRIBUTE_FUNCTIONS,
    MODULE_HINTS,
    NAME_HINTS,
    OWN_NAMES,
    READABLE_DUNDERS,
    SHOWING_FUNCTIONS,
    SPECIAL_METHODS,
    STAND_INS,
)

MAX_CODE_BYTES = 60_000
MAX_ANNOTATION_CHARS = 500  # of a type written as a string
MAX_MESSAGE_CHARS = 1000
SOURCE_NAME = "<code>"
DATE_PARSER = "_strptime"
# What these functions import when they are called.
LATE_IMPORTS = {"strptime": DATE_PARSER, "singledispatch": "typing", "singledispatchmethod": "typing"}
GENERIC = {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, getattr(ast, "TypeAlias", None)}
# A field of a format string that reads a special attribute, or text that is a part of some such field.
_SUSPICIOUS_TEXT = re.compile(
    r"\{[^{}]*[.\[][^{}]*(?:__|" + "|".join(sorted(FORBIDDEN_ATTRIBUTES)) + r")|\{[^{}]*\.[^{}]*$|^[^{]*__\w*[.!:}\[]"
)
_SEMICOLON = re.compile(rb"[ \t\f]*;")
MAX_PROBLEMS = 8  # that a refusal lists
Kinds = defaultdict[type | None, list[Any]]  # nodes by their class
_CHILD_FIELDS: dict[type, tuple[str, ...]] = {}  # by class of node: fields that hold nodes, last first


# What the parser finds odd in a model's code is no news for the host's log.
warnings.filterwarnings("ignore", module=re.escape(SOURCE_NAME))


class Review(NamedTuple):
    """What the host learns of a source. Plain values, so that another process can tell them."""

    refusal: str = ""  # what is refused and what may be used instead; "" if the code may run
    unreadable: str = ""  # what Python says of a source that it cannot parse; nothing of it was checked
    shown: tuple[int, int] = (0, 0)  # first and last byte of a last expression, whose value is shown; (0, 0): none
    imports: tuple[str, ...] = ()  # modules, in full
    guarded: bool = False  # it was let through because the jail looks at it while it runs (``notebook.py``)


def review(code: str, allowed: Set[str]) -> Review:
    """`allowed`: the modules that code may use, packages with all that lies in them."""
    try:
        if len(code) > MAX_CODE_BYTES or len(code.encode()) > MAX_CODE_BYTES:
            problem = f"the code is longer than {MAX_CODE_BYTES} bytes. Use a shorter program."
            return Review(refusal=problem, unreadable=problem)
        tree = ast.parse(code, SOURCE_NAME)
    except SyntaxError as error:  # not a matter of safety: nothing runs, and the model sees what Python says
        return Review(unreadable=_describe(error, code))
    except UnicodeEncodeError:
        problem = "the code holds characters that are not valid Unicode. Write them as escapes."
    except ValueError as error:
        problem = f"{error}." + (" Remove the null characters." if "\0" in code else "")
    except (RecursionError, MemoryError):
        problem = "the code is nested too deeply. Use a loop or a list."
    else:
        nodes = list(_walk(tree))
        kinds = _by_kind(nodes)
        check = _PolicyCheck(allowed)
        refusal = _listed(check.run(nodes, kinds), allowed)
        shown, imports = _last_expression(code, tree), _imports(code, kinds)
        return Review(refusal, "", shown, imports, check.guarded and not refusal)
    return Review(refusal=problem, unreadable=problem)


def _describe(error: SyntaxError, code: str) -> str:
    lines = code.split("\n")
    line = lines[error.lineno - 1].strip() if error.lineno and error.lineno <= len(lines) else ""
    if re.match(r"[%!]\s*\w|%%|\w[\w.]*\?+$", line):
        return (
            f"line {error.lineno}: {line[:200]!r} is a command of notebooks, which is not available here, and no Python "
            "(SyntaxError). Write plain Python; only the modules that are there can be imported."
        )
    text = "".join(traceback.format_exception_only(type(error), error)).strip("\n")
    return text.replace(f'  File "{SOURCE_NAME}", line ', "line ", 1)[:MAX_MESSAGE_CHARS]


def _listed(problems: list[tuple[int, str]], allowed: Set[str]) -> str:
    """All problems, each once, since each would cost another call."""
    if not problems:
        return ""
    lines: dict[str, int] = {}
    for line, problem in sorted(problems):
        lines.setdefault(problem, line)
    listed = [f"line {line}: {problem}" if line else problem for problem, line in lines.items()]
    if len(listed) > MAX_PROBLEMS:
        listed[MAX_PROBLEMS:] = [f"and {len(listed) - MAX_PROBLEMS} more"]
    if any(problem.startswith("module ") for problem in lines):
        listed.append(f"Available modules: {', '.join(sorted(allowed | STAND_INS.keys()))}.")
    return "\n".join(listed)


def _last_expression(code: str, tree: ast.Module) -> tuple[int, int]:
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return 0, 0
    last, source = tree.body[-1], code.encode()
    assert last.end_lineno is not None and last.end_col_offset is not None  # the parser sets both
    end = _position(source, last.end_lineno, last.end_col_offset)
    if _SEMICOLON.match(source, end):  # which asks a notebook to show nothing
        return 0, 0
    return _position(source, last.lineno, last.col_offset), end


def _position(source: bytes, line: int, column: int) -> int:
    position = 0
    for _ in range(line - 1):
        position = source.index(b"\n", position) + 1
    return position + column


def _by_kind(nodes: list[ast.AST]) -> Kinds:
    """The nodes of each class, in source order: for those who look at some kinds alone, once for all of them."""
    kinds: Kinds = defaultdict(list)
    for node in nodes:
        kinds[node.__class__].append(node)
    return kinds


def _imports(code: str, kinds: Kinds) -> tuple[str, ...]:
    """Also what Python imports by itself when the code comes to a name or a construct that needs it."""
    modules = {alias.name for node in kinds[ast.Import] for alias in node.names}
    modules.update(node.module or "" for node in kinds[ast.ImportFrom])
    if not code.isascii() or any(name in code for name in LATE_IMPORTS):  # Python takes look-alike letters for these
        names = {alias.name for node in kinds[ast.ImportFrom] for alias in node.names}
        names.update(node.attr for node in kinds[ast.Attribute])
        names.update(node.id for node in kinds[ast.Name])
        modules.update(LATE_IMPORTS[name] for name in names & LATE_IMPORTS.keys())
    if any(getattr(node, "type_params", None) for kind in GENERIC for node in kinds[kind]):  # from Python 3.12 on
        modules.add("typing")
    return tuple(modules - {""})


class Refused(Exception):
    """Its arguments say what is refused and what may be used instead."""


def _walk(*roots: ast.AST) -> Iterator[ast.AST]:
    """All nodes in source order, parents first, without recursion; operators and contexts are left out."""
    stack: list[Any] = list(roots[::-1])
    while stack:
        node = stack.pop()
        kind = node.__class__
        fields = _CHILD_FIELDS.get(kind)
        if fields is None:
            names = getattr(kind, "_fields", ())
            fields = _CHILD_FIELDS[kind] = tuple(name for name in names[::-1] if name not in ("ctx", "op", "ops"))
        if not isinstance(node, ast.AST):
            continue
        yield node
        for name in fields:
            value = getattr(node, name, None)
            if value.__class__ is list:
                stack.extend(value[::-1])
            elif isinstance(value, ast.AST):
                stack.append(value)


def _is_dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def is_allowed(module: str, allowed: Set[str]) -> bool:
    """Whether the module or a package it lies in is allowed; private modules never are."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in allowed for end in range(len(parts))) and not any(
        part.startswith("_") and part not in allowed for part in parts
    )


@functools.cache
def _module_members(module: str) -> dict[str, str]:
    """Modules that a module of the default set gives away as its attributes: {attribute: module}.

    Others are not imported into the host for this; what must not be had through them is refused by name.
    """
    if module not in DEFAULT_MODULES:
        return {}
    members = vars(importlib.import_module(module))
    return {name: member.__name__ for name, member in members.items() if isinstance(member, ModuleType)}


def _member_module(module: str, attribute: str) -> str | None:
    """The module that `module.attribute` is, if it is one."""
    submodule = f"{module}.{attribute}"
    return _module_members(module).get(attribute) or (submodule if submodule in sys.modules else None)


def _folded(node: ast.expr) -> object:
    """The value of an expression of constants, as far as names of attributes and limits are written; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _folded(node.left), _folded(node.right)
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
        return left + right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(left) < 1e9 and abs(right) < 99:
        if isinstance(node.op, (ast.Pow, ast.LShift)):
            return int(left) ** int(right) if isinstance(node.op, ast.Pow) else int(left) << int(right)
        if isinstance(node.op, ast.Mult):
            return left * right
    return None


class _PolicyCheck:
    """One look at a tree. Names bound to modules are followed through imports and assignments.

    Attributes:
        guarded: what was let through is looked at again by the jail, while it runs.
    """

    def __init__(self, allowed: Set[str]):
        self.allowed = allowed
        self.guarded = False
        self.modules: dict[str, set[str]] = {}  # names: the modules they may stand for
        self.attribute_functions = {name: name for name in ATTRIBUTE_FUNCTIONS}
        self.accepted: set[int] = set()  # ids of function nodes whose call was looked at
        self.used: set[int] = set()  # ids of nodes that may be modules, since only a member is taken or it is shown
        self.bound: set[str] = set()  # names that the program binds by itself
        self.own_attributes: set[str] = set()  # that the program gives to its objects
        # Checked when all imports are known: assignments of names and attributes to names, and attribute accesses.
        self.assignments: list[tuple[list[str], ast.expr]] = []
        self.module_uses: list[tuple[ast.expr, str, ast.expr]] = []
        self.resolved: dict[int, set[str]] = {}  # by id of an attribute node
        self.star_import = False
        self.forbidden_name = ""  # an attribute that a star import may have made a name
        self.dynamic_format = False
        self.suspicious_text = ""

    def run(self, nodes: list[ast.AST], kinds: Kinds) -> list[tuple[int, str]]:
        """What is refused, with its line; line 0 of what is not on one line."""
        problems: list[tuple[int, str]] = []
        self.collect(kinds)
        for node in nodes:
            check = self.CHECKS.get(node.__class__)
            if check is not None:
                try:
                    check(self, node)
                except Refused as refused:
                    problems += [(getattr(node, "lineno", 0), problem) for problem in refused.args]
        for names, value in self.assignments:
            for name in names:
                self.modules.setdefault(name, set()).update(self.resolve(value))
        for base, attribute, used in reversed(self.module_uses):  # inner ones first, so that each is resolved once
            for module in self.resolve(base):
                try:
                    self.check_member(module, attribute)
                    self.check_value(used, _member_module(module, attribute))
                except Refused as refused:
                    problems.append((base.lineno, str(refused)))
        for node in kinds[ast.Name]:
            if node.id in self.modules and node.id not in self.bound:
                for module in self.modules[node.id] if isinstance(node.ctx, ast.Load) else ():
                    try:
                        self.check_value(node, module)
                    except Refused as refused:
                        problems.append((node.lineno, str(refused)))
        if self.star_import and self.forbidden_name:
            problems.append((0, f"{self.forbidden_name!r} is not available."))
        if self.dynamic_format and self.suspicious_text:
            problems.append((0, f"a format string that may read {self.suspicious_text!r}. Use an f-string."))
        return problems

    def collect(self, kinds: Kinds) -> None:
        """Names and attributes that are the program's own."""
        self.bound.update(node.id for node in kinds[ast.Name] if node.ctx.__class__ is ast.Store)
        self.bound.update(node.arg for node in kinds[ast.arg])
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            self.bound.update(node.name for node in kinds[kind])
        self.own_attributes.update(node.attr for node in kinds[ast.Attribute] if node.ctx.__class__ is ast.Store)
        for statement in (statement for node in kinds[ast.ClassDef] for statement in node.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.own_attributes.add(statement.name)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.own_attributes.update(target.id for target in targets if isinstance(target, ast.Name))

    # Imports

    def check_import(self, node: ast.Import) -> None:
        refused = []
        for alias in node.names:
            try:
                self.check_module(alias.name)
            except Refused as problem:
                refused.append(str(problem))
            bound, module = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            self.modules.setdefault(bound, set()).add(module)
        if refused:
            raise Refused(*refused)

    def check_import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            raise Refused("relative imports are not available. Import a module by its name.")
        self.check_module(node.module)
        for alias in node.names:
            self.check_member(node.module, alias.name)
            self.star_import |= alias.name == "*"
            bound = alias.asname or alias.name
            if alias.name in ATTRIBUTE_FUNCTIONS:
                self.attribute_functions[bound] = alias.name
            self.guarded |= alias.name in ("singledispatch", "singledispatchmethod")
            member = _module_members(node.module).get(alias.name)
            if member:
                self.modules.setdefault(bound, set()).add(member)

    def has_stand_in(self, module: str) -> bool:
        return module in STAND_INS and module not in self.allowed

    def check_module(self, module: str) -> None:
        if self.has_stand_in(module):
            self.guarded = True
        elif not is_allowed(module, self.allowed):
            hint = MODULE_HINTS.get(module.split(".")[0])
            raise Refused(f"module {module[:200]!r} is not available." + (f" {hint}" if hint else ""))

    def check_member(self, module: str, name: str) -> None:
        """`name` taken out of `module`, by a from-import or as an attribute."""
        if self.has_stand_in(module):
            if name not in STAND_INS[module] | READABLE_DUNDERS | {"*"}:
                hint = (
                    NAME_HINTS["input"] if name == "stdin" else f"Available: {', '.join(sorted(STAND_INS[module]))}."
                )
                raise Refused(f"'{module}.{name[:200]}' is not available. {hint}")
            return
        if name.startswith("_") and name not in READABLE_DUNDERS:
            raise Refused(f"{name[:200]!r} is private to {module!r}. Use the module's public names.")
        self.check_attribute_name(name, own=False)
        member = _module_members(module).get(name)
        if member and not is_allowed(member, self.allowed):
            raise Refused(f"module {member!r}, reached through {module!r}, is not available.")

    def check_value(self, node: ast.expr, module: str | None) -> None:
        """A module that is put into a list or handed to a function could not be followed from there."""
        if module and id(node) not in self.used:
            raise Refused(f"module {module!r} is used as a value. Write the names out that you need of it.")

    def resolve(self, node: ast.expr) -> set[str]:
        """The modules that an expression of names and dots may stand for."""
        path: list[ast.Attribute] = []
        while isinstance(node, ast.Attribute) and id(node) not in self.resolved:
            path.append(node)
            node = node.value
        if isinstance(node, ast.Attribute):
            modules = self.resolved[id(node)]
        else:
            modules = self.modules.get(node.id, set()) if isinstance(node, ast.Name) else set()
        for attribute in reversed(path):
            modules = {member for module in modules if (member := _member_module(module, attribute.attr))}
            self.resolved[id(attribute)] = modules
        return modules

    def check_assign(self, node: ast.Assign | ast.NamedExpr | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and isinstance(node.value, (ast.Name, ast.Attribute)):
            self.assignments.append((names, node.value))
            if len(names) == len(targets):
                self.used.add(id(node.value))
            if isinstance(node.value, ast.Name):  # what the name stood for stays known by it
                self.bound.difference_update(set(names) & self.modules.keys())
        if isinstance(node, ast.AnnAssign):
            self.check_annotation(node.annotation)
            if isinstance(node.target, ast.Name) and _is_dunder(node.target.id):  # a field of a dataclass
                raise Refused(f"the special name {node.target.id!r} cannot be a field.")

    # Names and attributes

    def is_forbidden_module(self, name: str) -> bool:
        return name in FORBIDDEN_MODULES and name not in self.allowed

    def check_name(self, node: ast.Name) -> None:
        name = node.id
        loaded = isinstance(node.ctx, ast.Load)
        if name in FORBIDDEN_NAMES:
            if name not in OWN_NAMES & self.bound or isinstance(node.ctx, ast.Del):
                raise Refused(f"{name!r} is not available." + (f" {NAME_HINTS[name]}" if name in NAME_HINTS else ""))
            self.guarded = True  # where it is not bound yet, or no more, it is not Python's own either
        elif _is_dunder(name) and loaded and name not in READABLE_DUNDERS | {"__debug__"}:
            if name not in SPECIAL_METHODS & self.bound:
                raise Refused(f"the special name {name[:200]!r} is not available.")
        if name in self.attribute_functions and loaded and id(node) not in self.accepted:
            raise Refused(f"{name!r} can only be called directly, with names written out.")
        if name in FORBIDDEN_ATTRIBUTES:
            self.forbidden_name = name
        if name in FORBIDDEN_METHODS and not loaded:
            raise Refused(f"the special method {name!r} cannot be defined.")

    def check_attribute_name(self, name: str, own: bool = True) -> None:
        """`own`: of an object that may be one of the program's own, and so may have it from the program."""
        is_own = own and name in self.own_attributes
        if name in FORBIDDEN_ATTRIBUTES or (self.is_forbidden_module(name.strip("_")) and not is_own):
            raise Refused(f"the attribute {name[:200]!r} is not available.")
        if _is_dunder(name) and name not in READABLE_DUNDERS:
            instead = "type(x)" if name == "__class__" else "operators, built-in functions or super()"
            raise Refused(f"the special attribute {name[:200]!r} is not available. Use {instead}.")

    def check_attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        self.used.add(id(node.value))
        if id(node) in self.accepted:
            return
        if name in MODULE_ATTRIBUTE_FUNCTIONS:
            raise Refused(f"{name!r} can only be called directly, with names written out.")
        if name in ("format", "format_map"):
            self.check_format(node.value)
        self.guarded |= name in ("singledispatch", "singledispatchmethod")
        readable = isinstance(node.ctx, ast.Load) and (name in SPECIAL_METHODS or name == "__class__")
        if name in ("__setattr__", "__delattr__") and not self.is_super(node.value):
            raise Refused(f"{name!r} can only be called directly, with the attribute's name written out.")
        if not readable:
            self.check_attribute_name(name)
        if isinstance(node.value, (ast.Name, ast.Attribute)):
            self.module_uses.append((node.value, name, node))

    @staticmethod
    def is_super(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"

    def check_call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            kind = self.attribute_functions.get(function.id)
            if function.id in SHOWING_FUNCTIONS:
                self.used.update(map(id, node.args))
            if function.id == "type" and len(node.args) > 1:
                raise Refused("'type' with three arguments is not available. Write a class statement.")
        elif isinstance(function, ast.Attribute):
            kind = function.attr if function.attr in MODULE_ATTRIBUTE_FUNCTIONS else None
            if function.attr in ("__setattr__", "__delattr__"):
                kind = "setattr" if not self.is_super(function.value) else None
        else:
            kind = None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "setrecursionlimit" and node.args:
            limit = _folded(node.args[0])
            if isinstance(limit, (int, float)) and limit > MAX_RECURSION:
                raise Refused(f"sys.setrecursionlimit({int(limit)}): the largest limit is {MAX_RECURSION}.")
        if kind is None:
            return
        if kind == "wraps":
            if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
                self.accepted.add(id(function))
            return
        named = node.args if kind == "attrgetter" else node.args[:1] if kind == "methodcaller" else node.args[1:2]
        for argument in named:
            text = _folded(argument)
            if not isinstance(text, str):
                if (
                    kind not in GUARDED_FUNCTIONS
                    or isinstance(argument, ast.Starred)
                    or not isinstance(function, ast.Name)
                ):
                    raise Refused(f"{kind!r} with a computed name. Write the attribute's name out.")
                self.guarded = True
                continue
            for part in text.split("."):
                self.check_attribute_name(part)
                self.dynamic_format |= part in ("format", "format_map")
                if kind == "getattr" and isinstance(node.args[0], (ast.Name, ast.Attribute)):
                    self.module_uses.append((node.args[0], part, node))
        if named and not any(isinstance(argument, ast.Starred) for argument in node.args):
            self.accepted.add(id(function))

    def check_class_pattern(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self.check_attribute_name(name)

    # Strings that Python evaluates

    def check_format(self, template: ast.expr) -> None:
        text = _folded(template)
        if isinstance(text, str):
            for field in re.findall(r"\{([^{}!:]*)", text):
                for part in re.findall(r"\.(\w+)", field):
                    self.check_attribute_name(part)
        else:
            self.dynamic_format = True

    def check_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _SUSPICIOUS_TEXT.search(node.value):
            self.suspicious_text = node.value[:40]

    def check_key(self, node: ast.expr | None) -> None:
        if isinstance(node, ast.expr) and _folded(node) in FORBIDDEN_KEYS:
            raise Refused(f"the special name {_folded(node)!r} is not available as a key.")

    def check_dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            self.check_key(key)

    def check_subscript(self, node: ast.Subscript) -> None:
        self.check_key(node.slice)

    def check_annotation(self, annotation: ast.expr | None) -> None:
        """Strings in annotations are code to typing and functools: those that call or look into something count."""
        for node in _walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                try:
                    tree = ast.parse(node.value[:MAX_ANNOTATION_CHARS], SOURCE_NAME)
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue  # nor can anyone else evaluate it
                parts = list(_walk(tree))
                if any(isinstance(part, (ast.Call, ast.Attribute)) for part in parts):
                    for _, problem in _PolicyCheck(self.allowed).run(parts, _by_kind(parts)):
                        raise Refused(problem)

    def check_argument(self, node: ast.arg) -> None:
        self.check_annotation(node.annotation)

    def check_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.check_annotation(node.returns)
        if node.name in FORBIDDEN_METHODS:
            raise Refused(f"the special method {node.name!r} cannot be defined.")

    def check_class(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if name in ("redirect_stdout", "redirect_stderr"):
                raise Refused(f"a subclass of {name!r} is not available. Use it as it is.")

    CHECKS: dict[type, Callable[..., None]] = {
        ast.Import: check_import,
        ast.ImportFrom: check_import_from,
        ast.Assign: check_assign,
        ast.AnnAssign: check_assign,
        ast.NamedExpr: check_assign,
        ast.Name: check_name,
        ast.Attribute: check_attribute,
        ast.Call: check_call,
        ast.MatchClass: check_class_pattern,
        ast.Constant: check_constant,
        ast.arg: check_argument,
        ast.FunctionDef: check_function,
        ast.AsyncFunctionDef: check_function,
        ast.ClassDef: check_class,
        ast.Dict: check_dict,
        ast.Subscript: check_subscript,
    }


def main() -> None:
    """Review what comes in, one JSON text a line, until the host closes the pipe or dies."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = review(request["code"], frozenset(request["allowed"]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
