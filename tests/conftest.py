"""What every test file needs: the plugin and vime on the path, and the real Qwen3 tokenizer where the test command put it.

vime is the checkout that VIME_ROOT names, else the one that these files lie in, else the stand-in in tests/standin.
"""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
EXAMPLE = TESTS.parent / "examples" / "retool"
AROUND = TESTS.parent if (TESTS.parent / "vime").is_dir() else TESTS / "standin"
VIME = Path(os.environ.get("VIME_ROOT") or AROUND)

for folder in (VIME, TESTS, EXAMPLE):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    """Qwen3's own tokenizer and chat template."""
    folder = os.environ.get("RETOOL_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("RETOOL_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer.json (tests/run.sh fetches one)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
