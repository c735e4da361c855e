"""What the host has to know of a source before it runs: may it, and how. Read off the syntax tree, never off the text.

This is the first layer of the sandbox, advisory and not a security boundary: it turns away what a model tries by habit,
with words that say what may be used instead, and leaves the rest to the jail (``worker.py``). It takes linear time, recurses
nowhere, imports nothing that the source names beyond a fixed set of standard modules, and turns every way in which the
parser fails into a result. Python's parser needs a millisecond for a kilobyte and holds the interpreter meanwhile, so
the host has longer sources reviewed by a process of its own: this file, run as a program.

Refused: modules outside `allowed`, however they are reached (plain and star imports, aliases, attributes of other
modules, assignments, walrus); the names of functions that evaluate, open or look into scopes; special attributes, be
they written out, in `getattr` and its kin, in format strings, in class patterns or in strings that `typing` evaluates;
private names of modules; attributes that lead to frames and code. Ordinary code stays: defining special methods,
`super().__init__()`, `Base.__init__(self)`, reading `__name__`, private attributes of one's own objects.
"""

import ast
import functools
import importlib
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Set
from types import ModuleType
from typing import Any, NamedTuple

MAX_CODE_BYTES = 60_000
MAX_ANNOTATION_CHARS = 500  # of a type written as a string
MAX_MESSAGE_CHARS = 1000
SOURCE_NAME = "<code>"
# Mathematics and what goes with it. None of these gives files, processes or the interpreter away by a public name but
# for those that are refused below. Not in it: sys, os, io (opens files), types (builds code), inspect, gc, threading.
DEFAULT_MODULES = frozenset(
    "__future__ abc array bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum"
    " fractions functools heapq itertools json math numbers operator pprint random re statistics string textwrap time"
    " typing".split()
)
RANDOM_MODULES = frozenset({"random", "statistics"})  # draw from a shared random state, or give that away
FORBIDDEN_NAMES = frozenset(
    "eval exec open compile input globals vars locals breakpoint help __import__ __builtins__ __loader__ __spec__"
    " __build_class__ __match_args__ __annotations__".split()
)
READABLE_DUNDERS = frozenset({"__name__", "__qualname__", "__doc__"})
# What `super()` is for. A list of what may be, not of what may not: code can name a function of its own `super`.
SUPER_DUNDERS = frozenset(
    f"__{name}__"
    for name in "init new init_subclass post_init set_name repr str format bytes hash bool int float complex index"
    " eq ne lt le gt ge len length_hint contains iter next reversed getitem setitem delitem missing call enter exit"
    " aenter aexit aiter anext await copy deepcopy setattr delattr get set delete prepare instancecheck subclasscheck"
    " add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rmatmul rtruediv"
    " rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor iadd isub imul imatmul itruediv ifloordiv imod ipow"
    " ilshift irshift iand ior ixor neg pos abs invert round trunc floor ceil".split()
)
# Attributes that lead from ordinary objects to frames, code or evaluation of strings, or read attributes by a computed
# name. `singledispatch` evaluates annotations, `make_dataclass` makes fields for class patterns to read.
FORBIDDEN_ATTRIBUTES = frozenset(
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await cr_origin ag_frame ag_code ag_await tb_frame tb_next"
    " f_back f_builtins f_code f_globals f_locals f_trace func_globals func_code"
    " get_type_hints ForwardRef evaluate_forward_ref _evaluate Formatter vformat get_field"
    " update_wrapper singledispatch singledispatchmethod make_dataclass _thread".split()
)
# Modules that must not be had through any object's attribute, whether or not the object is known to be a module; some
# under the name that a default module has for them (`enum.bltns`).
FORBIDDEN_MODULES = frozenset(
    "os sys subprocess builtins bltns importlib ctypes posix socket shutil pickle marshal gc inspect codecs"
    " types".split()
)
# Functions that take names of attributes. `wraps` takes them as its second argument, which nobody needs.
ATTRIBUTE_FUNCTIONS = frozenset({"getattr", "setattr", "delattr", "attrgetter", "methodcaller", "wraps"})
MODULE_ATTRIBUTE_FUNCTIONS = frozenset({"attrgetter", "methodcaller", "wraps"})
DATE_PARSER = "_strptime"
GENERIC = {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, getattr(ast, "TypeAlias", None)}
_SUSPICIOUS_TEXT = re.compile("__|" + "|".join(sorted(FORBIDDEN_ATTRIBUTES)))
_CHILD_FIELDS: dict[type, tuple[str, ...]] = {}  # by class of node: fields that hold nodes, last first


# What the parser finds odd in a model's code is no news for the host's log.
warnings.filterwarnings("ignore", module=re.escape(SOURCE_NAME))


