"""What model-written code may and may not name: the tables that the source policy goes by."""

from __future__ import annotations

# Mathematics and what goes with it. None of these gives files, processes or the interpreter away by a public name but
# for those that are refused below. Not in it: sys, os, io (opens files), types (builds code), inspect, gc, threading.
DEFAULT_MODULES = frozenset(
    "__future__ abc argparse array bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum"
    " fractions functools hashlib heapq itertools json math numbers operator pprint queue random re statistics string"
    " textwrap time typing".split()
)
# What most calls import, and is small: what a worker has loaded, each of its forks pays for. With all of the default
# set a call takes a fifth longer, so calls that need more than this have another worker.
COMMON_MODULES = frozenset(
    "__future__ abc collections contextlib enum functools heapq itertools math operator re string time".split()
)
# By the word that brings about the import.
LATE_IMPORTS = {"strptime": "_strptime", "argparse": "shutil", "singledispatch": "typing"}
# Modules of which the jail has a stand-in (``child.py``), with what is harmless of them.
STAND_INS = {
    "sys": frozenset(
        "argv byteorder exit float_info getrecursionlimit getsizeof get_int_max_str_digits hash_info hexversion int_info"
        " maxsize maxunicode platform set_int_max_str_digits setrecursionlimit stderr stdout version version_info".split()
    ),
    "doctest": frozenset({"testmod"}),  # finds no tests: they would be programs as strings
    "timeit": frozenset({"default_timer", "repeat", "timeit"}),  # the real one takes programs as strings
}
COME_WITH = {"sympy": "mpmath"}  # libraries that are part of another
MAX_RECURSION = 100_000
FORBIDDEN_NAMES = frozenset(
    "eval exec open compile input globals vars locals breakpoint help __import__ __builtins__ __loader__ __spec__"
    " __build_class__ __file__".split()
)
READABLE_DUNDERS = frozenset("__name__ __qualname__ __doc__ __version__ __members__ __wrapped__".split())
# What operators and `super()` are for. A list of what may be read, not of what may not.
SPECIAL_METHODS = frozenset(
    f"__{name}__"
    for name in "init new init_subclass post_init set_name repr str format bytes hash bool int float complex index"
    " eq ne lt le gt ge len length_hint contains iter next reversed getitem setitem delitem missing call enter exit"
    " aenter aexit aiter anext await copy deepcopy setattr delattr get set delete prepare instancecheck subclasscheck"
    " add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul rmatmul rtruediv"
    " rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor iadd isub imul imatmul itruediv ifloordiv imod ipow"
    " ilshift irshift iand ior ixor neg pos abs invert round trunc floor ceil".split()
)
# Attributes that lead from ordinary objects to frames, code or evaluation of strings.
FORBIDDEN_ATTRIBUTES = frozenset(
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await cr_origin ag_frame ag_code ag_await tb_frame tb_next"
    " f_back f_builtins f_code f_globals f_locals f_trace func_globals func_code get_type_hints ForwardRef".split()
)
# Modules that hang on modules of the default set; some under the name that it has for them (`enum.bltns`).
FORBIDDEN_MODULES = frozenset(
    "os sys subprocess builtins bltns importlib ctypes posix socket shutil pickle marshal gc inspect codecs threading"
    " types".split()
)
ATTRIBUTE_FUNCTIONS = frozenset("getattr setattr delattr attrgetter methodcaller".split())  # take attributes' names

# What to do instead, by name and by module.
NO_FILES = "A call has no files: keep the data in variables."
NAME_HINTS = {
    "input": "A call has no input: write the values into the code.",
    "stdin": "A call has no input: write the values into the code.",
    "open": NO_FILES,
    "__file__": "The code does not lie in a file.",
    "help": "Print the object's __doc__.",
    **dict.fromkeys(("eval", "exec", "compile"), "Write the code out."),
    **dict.fromkeys(("globals", "locals", "vars"), "Keep the values in a dict."),
}
MODULE_HINTS = {
    **dict.fromkeys("os pathlib io shutil glob tempfile csv pickle sqlite3".split(), NO_FILES),
    **dict.fromkeys(
        "threading multiprocessing concurrent asyncio subprocess".split(),
        "A call has one thread and starts no programs.",
    ),
    **dict.fromkeys("requests urllib http socket".split(), "A call has no network."),
    **dict.fromkeys(
        "numpy scipy sympy pandas gmpy2 mpmath".split(), "Write what is needed of it with the modules below."
    ),
    **dict.fromkeys("warnings logging".split(), "Leave it out, or print what it would say."),
    "traceback": "Let the exception pass: its traceback is shown.",
}
