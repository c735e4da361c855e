"""The page at the end of a CPU run."""

import json

import pytest
from cpu import run
from cpu.storage import sample_record
from view_helpers import byte_tokenizer, raw

from vime.utils.types import Sample


@pytest.fixture
def output(tmp_path):
    made = raw()
    sample = Sample(**{name: made[name] for name in made if name != "status"})
    sample.status = Sample.Status.COMPLETED
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample_record(sample)) + "\n")
    return tmp_path


def test_the_run_writes_a_page_and_prints_where(output, capsys):
    run.write_page(output, str(byte_tokenizer(output / "model")))
    assert (output / "rollouts.html").stat().st_size > 10_000
    assert f"open {output / 'rollouts.html'}" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["nothing", "broken"])
def test_a_run_without_a_page_goes_on(output, capsys, model):
    (output / "broken").mkdir()
    (output / "broken" / "tokenizer.json").write_text("{")
    run.write_page(output, str(output / model))
    assert "no page of the samples: cannot read the tokenizer" in capsys.readouterr().out
    assert not (output / "rollouts.html").exists()