class Review(NamedTuple):
    """What the host learns of a source. Plain values, so that another process can tell them."""

    refusal: str = ""  # what is refused and what may be used instead; "" if the code may run
    unreadable: str = ""  # what Python says of a source that it cannot parse; nothing of it was checked
    shown: tuple[int, int] = (0, 0)  # first and last byte of a last expression, whose value is shown; (0, 0): none
    imports: tuple[str, ...] = ()  # modules, in full


def review(code: str, allowed: Set[str]) -> Review:
    """`allowed`: the modules that code may use, packages with all that lies in them."""
    try:
        if len(code) > MAX_CODE_BYTES or len(code.encode()) > MAX_CODE_BYTES:
            problem = f"the code is longer than {MAX_CODE_BYTES} bytes. Use a shorter program."
            return Review(refusal=problem, unreadable=problem)
        tree = ast.parse(code, SOURCE_NAME)
    except SyntaxError as error:  # not a matter of safety: nothing runs, and the model sees what Python says
        return Review(unreadable=_describe(error))
    except UnicodeEncodeError:
        problem = "the code holds characters that are not valid Unicode. Write them as escapes."
    except ValueError as error:
        problem = f"{error}." + (" Remove the null characters." if "\0" in code else "")
    except (RecursionError, MemoryError):
        problem = "the code is nested too deeply. Use a loop or a list."
    else:
        nodes = list(_walk(tree))
        return Review(_refusal(nodes, allowed), "", _last_expression(code, tree), _imports(nodes))
    return Review(refusal=problem, unreadable=problem)


def _describe(error: SyntaxError) -> str:
    text = "".join(traceback.format_exception_only(type(error), error)).strip("\n")
    return text.replace(f'  File "{SOURCE_NAME}", line ', "line ", 1)[:MAX_MESSAGE_CHARS]


def _refusal(nodes: list[ast.AST], allowed: Set[str]) -> str:
    try:
        _PolicyCheck(allowed).run(nodes)
    except Refused as refused:
        return str(refused)
    return ""


def _last_expression(code: str, tree: ast.Module) -> tuple[int, int]:
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return 0, 0
    last, source = tree.body[-1], code.encode()
    assert last.end_lineno is not None and last.end_col_offset is not None  # the parser sets both
    return _position(source, last.lineno, last.col_offset), _position(source, last.end_lineno, last.end_col_offset)


def _position(source: bytes, line: int, column: int) -> int:
    position = 0
    for _ in range(line - 1):
        position = source.index(b"\n", position) + 1
    return position + column


