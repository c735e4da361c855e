"""What the third command needs, and what it makes of a run's numbers: no trainer is started here."""

import os
import subprocess
import sys
from itertools import chain

import pytest
from cpu.options import EXAMPLE, RunError
from trainer import evidence, report, run, sources, toy, without_cuda
from trainer.evidence import Evidence, Frames, Step, sampled_mask

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]


def repository(folder, files):
    """A git repository with these files, as (folder, its commit)."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder, subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


PATCH = "--- a/megatron/training/x.py\n+++ b/megatron/training/x.py\n@@ -1 +1 @@\n-theirs\n+vimes\n"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Both repositories behind the addresses that are cloned: git is told that they lie here."""
    vime = {"vime/utils/arguments.py": "", "docker/patch/latest/megatron.patch": PATCH}
    for number, (name, files) in enumerate({"VIME": vime, "MEGATRON": {"megatron/training/x.py": "theirs\n"}}.items()):
        folder, commit = repository(tmp_path / name, files)
        url = getattr(sources, name)[0]
        monkeypatch.setattr(sources, name, (url, commit))
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", f"url.{folder}.insteadOf")
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", url)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    return tmp_path


def test_both_checkouts_are_cloned_once_with_vimes_patch(hub, tmp_path):
    found = sources.find_sources({}, tmp_path / "cache")
    assert (found.megatron / "megatron/training/x.py").read_text() == "vimes\n" and found.mbridge is None
    for name in ("VIME", "MEGATRON"):
        (hub / name).rename(hub / f"{name}.gone")
    assert sources.find_sources({}, tmp_path / "cache") == found
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {found.vime.name, found.megatron.name}


def test_without_network_the_error_names_the_two_variables_and_nothing_is_left(hub, tmp_path):
    (hub / "MEGATRON").rename(hub / "gone")
    with pytest.raises(RunError, match="^cannot get .*Megatron-LM .*: set VIME_ROOT and MEGATRON_ROOT to checkouts"):
        sources.find_sources({}, tmp_path / "cache")
    assert [path.name[:4] for path in (tmp_path / "cache").iterdir()] == ["vime"]


def test_a_checkout_that_is_named_has_to_be_one(tmp_path):
    with pytest.raises(RunError, match="MEGATRON_ROOT names .*, and there is no megatron/training in it"):
        sources.find_sources({"VIME_ROOT": str(hub_like(tmp_path)), "MEGATRON_ROOT": str(tmp_path)}, tmp_path)


def hub_like(folder):
    (folder / "vime" / "utils").mkdir(parents=True)
    (folder / "vime" / "utils" / "arguments.py").touch()
    return folder


@pytest.mark.parametrize(
    "kept, given, message",
    [
        ({"x": "1"}, [], "holds something that is no run"),
        ({run.SETTINGS: '{"seed": 7}'}, [], "with other settings .*--afresh"),
    ],
)
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, kept, given, message):
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=message):
        run.prepare(run.parse_options(["--output", str(tmp_path), *given]), run.Recipe())
    assert {path.name for path in tmp_path.iterdir()} == set(kept)


