#!/usr/bin/env bash
# Makes the virtual environment of the CPU run, once, and prints its path on stdout; everything else goes to stderr.
#
#   bash venv.sh [MORE_REQUIREMENTS.txt ...]     the tests add theirs to the same environment
#
# PYTHON        the interpreter to build it with (default: the first of python3.11, python3.12, python3 that fits)
# RETOOL_CACHE  where everything is kept (default: ~/.cache/retool-vime; the rule is in cache.sh)
# RETOOL_VENV   the environment itself (default: a folder there, named after the requirements and the interpreter)
#
# A requirements file counts as installed once its marker, which is written last, is there: after a Ctrl-C the next run
# goes on where pip was stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements="$here/requirements.txt"
# shellcheck source=examples/retool/cpu/cache.sh
source "$here/cache.sh"
cache=$RETOOL_CACHE
needed_mb=6000 # the environment is 3 GB, and pip unpacks beside it

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

fits() { # a CPython 3.11 or 3.12 that can make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.11 or 3.12 with the modules venv and ensurepip"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 with the module venv is here. On Debian or Ubuntu: apt install python3 python3-venv;" \
        "or name an interpreter in PYTHON"
}

digest() { "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:12])'; }

show_progress() { # pip's output as one line that counts packages; on no terminal, nothing
    if [[ -t 2 ]]; then
        awk -v total="$1" '/^Collecting / { printf "\r\033[K  package %d of %d: %s", ++n, total, $2 > "/dev/stderr"; fflush("/dev/stderr") }
            /^Installing collected/ { printf "\r\033[K  unpacking" > "/dev/stderr"; fflush("/dev/stderr") }
            END { printf "\r\033[K" > "/dev/stderr" }'
    else
        cat >/dev/null
    fi
}

pip_install() { # pip_install COUNT ARGUMENTS: quiet on the terminal, all of it in the log
    local count=$1
    shift
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps "$@" 2>&1 | tee -a "$log" | show_progress "$count"
}

install_file() {
    local file=$1 marker count torch
    marker="$venv/.installed-$(digest <"$file")"
    [[ -e $marker ]] && return
    count=$(grep -c '==' "$file")
    say "installing $count packages from $file (once; the log is $log)"
    # torch first: where it is not to be had, that is known before anything else is downloaded.
    torch=$(grep -E '^torch==' "$file" || true)
    if [[ -n $torch ]] && ! pip_install 1 "$torch"; then
        if grep -qE 'No matching distribution|Could not find a version|ResolutionImpossible' "$log"; then
            die "pip finds no $torch for $("$python" -V) on its index: PyPI does not carry PyTorch's CPU builds." \
                "Point pip at PyTorch's own index and run again:" \
                "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        fi
        die "pip could not install $torch: $(last_error)"
    fi
    pip_install "$count" -r "$file" || die "pip could not install $file: $(last_error)"
    : >"$marker"
}

last_error() { # the reason in one line
    printf '%s (all of it: %s)' "$(grep -E 'ERROR|Error' "$log" | tail -n 1)" "$log"
}

for file in "$requirements" "$@"; do
    [[ -r $file ]] || die "the requirements file $file is missing"
done
python=$(find_python)
venv=${RETOOL_VENV:-$cache/venv-$({ cat "$requirements"; "$python" -VV; uname -m; } | digest)}
mkdir -p "$cache" "$venv" 2>/dev/null || die "cannot write to $cache and $venv; name other folders in RETOOL_CACHE and RETOOL_VENV"
log="$cache/pip.log"

exec 9>"$venv/.lock" # two runs at once: the second waits for the first one's environment
if command -v flock >/dev/null; then flock 9; fi

"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    die "vLLM needs the system library libnuma: apt install libnuma1"

missing=()
for file in "$requirements" "$@"; do
    [[ -e "$venv/.installed-$(digest <"$file")" ]] || missing+=("$file")
done
if ((${#missing[@]})); then
    if [[ ! -e "$venv/.installed-$(digest <"$requirements")" ]]; then
        free_mb=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
        ((free_mb >= needed_mb)) ||
            die "$venv has $free_mb MB free, the CPU run needs $needed_mb MB; name another place in RETOOL_CACHE"
    fi
    : >"$log"
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" >>"$log" 2>&1 ||
        die "cannot make a virtual environment in $venv: $(tail -n 1 "$log")"
    for file in "${missing[@]}"; do
        install_file "$file"
    done
fi
printf '%s\n' "$venv"
