"""What the tests of the data scripts share: running a script as a user does, its input, and rows of ReTool-SFT."""

import json
import subprocess
import sys
from pathlib import Path


def run_script(
    script: Path, folder: Path, *arguments, downloads: Path | None = None, **options
) -> subprocess.CompletedProcess:
    """Run a script in `folder`, which is the vime checkout and holds the downloads as well, without network."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VIME_ROOT": str(folder),
        "RETOOL_DOWNLOADS": str(downloads or folder / "downloads"),
    }
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        **options,
    )


def write_jsonl(path: Path, rows) -> Path:
    """Write rows as JSON lines; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


# Rows as ReTool-SFT has them -----------------------------------------------------------------------------------------

PREAMBLE = (
    "Think about the problem and write Python where it helps. Put code into <code> and </code>; what it prints comes "
    "back in <interpreter> and </interpreter>.\nThe last part reads\n<answer>\n\\boxed{'The answer'}\n</answer>\n"
    "\n*user question:*\n"
)
REMINDER = (
    "\n\nRemember to place the final answer in the last part using the format: \n<answer>\n\\boxed{'The final answer "
    "goes here.'}\n</answer>"
)
CODE = "for i in range(2):\n    print(i)"


def row(assistant: str, question: str = "What is 6 times 7?") -> dict:
    return {
        "messages": [
            {"role": "user", "content": PREAMBLE + question + REMINDER},
            {"role": "assistant", "content": assistant},
        ]
    }


def block(code: str, result: str = "42") -> str:
    return f"<code>\n```python\n{code}\n```\n</code>\n<interpreter>\n{result}\n</interpreter>\n"


def answered(body: str) -> str:
    return f"{body}\n<answer>\n\\boxed{{42}}\n</answer>"


def code_of(message: dict) -> str:
    """The code of an assistant message that ends in a call, read back as RL reads it."""
    call = message["content"].rpartition("<tool_call>\n")[2].removesuffix("\n</tool_call>")
    return json.loads(call)["arguments"]["code"]


def roles(messages: list[dict]) -> list[str]:
    return [message["role"] for message in messages]
