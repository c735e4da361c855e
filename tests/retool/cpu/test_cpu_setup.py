"""What the scripts of the CPU run do before Python takes over: input answered first, an environment, pip's
failures."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pip
import pytest
from cpu_helpers import EXAMPLE, problem_file
from retool.processes import free_ports
from watching import assert_ended, descendants, wait_for

ROLLOUT = EXAMPLE / "rollout_on_cpu.sh"
VENV = EXAMPLE / "cpu" / "venv.sh"


def bash(script: Path, *arguments, cache: Path, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", script, *map(str, arguments)],
        cwd=cache.parent,
        env=clean_environment() | {"RETOOL_CACHE": str(cache), "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def clean_environment() -> dict[str, str]:
    """Without the machine's own settings of pip, and of these scripts."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "RETOOL_"))}
    return settings | {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "no_proxy": "127.0.0.1"}


# ---------------------------------------------------------------------------------------------------------------------
# Answered before anything is installed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, code, out, err",
    [
        (["--help"], 0, "--keep-engine", ""),
        (["--limit", "none"], 2, "", "--limit: none is not a whole number, at least 1"),
        (["--problems", "none.jsonl"], 1, "", "error: cannot read the problem file none.jsonl"),
        (["--model", "none"], 1, "", "error: --model none is no model directory"),
        (["--output", "."], 1, "", "error: --output . exists already"),
        (
            ["--output", "/proc/x"],
            1,
            "",
            "error: /proc has 0 MB free" if os.geteuid() == 0 else "error: cannot write to",
        ),
    ],
)
def test_input_is_answered_before_anything_is_installed(tmp_path, arguments, code, out, err):
    done = bash(ROLLOUT, *arguments, cache=tmp_path / "cache")
    assert done.returncode == code and out in done.stdout and err in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "something was made"


def test_help_needs_no_python(tmp_path):
    """cpu/help.txt is what the options say themselves; made anew with COLUMNS=100 rollout_on_cpu.sh --help."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("bash", "cat", "dirname"):
        (bin_folder / name).symlink_to(shutil.which(name))
    said = bash(ROLLOUT, "--limit", "3", "--help", cache=tmp_path / "cache", PATH=str(bin_folder), PYTHON="")
    assert said.returncode == 0 and not said.stderr
    assert said.stdout.split() == bash(ROLLOUT, "--help", cache=tmp_path / "cache").stdout.split()
    assert list(tmp_path.iterdir()) == [bin_folder], "something was made"


def test_a_bad_problem_is_named_before_anything_is_installed(tmp_path):
    path = problem_file(tmp_path, {"prompt": "x", "label": "1"}, {"prompt": " ", "label": "1"})
    done = bash(ROLLOUT, "--problems", path, cache=tmp_path / "cache")
    assert done.returncode == 1 and done.stderr == f'error: {path}:2: "prompt" is blank\n'
    assert list(tmp_path.iterdir()) == [path]


def test_modules_in_the_directory_that_it_is_started_from_are_not_imported(tmp_path):
    for name in ("cpu", "json", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the wrong place')")
    done = bash(ROLLOUT, "--help", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_does_not_fit_is_refused(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\nexec "$REAL" -c "import sys; sys.exit(1)"\n')
    old.chmod(0o755)
    done = bash(ROLLOUT, "--help", cache=tmp_path / "cache", PYTHON=str(old), REAL=sys.executable)
    assert done.returncode == 1 and f"PYTHON={old} is no CPython from 3.11 to 3.14" in done.stderr


def test_a_python_that_was_unpacked_finds_its_libraries_in_an_empty_environment(tmp_path):
    """As the sandbox starts it, through an environment's link, whose name it has to be called by."""
    cache = tmp_path / "a cache"
    libraries = cache / "system" / "usr" / "lib" / "x-linux-gnu"
    libraries.mkdir(parents=True)
    (cache / "system" / "lib" / "x-linux-gnu").mkdir(parents=True)
    program = cache / "system" / "usr" / "bin" / "python3.99"
    program.parent.mkdir()
    shutil.copy("/bin/bash", program)  # any program that says how it was started
    for _ in range(2):  # a second package is unpacked later
        subprocess.run(
            ["bash", "-c", 'source "$0"; wrap_pythons', EXAMPLE / "cpu" / "system.sh"],
            env=os.environ | {"RETOOL_CACHE": str(cache)},
            check=True,
        )
    link = tmp_path / "python"
    link.symlink_to(program)
    command = [link, "-c", 'echo "$BASH|$LD_LIBRARY_PATH|$1"', "x", "a  b"]
    said = subprocess.check_output(command, env={}, text=True)
    assert said == f"{link}|{libraries}:{cache}/system/lib/x-linux-gnu|a  b\n"
    said = subprocess.check_output(command, env={"LD_LIBRARY_PATH": "/mine"}, text=True)
    assert said.split("|")[1].endswith(":/mine")


# ---------------------------------------------------------------------------------------------------------------------
# pip's failures, told apart
# ---------------------------------------------------------------------------------------------------------------------


