"""vime, Megatron-LM and the Python environment in which they run without a GPU.

    VIME_ROOT, MEGATRON_ROOT, MBRIDGE_ROOT --or git clone--> Sources --> vime's files with the toy's model script
                                                                   \\-> an environment that puts without_cuda in front

Contract: a checkout that the user names is only read. What is cloned lies in RETOOL_CACHE, whole or not at all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cpu.options import EXAMPLE, RunError

# What was run here. vime names the Megatron-LM that it wants in docker/Dockerfile, and brings the patch for it.
VIME = ("https://github.com/vllm-project/vime", "c0ed6d8")
MEGATRON = ("https://github.com/NVIDIA/Megatron-LM", "1dcf0dafa884ad52ffb243625717a3471643e087")
PATCH = Path("docker", "patch", "latest", "megatron.patch")


class Sources(NamedTuple):
    vime: Path
    megatron: Path
    mbridge: Path | None  # None for the package of PyPI


def find_sources(environ: Mapping[str, str], cache: Path) -> Sources:
    """The checkouts that the environment names; the others cloned into the cache, where earlier runs left them.

    Raises:
        RunError: one that is named is none, or one cannot be cloned.
    """
    vime = _named(environ, "VIME_ROOT", "vime/utils/arguments.py") or _cloned(cache, "vime", *VIME)
    megatron = _named(environ, "MEGATRON_ROOT", "megatron/training")
    if megatron is None:
        megatron = _cloned(cache, "Megatron-LM", *MEGATRON, patch=vime / PATCH)
    return Sources(vime, megatron, _named(environ, "MBRIDGE_ROOT", "mbridge/core"))


def _named(environ: Mapping[str, str], variable: str, holds: str) -> Path | None:
    if not (value := environ.get(variable)):
        return None
    folder = Path(value).resolve()
    if not os.path.exists(folder / holds):
        raise RunError(f"{variable} names {folder}, and there is no {holds} in it")
    return folder


def _cloned(cache: Path, name: str, url: str, commit: str, patch: Path | None = None) -> Path:
    target = cache / f"{name}-{commit[:7]}"
    if os.path.isdir(target):
        return target
    if not shutil.which("git"):
        raise RunError(f"git is not installed, and {name} is to be cloned: install it, or set {_variables()}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clone.", dir=cache) as folder:
        clone = Path(folder, name)
        print(f"cloning {url} at {commit} into {target} (once)", flush=True)
        # Without the old versions of files, which nothing here reads.
        _git(url, "clone", "--quiet", "--filter=blob:none", "--no-checkout", url, str(clone))
        _git(url, "-C", str(clone), "checkout", "--quiet", commit)
        if patch:
            if not os.path.isfile(patch):
                raise RunError(
                    f"no {PATCH} in {patch.parents[3]} for {name}: set MEGATRON_ROOT to a checkout that has it"
                )
            _git(url, "-C", str(clone), "apply", "--3way", str(patch))
        clone.rename(target)
    return target


def _git(url: str, *arguments: str) -> None:
    quiet = {"GIT_TERMINAL_PROMPT": "0"}  # a wrong address asks for a password else
    done = subprocess.run(
        ["git", *arguments], env=os.environ | quiet, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["git says nothing"])[-1]
        raise RunError(f"cannot get {url} ({last}): set {_variables()}")


def _variables() -> str:
    return "VIME_ROOT and MEGATRON_ROOT to checkouts that are on this machine"


def vime_with_model(vime: Path, folder: Path, name: str, model_script: str) -> Path:
    """A folder with everything of the vime checkout, by links, and one more of its scripts/models."""
    models = folder / "scripts" / "models"
    shutil.rmtree(folder, ignore_errors=True)
    models.mkdir(parents=True)
    for there, here in ((vime, folder), (vime / "scripts", folder / "scripts"), (vime / "scripts/models", models)):
        for entry in there.iterdir():
            if not os.path.lexists(here / entry.name):
                (here / entry.name).symlink_to(entry)
    (models / f"{name}.sh").write_text(model_script, encoding="utf-8")
    return folder


def make_environment(folder: Path, mbridge: Path | None) -> Path:
    """A virtual environment with the packages of this one, in which every Python starts with without_cuda.

    Returns:
        Its folder of programs, for PATH.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    here = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    lines = [*([str(mbridge)] if mbridge else []), *map(str, here)]
    (packages / "1_packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    start = f"import sys; sys.path.append({str(EXAMPLE)!r}); import trainer.without_cuda as layer; layer.install()"
    (packages / "2_without_cuda.pth").write_text(start + "\n", encoding="utf-8")
    programs = folder / "bin"
    ray = programs / "ray"  # a package's own program would start the environment that it was installed in
    ray.write_text(f"#!{programs / 'python'}\nimport sys\nfrom ray.scripts.scripts import main\n\nsys.exit(main())\n")
    ray.chmod(0o755)
    return programs


def shown_command(variables: Mapping[str, str], command: list[str]) -> str:
    """What a shell would be given, for the log."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{settings} {shlex.join(command)}"
