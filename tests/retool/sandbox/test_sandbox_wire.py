"""What the two sides of the wire have to agree on without importing each other."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from retool.sandbox import pool, wire


def load(file: Path):
    """A file of the jail's side, as a module of this process."""
    spec = importlib.util.spec_from_file_location(f"jailed_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORKER, NOTEBOOK = load(pool.WORKER_FILE), load(pool.NOTEBOOK_FILE)


@pytest.mark.parametrize("side", [WORKER, NOTEBOOK], ids=["worker", "notebook"])
def test_names_of_the_wire_mean_the_same_on_both_sides(side):
    ours = {name: value for name, value in vars(wire).items() if name.isupper() and name != "LAYERS"}
    theirs = {name: value for name, value in vars(side).items() if name in ours}
    assert theirs and theirs == {name: ours[name] for name in theirs}


def test_every_name_of_the_wire_is_known_to_the_jail():
    letters = {name for name, value in vars(wire).items() if name.isupper()}
    assert letters <= vars(WORKER).keys() | vars(NOTEBOOK).keys()
    values = [value for name, value in vars(wire).items() if name.isupper() and isinstance(value, bytes)]
    assert len(set(values)) == len(values)


def test_layers_have_the_same_names_on_both_sides():
    assert {layer.name for layer in WORKER.LAYERS} - {""} == set(wire.LAYERS)
    for layer in WORKER.LAYERS:
        assert layer.where in ("W", "C", "WC") and set(layer.needs) <= set(wire.LAYERS)


@pytest.mark.parametrize("file", [pool.WORKER_FILE, pool.NOTEBOOK_FILE], ids=lambda file: file.stem)
def test_what_runs_in_the_jail_imports_the_standard_library_alone(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(node.module.split(".")[0])
    assert imported <= sys.stdlib_module_names