def _imports(nodes: list[ast.AST]) -> tuple[str, ...]:
    """Also what Python imports by itself when the code comes to a name or a construct that needs it."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.update([node.module or "", *[DATE_PARSER for alias in node.names if alias.name == "strptime"]])
        elif isinstance(node, (ast.Attribute, ast.Name)):
            if (node.attr if isinstance(node, ast.Attribute) else node.id) == "strptime":
                modules.add(DATE_PARSER)
        elif node.__class__ in GENERIC and getattr(node, "type_params", None):  # from Python 3.12 on
            modules.add("typing")
    return tuple(modules)


class Refused(Exception):
    """Carries what is refused and what may be used instead."""


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


class _PolicyCheck:
    """One pass over a tree; raises `Refused`. Names bound to modules are followed through imports and assignments."""

    def __init__(self, allowed: Set[str]):
        self.allowed = allowed
        self.modules: dict[str, set[str]] = {}  # names: the modules they may stand for
        self.attribute_functions = {name: name for name in ATTRIBUTE_FUNCTIONS}
        self.accepted: set[int] = set()  # ids of function nodes whose call was looked at
        # Checked when all imports are known: assignments of names and attributes to names, and attribute accesses.
        self.assignments: list[tuple[list[str], ast.expr]] = []
        self.module_uses: list[tuple[ast.expr, str]] = []
        self.resolved: dict[int, set[str]] = {}  # by id of an attribute node
        self.star_import = False
        self.forbidden_name = ""  # an attribute that a star import may have made a name
        self.dynamic_format = False
        self.suspicious_text = ""

    def run(self, nodes: list[ast.AST]) -> None:
        node: Any = None
        try:
            for node in nodes:
                check = self.CHECKS.get(node.__class__)
                if check is not None:
                    check(self, node)
            for names, value in self.assignments:
                for name in names:
                    self.modules.setdefault(name, set()).update(self.resolve(value))
            for node, attribute in reversed(self.module_uses):  # inner ones first, so that each is resolved once
                for module in self.resolve(node):
                    self.check_member(module, attribute)
        except Refused as refused:
            raise Refused(f"line {node.lineno}: {refused}") from None
        if self.star_import and self.forbidden_name:
            raise Refused(f"{self.forbidden_name!r} is not available.")
        if self.dynamic_format and self.suspicious_text:
            raise Refused(f"a format string that may read {self.suspicious_text!r}. Use an f-string.")

    # Imports

    def check_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.check_module(alias.name)
            bound, module = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
            self.modules.setdefault(bound, set()).add(module)

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
            member = _module_members(node.module).get(alias.name)
            if member:
                self.modules.setdefault(bound, set()).add(member)

    def check_module(self, module: str) -> None:
        if not is_allowed(module, self.allowed):
            raise Refused(f"module {module!r} is not available. Available: {', '.join(sorted(self.allowed))}.")

    def check_member(self, module: str, name: str) -> None:
        """`name` taken out of `module`, by a from-import or as an attribute."""
        if name.startswith("_") and name not in READABLE_DUNDERS:
            raise Refused(f"{name!r} is private to {module!r}. Use the module's public names.")
        self.check_attribute_name(name)
        member = _module_members(module).get(name)
        if member and not is_allowed(member, self.allowed):
            raise Refused(f"module {member!r}, reached through {module!r}, is not available.")

    def resolve(self, node: ast.expr) -> set[str]:
        """The modules that an expression of names and dots may stand for."""
        path = []
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
        if isinstance(node, ast.AnnAssign):
            self.check_annotation(node.annotation)
            if isinstance(node.target, ast.Name) and _is_dunder(node.target.id):  # a field of a dataclass
                raise Refused(f"the special name {node.target.id!r} cannot be a field.")

    # Names and attributes

    def check_name(self, node: ast.Name) -> None:
        name = node.id
        if name in FORBIDDEN_NAMES:
            raise Refused(f"{name!r} is not available, also not as a variable's name.")
        if _is_dunder(name) and isinstance(node.ctx, ast.Load) and name not in READABLE_DUNDERS | {"__debug__"}:
            raise Refused(f"the special name {name!r} is not available.")
        if name in self.attribute_functions and isinstance(node.ctx, ast.Load) and id(node) not in self.accepted:
            raise Refused(f"{name!r} can only be called directly, with names written out.")
        if name in FORBIDDEN_ATTRIBUTES:
            self.forbidden_name = name

    def check_attribute_name(self, name: str) -> None:
        if name in FORBIDDEN_ATTRIBUTES or name.strip("_") in FORBIDDEN_MODULES - self.allowed:
            raise Refused(f"the attribute {name!r} is not available.")
        if _is_dunder(name) and name not in READABLE_DUNDERS:
            instead = "type(x)" if name == "__class__" else "operators, built-in functions or super()"
            raise Refused(f"the special attribute {name!r} is not available. Use {instead}.")

    def check_attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        if id(node) in self.accepted:
            return
        if name in MODULE_ATTRIBUTE_FUNCTIONS:
            raise Refused(f"{name!r} can only be called directly, with names written out.")
        if name in ("format", "format_map"):
            self.check_format(node.value)
        if not (_is_dunder(name) and self.is_super(node.value) and name in SUPER_DUNDERS):
            self.check_attribute_name(name)
        if isinstance(node.value, (ast.Name, ast.Attribute)):
            self.module_uses.append((node.value, name))

    @staticmethod
    def is_super(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"

    def check_call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            kind = self.attribute_functions.get(function.id)
        elif isinstance(function, ast.Attribute):
            kind = function.attr if function.attr in MODULE_ATTRIBUTE_FUNCTIONS else None
            if function.attr == "__init__" and isinstance(function.value, ast.Name):
                self.accepted.add(id(function))  # Base.__init__(self)
        else:
            kind = None
        if kind is None:
            return
        if kind == "wraps":
            if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
                self.accepted.add(id(function))
            return
        named = node.args if kind == "attrgetter" else node.args[:1] if kind == "methodcaller" else node.args[1:2]
        for argument in named:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise Refused(f"{kind!r} with a computed name. Write the attribute's name out.")
            for part in argument.value.split("."):
                self.check_attribute_name(part)
                self.dynamic_format |= part in ("format", "format_map")
                if kind == "getattr" and isinstance(node.args[0], (ast.Name, ast.Attribute)):
                    self.module_uses.append((node.args[0], part))
        if named and not any(isinstance(argument, ast.Starred) for argument in node.args):
            self.accepted.add(id(function))

    def check_class_pattern(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self.check_attribute_name(name)

    # Strings that Python evaluates

    def check_format(self, template: ast.expr) -> None:
        if isinstance(template, ast.Constant) and isinstance(template.value, str):
            for field in re.findall(r"\{([^{}!:]*)", template.value):
                for part in re.findall(r"\.(\w+)", field):
                    self.check_attribute_name(part)
        else:
            self.dynamic_format = True

    def check_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value != "__main__" and _SUSPICIOUS_TEXT.search(node.value):
            self.suspicious_text = node.value[:40]

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
                    _PolicyCheck(self.allowed).run(parts)

    def check_argument(self, node: ast.arg) -> None:
        self.check_annotation(node.annotation)

    def check_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.check_annotation(node.returns)

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
    }


def main() -> None:
    """Review what comes in, one JSON text a line, until the host closes the pipe or dies."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = review(request["code"], frozenset(request["allowed"]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