class Index(BaseHTTPRequestHandler):
    """A package index that has nothing."""

    code = 404

    def do_GET(self):
        self.send_response(self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def index(code: int = 404, certificate: Path | None = None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Index,), {"code": code}))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    server.server_close()


def self_signed(path: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *plain) + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with a real pip and nothing else: ours, since a Debian's Python may be without the one it
    brings."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")
    return folder


def pip_failure(tmp_path: Path, venv: Path, **settings: str) -> str:
    done = bash(VENV, cache=tmp_path / "cache", RETOOL_VENV=str(venv), **settings)
    assert done.returncode == 1, done.stderr
    assert not list((tmp_path / "cache").glob("pip.*/")), "pip's temporary files were left"
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: pip could not install torch") and str(tmp_path / "cache" / "pip.log") in error
    return error


def test_an_index_that_cannot_be_reached_is_no_network(tmp_path, environment):
    url = f"http://127.0.0.1:{free_ports(1)[0]}/simple"
    assert "no network: the index cannot be reached" in pip_failure(tmp_path, environment, PIP_INDEX_URL=url)


def test_an_index_whose_certificate_is_not_trusted_is_said(tmp_path, environment):
    with index(certificate=self_signed(tmp_path / "certificate.pem")) as url:
        error = pip_failure(tmp_path, environment, PIP_INDEX_URL=url)
    assert "certificate is not trusted" in error and "PIP_CERT" in error


def test_an_index_without_torch_leads_to_the_other_ones(tmp_path, environment):
    with index() as url:
        settings = {"PIP_INDEX_URL": url, "RETOOL_TORCH_INDEX": url}
        done = bash(VENV, cache=tmp_path / "cache", RETOOL_VENV=str(environment), **settings)
    error = done.stderr.splitlines()[-1]
    assert re.search(
        r"the index has no such package for Python 3\.\d+\.\d+: No matching distribution found for", error
    )
    assert f"trying {url}" in done.stderr and "taking PyPI's own build of torch" in done.stderr
    asked = re.findall(
        r"Could not find a version that satisfies the requirement (\S+)", (tmp_path / "cache" / "pip.log").read_text()
    )
    assert asked == ["torch==2.13.0+cpu", "torch==2.13.0+cpu", "torch==2.13.0"]


def test_an_index_that_wants_a_login_is_said(tmp_path, environment):
    with index(code=401) as url:
        assert "the index refuses: 401 Client Error" in pip_failure(tmp_path, environment, PIP_INDEX_URL=url)


def test_an_extra_index_that_is_down_is_no_reason_where_the_other_one_answers(tmp_path, environment):
    with index() as url:
        down = f"http://127.0.0.1:{free_ports(1)[0]}/simple"
        settings = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": down, "RETOOL_TORCH_INDEX": url}
        error = pip_failure(tmp_path, environment, **settings)
    assert "the index has no such package" in error


def test_an_index_that_refuses_is_said(tmp_path, environment):
    with index(code=503) as url:
        assert "the index refuses: too many 503 error responses" in pip_failure(
            tmp_path, environment, PIP_INDEX_URL=url
        )


def stand_in_pip(folder: Path, script: str) -> Path:
    """An environment whose python does what the script says, where pip is asked to install something."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/bash\nif [[ "$*" == *--version* ]]; then exit 0; fi\n{script}\n')
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "script, said",
    [
        (
            "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'; exit 1",
            "the disk is full",
        ),
        ("kill -9 $$", "pip was killed (SIGKILL), as the kernel does where memory runs out"),
        ("kill -15 $$", "pip was ended by signal 15"),
        ("echo 'ERROR: Hash mismatch of torch'; exit 1", "ERROR: Hash mismatch of torch"),
    ],
)
def test_other_failures_of_pip_are_told_apart(tmp_path, script, said):
    assert said in pip_failure(tmp_path, stand_in_pip(tmp_path / "venv", script))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_installation_that_is_interrupted_ends_pip_and_leaves_nothing(tmp_path, signum):
    venv = stand_in_pip(tmp_path / "venv", 'echo "Collecting torch"; : >"$TMPDIR/big"; exec sleep 600')
    settings = {"RETOOL_CACHE": str(tmp_path / "cache"), "RETOOL_VENV": str(venv), "PYTHON": sys.executable}
    said = tmp_path / "said"
    with said.open("w") as stderr:
        pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
        process = subprocess.Popen(["bash", VENV], env=clean_environment() | settings, text=True, **pipes)
    wait_for(lambda: list((tmp_path / "cache").glob("pip.*/big")) and "downloading torch" in said.read_text())
    left = descendants(process.pid)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signum and not out
    assert "stopped; the next run goes on where this one was" in said.read_text()
    assert_ended(left)
    assert not list((tmp_path / "cache").glob("pip.*/"))


def test_a_disk_without_room_is_said_before_anything_is_downloaded(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "df").write_text("#!/bin/sh\nprintf 'head\\nfs 1 1 100 1 /\\n'\n")
    (bin_folder / "df").chmod(0o755)
    done = bash(VENV, cache=tmp_path / "cache", PATH=f"{bin_folder}:{os.environ['PATH']}")
    assert done.returncode == 1 and "has 100 MB free, the CPU run needs 6000 MB" in done.stderr