def test_the_stand_in_for_cuda_refuses_a_machine_with_a_gpu(tmp_path):
    device = tmp_path / "nvidia0"
    device.touch()
    program = (
        "from trainer import without_cuda as layer\n" f"layer.GPU_DEVICES = ({str(device)!r},)\n" "layer.install()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and str(device) in done.stderr and "train on that one" in done.stderr


def test_the_module_names_each_thing_that_it_stands_in_for():
    documented = (without_cuda.__doc__ or "").lower()
    for word in (
        "torch.cuda",
        "nccl",
        "transformer engine",
        "fusedadam",
        "fused kernels",
        "triton",
        "torch_memory_saver",
    ):
        assert word in documented
    assert "no way to train for real" in documented.splitlines()[0]


# The toy ------------------------------------------------------------------------------------------------------------


def test_the_toy_is_the_same_for_the_same_seed_and_asks_nothing_twice(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        toy.write_data(tmp_path / name, seed, 500)
    texts = {name: [path.read_text() for path in sorted((tmp_path / name).iterdir())] for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    found = toy.pairs(3)
    assert len(found) == len(set(found)) and all(1000 <= pair.product <= 9801 for pair in found)
    trained = "".join(path.read_text() for path in (tmp_path / "a").glob("[rs]*.jsonl"))
    assert not any(f"What is {pair.a} * {pair.b}?" in trained for pair in found[: toy.EVAL_PROBLEMS])


def test_the_cut_tokenizer_splits_as_qwen3s(tmp_path):
    from transformers import AutoTokenizer

    toy.cut_tokenizer(run.qwen3_tokenizer(), tmp_path, toy.texts(), toy.VOCABULARY)
    small, whole = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, run.qwen3_tokenizer()))
    assert len(small) == toy.VOCABULARY
    for text in toy.texts():
        assert small.tokenize(text) == whole.tokenize(text) and small.decode(small.encode(text)) == text
    with pytest.raises(ValueError, match="need .* tokens, and there is room for 300"):
        toy.cut_tokenizer(run.qwen3_tokenizer(), tmp_path, toy.texts(), 300)


# The evidence -------------------------------------------------------------------------------------------------------


OPEN, CALL, CALLED, END, OWN = [7, 8], 4, 5, 6, 1


@pytest.mark.parametrize("response, said", [
    ([OWN, OWN, END], [1, 1, 1]),
    ([CALL, CALLED, END, 9, *OPEN, OWN, END], [1, 1, 0, 0, 0, 0, 1, 1]),
    ([CALL, CALLED, END, 9, *OPEN], [1, 1, 0, 0, 0, 0]),
    ([OWN, CALLED, END], [1, 1, 1]),
    ([CALL, CALLED, 9, *OPEN, CALLED, OWN, END], [1, 1, 0, 0, 0, 1, 1, 1]),
    ([OWN, END, 9, *OPEN, OWN], [1, 1, 0, 0, 0, 1]),
    ([], []),
])  # fmt: skip
def test_which_tokens_the_model_sampled_is_read_from_the_ids_alone(response, said):
    assert sampled_mask([3, *OPEN, *response], len(response), Frames(OPEN, END, CALL, CALLED)) == list(map(bool, said))


def step(number=0, **changes):
    same = {"number": number, "episodes": 8, "accuracy": 0.5, "calls": 0.5, "sampled": 10, "trained": 10}
    return Step(**{**same, "misread": 0, "cut": 0, "difference": 1e-7, **changes})


GOOD = Evidence(
    sft_loss=[7.0, 0.2],
    steps=[step(0), step(1)],
    evaluations={0: step(accuracy=0.5), 2: step(accuracy=0.95)},
    generated=40,
    exported=1e-7,
    control=False,
)


@pytest.mark.parametrize("changes, fault", [
    ({}, None),
    ({"evaluations": {0: step(accuracy=0.5), 2: step(accuracy=0.89)}}, "after RL is 0.89"),
    ({"evaluations": {0: step(accuracy=0.9), 2: step(accuracy=0.95)}}, "not about a half"),
    ({"control": True}, None),
    ({"control": True, "steps": [step(0), step(1, accuracy=0.56)]}, "should have stayed"),
    ({"steps": [step(0), step(1, difference=2e-5)]}, "step 1: engine and Megatron differ"),
    ({"steps": [step(0, difference=float("nan")), step(1)]}, "step 0: engine and Megatron differ"),
    ({"steps": [step(0, misread=1), step(1)]}, "were not sampled"),
    ({"generated": 41}, "the engine generated 41 tokens, the samples hold 40"),
    ({"generated": None}, None),
    ({"generated": 41, "steps": [step(0, cut=1), step(1)]}, None),
    ({"generated": 39, "steps": [step(0, cut=1), step(1)]}, "the engine generated 39 tokens, the samples hold 40"),
    ({"exported": float("nan")}, "transformers on the export"),
])  # fmt: skip
def test_each_thing_that_is_missing_of_the_proof_is_named(changes, fault):
    lines = evidence.faults(GOOD._replace(**changes))
    assert (len(lines) == 1 and fault in lines[0]) if fault else not lines


def test_the_curves_are_drawn_where_the_values_are():
    text = report.in_text(report.curves(GOOD)[1])
    rows = [line.partition("|")[2] for line in text.splitlines()[1:7]]
    assert rows[0].endswith("o") and [place for place, row in enumerate(rows) if row.startswith("o")] == [3]
    drawn = report.picture(GOOD, "seed <0>")
    assert drawn.count("<polyline") == 4 and drawn.count("<circle") == 4 and "seed &lt;0&gt;" in drawn
    assert all(title.title.replace(">", "&gt;") in drawn for title in chain(report.curves(GOOD)))


def test_the_last_metrics_of_a_step_count(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "x - step 0: {'train/loss': 1.0}\nx - step 0: {'train/loss': 2.0, 'y': nan}\nx - eval 0: {'a': 1}\n"
    )
    assert evidence.logged(log) == {"step": {0: {"train/loss": 2.0, "y": None}}, "eval": {0: {"a": 1}}}
