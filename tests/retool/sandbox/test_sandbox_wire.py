"""What the two sides of the wire have to agree on."""

import ast
import sys
from pathlib import Path

import pytest
from retool.sandbox import child, policy, policy_tables, wire, worker

JAILED = [Path(module.__file__) for module in (worker, child, policy, policy_tables, wire)]


def test_no_two_records_of_a_channel_begin_alike():
    letters = {name: value for name, value in vars(wire).items() if name.isupper() and isinstance(value, bytes)}
    leash = {letters.pop(name) for name in ("STATUS", "LOOK", "TIME_UP")}
    assert len(leash) == 3 and len(set(letters.values())) == len(letters)


def test_layers_have_the_same_names_on_both_sides():
    assert {layer.name for layer in worker.LAYERS} - {""} == set(wire.LAYERS)
    for layer in worker.LAYERS:
        assert layer.where in ("W", "C", "WC") and set(layer.needs) <= set(wire.LAYERS)


@pytest.mark.parametrize("file", JAILED, ids=lambda file: file.stem)
def test_what_runs_in_the_jail_imports_the_standard_library_alone(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "retool.sandbox":
            assert {alias.name for alias in node.names} <= {file.stem for file in JAILED}
        elif isinstance(node, ast.ImportFrom):
            of_ours = node.module.startswith("retool.sandbox.") and node.module.split(".")[-1]
            assert not node.level and (not of_ours or of_ours in {file.stem for file in JAILED})
            imported |= set() if of_ours else {node.module.split(".")[0]}
    assert imported <= sys.stdlib_module_names


LONGEST = ["#" * wire.MAX_CODE_BYTES, "π" * (wire.MAX_CODE_BYTES // 2)]


@pytest.mark.parametrize("code", [*LONGEST, ""])
def test_a_request_carries_the_whole_source(code):
    sent = wire.request(wire.CHECK, 1.5, code)
    assert wire.HEADER.unpack(sent[: wire.HEADER.size]) == (wire.CHECK, 1.5)
    assert sent[wire.HEADER.size :].decode() == code and len(sent) <= wire.MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    "code, said", [*((code + "#", "longer than 60000 bytes") for code in LONGEST), ("\ud800", "Unicode")]
)
def test_a_source_that_cannot_be_sent_is_refused(code, said):
    with pytest.raises(ValueError, match=said):
        wire.request(wire.RUN, 1.5, code)
