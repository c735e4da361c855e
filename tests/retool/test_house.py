"""Habits of the house: which module imports which, sizes, names, vime's own checks, and what no file may hold.

Each rule is one table or one pattern here; a change that needs another rule changes the table with it.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import IN_VIME, MODULES, ROOT, TESTS, our_files, shown

# Imports -------------------------------------------------------------------------------------------------------------

# What a module of the example may import of ours, and of vime: itself and what lies below it, never what lies above.
# A name stands for the module or the whole folder.
MAY_IMPORT = {
    "retool.chat": set(),
    "retool.blocks": {"retool.chat"},
    "retool.observations": {"retool.chat"},
    "retool.actions": {"retool.blocks", "retool.chat"},
    "retool.answers": {"retool.expressions"},
    "retool.expressions": set(),
    "retool.handover": {f"retool.{name}" for name in ("episode", "ledger", "replay_data", "reward")},
    "retool.startup": {"retool.advantages", "retool.episode", "retool.handover"},
    "retool.tracking": {"retool.metrics"},
    "retool.advantages": {"retool.handover"},
    "retool.reward": {f"retool.{name}" for name in ("actions", "answers", "blocks", "chat")},
    "retool.ledger": {"retool.engine"},
    "retool.replay_data": set(),
    "retool.engine": set(),
    "retool.episode": {f"retool.{name}" for name in ("actions", "chat", "engine", "ledger", "replay_data")},
    "retool.failures": set(),
    "retool.metrics": {f"retool.{name}" for name in ("advantages", "chat", "episode", "handover")},
    "retool.request": {"retool.engine"},
    "retool.data_io": {"retool.paths"},
    "retool.conversations": {f"retool.{name}" for name in ("actions", "blocks", "chat", "data_io")},
    "retool.paths": set(),
    "retool.processes": set(),
    "retool.supervise": {"retool.processes"},
    "retool.sandbox.worker": {"retool.sandbox.child", "retool.sandbox.wire"},
    "retool.sandbox.child": {f"retool.sandbox.{name}" for name in ("policy", "policy_tables", "wire")},
    "retool.sandbox.policy_tables": set(),
    "retool.sandbox.policy": {"retool.sandbox.policy_tables"},
    "retool.sandbox.semaphore": set(),
    "retool.sandbox.wire": set(),
    "retool.sandbox.results": {"retool.chat", "retool.observations", "retool.sandbox.wire"},
    "retool.sandbox.pool": {f"retool.sandbox.{name}" for name in ("policy_tables", "results", "wire")},
    "retool.sandbox.call": {f"retool.sandbox.{name}" for name in ("pool", "results", "wire")},
    "retool.sandbox.ray_pool": {f"retool.sandbox.{name}" for name in ("call", "pool", "results")},
    "tool_sandbox": {"retool.chat", "retool.observations", "retool.sandbox"},
    "generate_with_retool": {
        *("tool_sandbox", "vime"),
        *(
            f"retool.{name}"
            for name in (
                "actions",
                "advantages",
                "handover",
                "ledger",
                "chat",
                "engine",
                "episode",
                "failures",
                "startup",
                "tracking",
                "observations",
                "request",
                "reward",
            )
        ),
    },
    # The sandbox's policy says which of the published programs it would refuse.
    "sft_data_processing": {
        "retool.actions",
        "retool.chat",
        "retool.conversations",
        "retool.data_io",
        "retool.observations",
        "retool.paths",
        "tool_sandbox",
    },
    "rl_data_preprocess": {f"retool.{name}" for name in ("actions", "answers", "chat", "conversations", "data_io")},
    # ask_vime.py runs in a process of its own, on vime's path.
    "launch.ask_vime": {"vime"},
    "launch": {"launch", "retool.paths", "retool.processes", "retool.supervise"},
    # The CPU run plays the trainer's part, so it goes through vime's rollout; nothing imports it.
    "cpu": {"cpu", "retool", "tool_sandbox", "generate_with_retool", "vime", "view", "view_rollouts"},
    # The third command: the CPU run's engine and folders, the launch scripts by their names, vime's rewards in its
    # control.
    "trainer": {
        "trainer",
        "cpu",
        "retool.chat",
        "retool.processes",
        "retool.supervise",
        "generate_with_retool",
        "view_rollouts",
    },
    # The page reads what a rollout left with the readers of the loop, and runs nothing.
    "view": {"view", *(f"retool.{name}" for name in ("actions", "advantages", "blocks", "chat", "metrics", "paths"))},
    "view_rollouts": {"view", "retool.advantages"},
}
STANDARD_LIBRARY_ALONE = {
    "retool.chat",
    *(f"retool.{name}" for name in ("blocks", "actions", "answers", "advantages", "observations")),
    *(f"retool.{name}" for name in ("paths", "processes", "supervise")),
    *(f"retool.sandbox.{name}" for name in ("worker", "child", "policy", "policy_tables", "wire")),
}


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, in functions too; `from a import b` names a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# They raise below a folder that is closed to the user, where os.path answers False; retool/paths.py says more.
RAISING = {"exists", "is_dir", "is_file", "is_symlink", "is_mount", "is_socket", "is_fifo"}


@pytest.mark.parametrize("module", MODULES)
def test_what_may_not_be_looked_at_raises_nothing(module):
    calls = [node.func for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call)]
    names = [ast.unparse(call) for call in calls if isinstance(call, ast.Attribute) and call.attr in RAISING]
    assert all(name.startswith("os.path.") for name in names), f"{module}: {names}, better from os.path"


def lies_in(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    rules = [allowed for name, allowed in MAY_IMPORT.items() if lies_in(module, name)]
    assert rules, f"{module} is new: say in MAY_IMPORT what it may import"
    ours = {*(name.split(".")[0] for name in MODULES), "vime"}
    wrong = [
        imported
        for imported in imports(MODULES[module])
        if imported.split(".")[0] in ours and not any(lies_in(imported, allowed) for allowed in rules[0])
    ]
    assert not wrong, f"{module} imports {wrong}, and may import {sorted(rules[0])}"


@pytest.mark.parametrize("module", sorted(STANDARD_LIBRARY_ALONE & MODULES.keys()))
def test_pure_modules_need_the_standard_library_alone(module):
    theirs = {name.split(".")[0] for name in imports(MODULES[module])} - {"retool", "__future__"}
    assert theirs <= sys.stdlib_module_names


# Sizes ---------------------------------------------------------------------------------------------------------------

MAX_LINES = 600
MAX_LINES_OF = {"generate_with_retool": 499, "tool_sandbox": 349, "retool.sandbox.worker": 700}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short_enough_to_be_read(module):
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES_OF.get(module, MAX_LINES)


# Width ---------------------------------------------------------------------------------------------------------------


def prose(path: Path) -> list[tuple[int, str]]:
    """(number, line) of what can be wrapped by hand: in Python comments and docstrings, since black wraps its code and
    what is longer there is data; in Markdown all but tables, pictures and commands."""
    lines = list(enumerate(path.read_text().splitlines(), 1))
    if path.suffix == ".py":
        tree = ast.walk(ast.parse(path.read_text()))
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = [node.body[0] for node in tree if isinstance(node, holders) and ast.get_docstring(node)]
        wrapped = {number for one in strings for number in range(one.lineno, (one.end_lineno or 0) + 1)}
        return [(number, line) for number, line in lines if number in wrapped or line.lstrip().startswith("# ")]
    if path.suffix == ".md":
        text = re.sub(
            r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), path.read_text(), flags=re.M | re.S
        )
        return [(n, line) for n, line in enumerate(text.splitlines(), 1) if not line.startswith(("|", "!["))]
    return lines if path.suffix in (".js", ".html", ".css") else [one for one in lines if one[1].startswith("# ")]


def test_what_a_person_wraps_is_at_most_119_columns_wide():
    suffixes = (".py", ".md", ".js", ".html", ".css", ".sh", ".toml", ".txt")
    wide = [
        f"{shown(path)}:{number}"
        for path in our_files()
        if path.suffix in suffixes and path.name != "CHANGELOG.md"
        for number, line in prose(path)
        if len(line) > 119 and not re.match(r"# +\S+ .*(&&|\||pip |python )", line)  # a command to be copied
    ]
    assert wide == []


# Names ---------------------------------------------------------------------------------------------------------------

# What code written for earlier versions of this example imports from the two modules.
NAMES = {
    "generate_with_retool": (
        "generate reward_func split_prompt format_conversation_with_tools postprocess_predictions postprocess_responses"
        " execute_predictions _parse_vllm_choice post GenerateState Sample tool_registry TOOL_CONFIGS"
    ),
    "tool_sandbox": "TOOL_CONFIGS SEMAPHORE PythonSandbox ToolRegistry tool_registry SandboxError",
    "tool_sandbox.PythonSandbox": "_check_code_safety execute_code",
    "tool_sandbox.ToolRegistry": "register_tool get_tool_specs execute_tool",
    "tool_sandbox.tool_registry": "tools python_sandbox",
    "tool_sandbox.tool_registry.python_sandbox": "allowed_modules",
}


@pytest.mark.parametrize("owner, name", [(owner, name) for owner, names in NAMES.items() for name in names.split()])
def test_names_that_other_code_imports_are_there(owner, name):
    module, *attributes = owner.split(".")
    found = importlib.import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute)
    assert hasattr(found, name)


# Copying into vime --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(IN_VIME, reason="the two folders were copied already")
def test_the_two_folders_hold_nothing_beside_the_example_and_its_tests():
    assert {path.name for path in (ROOT / "examples").iterdir()} == {"retool"}
    assert {path.name for path in (ROOT / "tests").iterdir()} - {"__pycache__"} == {"retool"}


@pytest.mark.skipif(IN_VIME or "VIME_ROOT" not in os.environ, reason="VIME_ROOT names no vime checkout to copy into")
def test_copied_into_vime_they_change_no_file_and_its_own_tests_of_plugins_pass(tmp_path):
    """Those that its guide asks the author of a plugin to run."""
    copied = tmp_path / "vime"
    shutil.copytree(os.environ["VIME_ROOT"], copied, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    before = contents(copied)
    subprocess.run(["cp", "-r", "examples", "tests", copied], cwd=ROOT, check=True)
    after = contents(copied)
    assert len(after) > len(before)
    assert {name for name in before if after.get(name) != before[name]} == set()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugin_contracts"]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize(
    "arguments, ours",
    [("tests", 0), ("", 0), ("tests/test_vime.py", 0), ("tests/retool", 1), ("tests/retool/test_house.py", 1)],
)
def test_in_a_vime_checkout_our_tests_run_where_they_are_named(arguments, ours, tmp_path):
    (tmp_path / "vime").mkdir()
    (tmp_path / "tests" / "retool").mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests" / "retool")
    for name in ("test_vime.py", "retool/test_house.py"):
        (tmp_path / "tests" / name).write_text("def test_one(): pass\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("retool/test_house.py::test_one") == ours, done.stdout + done.stderr
    assert done.stdout.count("test_vime.py::test_one") == (not ours)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# vime's checks ------------------------------------------------------------------------------------------------------

PYTHON_FILES = r".*\.py"
# Hooks of .pre-commit-config.yaml: the command of PyPI's package, and the files it is for. black, isort and ruff run
# in the test command.
HOOKS = {
    "check-yaml": (["check-yaml"], r".*\.ya?ml"),
    "check-case-conflict": (["check-case-conflict"], ".*"),
    "detect-private-key": (["detect-private-key"], ".*"),
    "check-added-large-files": (["check-added-large-files", "--maxkb=1000", "--enforce-all"], ".*"),
    "requirements-txt-fixer": (["requirements-txt-fixer"], r"(.*/)?requirements[^/]*\.txt"),
    "autoflake": (["autoflake", "--remove-all-unused-imports", "--in-place"], PYTHON_FILES),
}
IN_THE_TEST_COMMAND = {"ruff-check", "isort", "black"}


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed, and the hooks ask it for the files")
@pytest.mark.parametrize("hook", HOOKS)
def test_vimes_pre_commit_hooks_pass(hook, tmp_path):
    """On a copy, as a commit of all files would see them: a hook fails, or changes what it finds."""
    (program, *arguments), pattern = HOOKS[hook]
    found = shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{program} is not installed: bash tests/retool/run.sh installs it")
    names = [shown(path) for path in our_files() if re.fullmatch(pattern, shown(path))]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = contents(tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    result = subprocess.run([found, *arguments, *names], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    after = contents(tmp_path)
    assert [str(name) for name in before if after[name] != before[name]] == []


@pytest.mark.skipif(IN_VIME, reason="the configuration is vime's")
@pytest.mark.parametrize("name", ["retool", "cpu", "view", "launch", "jail"])
def test_the_style_is_the_same_in_a_clone_that_is_called_as_a_module_is(name, tmp_path):
    pytest.importorskip("isort", reason="isort is not installed: bash tests/retool/run.sh installs it")
    clone = tmp_path / name
    for path in [ROOT / "pyproject.toml", *(path for path in our_files() if path.suffix == ".py")]:
        copy = clone / shown(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    command = [sys.executable, "-m", "isort", "--check", "."]
    result = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(IN_VIME, reason="the configuration is vime's")
def test_every_hook_is_run_in_the_version_that_the_configuration_names():
    configuration = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"- id: (\S+)", configuration)) == HOOKS.keys() | IN_THE_TEST_COMMAND
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (TESTS / "requirements.txt").read_text(), re.M))
    for repository, revision in re.findall(r"repo: \S+/(\S+)\n +rev: v?(\S+)", configuration):
        assert pinned[repository.removesuffix("-pre-commit")] == revision


# What no file may hold -----------------------------------------------------------------------------------------------

HOSTS = {"127.0.0.1", "localhost", "10.0.0.1"} | set(
    "github.com arxiv.org huggingface.co download.pytorch.org www.apache.org www.w3.org example.com git-lfs git-lfs.github.com HOST".split()
)
HOME_FOLDERS = r"/(?:home|Users)/(?!user\b)\w|/root/\."  # of a machine that the project was written on


def texts() -> dict[str, str]:
    return {shown(path): path.read_text(errors="replace") for path in our_files() if path != Path(__file__)}


def test_no_file_names_a_host_of_somebodys_network():
    for name, text in texts().items():
        hosts = set(re.findall(r"https?://([\w.-]+)", text))
        assert hosts <= HOSTS, name


def test_no_file_names_a_folder_of_somebodys_machine():
    for name, text in texts().items():
        assert not re.search(HOME_FOLDERS, text), name
