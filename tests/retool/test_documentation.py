"""The documentation against the code: links, files, commands, options, variables and tables.

A name in the documentation that the code does not have is found here, and so is a setting or an end reason that the
documentation leaves out.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import DOCUMENTS, EXAMPLE, ROOT, TESTS, our_files, shown


def headings(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^(```+).*?^\1", "", document.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{target} does not exist"
        assert not anchor or anchor in headings(path), f"{target}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_files_that_are_named_exist(document):
    """In prose and in commands: a path of this repository, or one below the example or the tests."""
    words = re.findall(r"[\w./-]+", document.read_text())
    named = {word.rstrip(".") for word in words if re.match(r"(examples|tests)/retool/", word)}
    spans = set(re.findall(r"`([\w./-]+)`", document.read_text()))
    folders = "retool|launch|cpu|loop|sandbox|data|cases|standin"
    named |= {span for span in spans if re.fullmatch(rf"(?:{folders})/[\w./-]*|\w+\.(?:py|sh|jsonl)", span)}
    not_ours = {"my_tools.py", "qwen3-4B.sh"} | {name for name in named if name.startswith("data/retool")}
    bases = (ROOT, EXAMPLE, TESTS, TESTS / "cases")
    assert [name for name in named - not_ours if not any((base / name).exists() for base in bases)] == []


def commands(document: Path) -> Iterator[list[str]]:
    """The commands in a document's bash blocks, in words, without comments."""
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split(" #")[0].split()
            if words:
                yield words


