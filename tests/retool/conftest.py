"""What every test file needs: the plugin and vime on the path, and the real Qwen3 tokenizer where the test command put it.

vime is the checkout that VIME_ROOT names, else the one that these files lie in, else the stand-in beside this file.
"""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
EXAMPLE = ROOT / "examples" / "retool"
VIME = Path(os.environ.get("VIME_ROOT") or (ROOT if (ROOT / "vime").is_dir() else TESTS / "standin"))

for folder in (VIME, TESTS, EXAMPLE / "cpu", EXAMPLE):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    """Qwen3's own tokenizer and chat template."""
    folder = os.environ.get("RETOOL_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip(
            "RETOOL_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer.json (tests/retool/run.sh fetches one)"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