FOLDERS = {"rollout_on_cpu.sh": "cpu/*.py", "train_on_cpu.sh": "trainer/*.py"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_options_in_commands_are_ones_that_the_script_knows(document):
    for words in commands(document):
        for script in ("sft_data_processing.py", "rl_data_preprocess.py", *FOLDERS, "benchmark.py"):
            place = next((i for i, word in enumerate(words) if word.endswith(script)), None)
            if place is None:
                continue
            sources = ROOT.glob(f"*/retool/**/{FOLDERS.get(script, script)}")
            shared = [EXAMPLE / "retool" / "data_io.py"] if "data_" in script else []
            known = set(re.findall(r'"(--[\w-]+)"', "".join(source.read_text() for source in [*sources, *shared])))
            used = {word.split("=")[0] for word in words[place:] if word.startswith("--")}
            assert used <= known, f"{' '.join(words)}: {script} knows {sorted(known)}"


def test_environment_variables_in_the_documentation_are_read_somewhere():
    code = "".join(
        path.read_text() for path in our_files() if path.suffix in (".py", ".sh") and path != Path(__file__)
    )
    for document in DOCUMENTS:
        for name in set(re.findall(r"\b(?:RETOOL|WANDB|VIME|MEGATRON|NUM|RAY)_[A-Z_]+\b", document.read_text())):
            # The sandbox's settings are forwarded by their prefix.
            assert re.search(rf"\b{name}\b", code), f"{shown(document)}: nothing reads {name}"


@pytest.mark.skipif("VIME_ROOT" not in os.environ, reason="VIME_ROOT names no vime checkout")
def test_files_of_vime_in_commands_exist():
    vime = Path(os.environ["VIME_ROOT"])
    for document in DOCUMENTS:
        for words in commands(document):
            for word in words:
                if re.match(r"(tools|scripts)/", word):
                    assert (vime / word).is_file(), f"{shown(document)}: {word}"


def table(document: Path, first_column: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this title, by the name in their first cell."""
    lines = document.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_the_table_of_end_reasons_is_the_codes():
    from generate_with_retool import EndReason

    rows = table(EXAMPLE / "README.md", "end_reason")
    documented = [(name, cells[0]) for name, cells in rows.items()]
    assert documented == [(reason.value, reason.status) for reason in EndReason]


def test_the_table_of_settings_is_the_codes():
    from tool_sandbox import TOOL_CONFIGS

    rows = table(EXAMPLE / "README.md", "key")
    assert {name: ast.literal_eval(cells[0]) for name, cells in rows.items()} == TOOL_CONFIGS


def test_the_table_of_outcomes_is_the_codes():
    from tool_sandbox import ToolOutput

    assert list(table(EXAMPLE / "docs" / "sandbox.md", "outcome")) == re.findall(r'"(\w+)"', ToolOutput.__doc__ or "")


def test_what_a_sample_says_about_its_episode_is_documented(monkeypatch):
    from scripted import Rollout, Turn, call

    rollout = Rollout(monkeypatch)
    try:
        sample = rollout.run([Turn(call("print(1)")), Turn("Answer: \\boxed{1}<|im_end|>")])
    finally:
        rollout.close()
    text = (EXAMPLE / "README.md").read_text()
    paragraph = text[text.index('`sample.metadata["retool"]` holds') :].split("\n\n")[0]
    said = sample.metadata["retool"]
    assert said.keys() | said["calls"][0].keys() == set(re.findall(r"`(\w+)`", paragraph))


def number(value: float) -> str:
    return f"{value:g}"


def word(value: float) -> str:
    words = {2: "two", 3: "three", 10: "ten", 30: "thirty", 100: "hundred"}
    return words[round(value)]


def flag(script: str, name: str) -> int:
    """What a launch script passes for a flag."""
    return int(re.findall(rf"--{name} +(\d+)", (EXAMPLE / f"retool_qwen3_4b_{script}.sh").read_text())[0])


def sentences() -> Iterator[tuple[str, str]]:
    """(document, words): what prose says in numbers, made of the code's."""
    from cpu import options, rollout, storage
    from launch import checks
    from retool import data_io, engine, failures
    from retool.sandbox import call, ray_pool

    lost, row, seconds = failures.FAILURE_WINDOW, failures.MAX_LOST_IN_A_ROW, failures.MIN_SECONDS_IN_A_ROW
    yield "README.md", f"of the last {lost} episodes were lost"
    yield "README.md", f"or {row} in a row over at least {number(seconds)} seconds"
    yield "docs/design.md", f"of the last {lost} episodes, or {row} in a row over at least {number(seconds)} s"
    passing = "{}, {} and {}".format(*engine._NO_REFUSALS)
    yield "README.md", f"4xx but {passing}), or if it does not answer them for about {engine.MAX_START_ATTEMPTS - 1} s"
    tokens = options.parse_options([]).max_tokens
    yield "README.md", f"up to {tokens} tokens takes it about {rollout.CORE_SECONDS} seconds of one core"
    yield "README.md", f"the default {options.DEFAULT_LIMIT} problems"
    yield "../../README.md", f"puts {options.DEFAULT_LIMIT} problems through"
    yield "README.md", f"the model takes {storage.MODEL_MB} MB"
    parameters = 4e9
    yield "README.md", f"{number(checks.BYTES_PER_PARAMETER * parameters / 1e9)} GB per checkpoint"
    yield "README.md", f"({checks.BYTES_PER_PARAMETER} bytes per parameter)"
    yield "README.md", f"of {flag('sft', 'rollout-batch-size')} conversations and writes one per epoch"
    episodes = flag("rl", "rollout-batch-size") * flag("rl", "n-samples-per-prompt")
    steps, interval = flag("rl", "num-rollout"), flag("rl", "save-interval")
    written = checks.BYTES_PER_PARAMETER * parameters * steps / interval / 1e12
    yield "README.md", f"RL is {steps} steps of {episodes} episodes and writes one every {interval} steps, "
    yield "README.md", f"every {interval} steps, {number(written)} TB in all"
    problems = flag("rl", "n-samples-per-eval-prompt")
    yield "README.md", f"every {flag('rl', 'eval-interval')} steps ({problems} samples per problem"
    yield "README.md", f"more than one in a {word(1 / data_io.MAX_BAD_SHARE)}"
    yield "docs/sandbox.md", f"waited for a processor {word(call.MAX_WAITS)} times its limit, and {word(call.MIN_WAIT_SECONDS)}"
    yield "docs/sandbox.md", f"seen within {word(ray_pool.REFRESH_SECONDS)} seconds"


def test_numbers_in_prose_are_the_codes():
    said = {name: " ".join((EXAMPLE / name).read_text().split()) for name, _ in sentences()}
    assert [f"{name}: {words}" for name, words in sentences() if words not in said[name]] == []
