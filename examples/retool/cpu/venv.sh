#!/usr/bin/env bash
# Makes the virtual environment of the CPU run, once, and prints its path on stdout; everything else goes to stderr.
#
#   bash venv.sh [MORE_REQUIREMENTS.txt ...]     the tests add theirs to the same environment
#
# PYTHON              the interpreter to build it with (default: system.sh finds one)
# RETOOL_CACHE        where everything is kept (default: ~/.cache/retool-vime; the rule is in cache.sh)
# RETOOL_TORCH_INDEX  where torch alone is looked for if pip's own index has no build for the CPU
# RETOOL_VENV         the environment itself (default: a folder there, named after the requirements and the
# interpreter)
#
# A requirements file counts as installed once its marker, which is written last, is there: after a Ctrl-C the next run
# goes on where pip was stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements="$here/requirements.txt"
# shellcheck source=examples/retool/cpu/system.sh
source "$here/system.sh"
needed_mb=6000 # the environment is 3 GB, and pip unpacks beside it
cuda_mb=7000   # on top of that, where only PyPI's own build of torch is to be had
# PyPI carries only builds of torch that want NVIDIA's libraries, 5 GB of them; PyTorch's own index has the CPU's.
torch_index=${RETOOL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

pins() { grep -v '^#' "$1" | LC_ALL=C sort; } # what an environment depends on: a comment or the order changes nothing
digest() { "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:12])'; }
installed() { [[ -e "$venv/.installed-$(pins "$1" | digest)" ]]; }

check_room() { # check_room MB
    local free_mb
    free_mb=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
    ((free_mb >= $1)) || die "$venv has $free_mb MB free, the CPU run needs $1 MB; name another place in RETOOL_CACHE"
}

make_venv() {
    local wheel site certificates=/etc/ssl/certs/ca-certificates.crt
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    TMPDIR="$scratch" "$python" -m venv "$venv" >>"$log" 2>&1 && return
    # Debian's Python without python3-venv, or one that was unpacked: pip is unpacked from its wheel.
    pip_wheel >/dev/null || bring "pip" python3-pip-whl
    wheel=$(pip_wheel) || die "pip is missing, and $python cannot bring it: $(tail -n 1 "$log")"
    "$python" -m venv --without-pip "$venv" >>"$log" 2>&1 || die "cannot make $venv: $(tail -n 1 "$log")"
    site=$(echo "$venv"/lib/python3*/site-packages)
    "$venv/bin/python" -m zipfile -e "$wheel" "$site" >>"$log" 2>&1 || die "cannot unpack $wheel: $(tail -n 1 "$log")"
    if [[ ! -r $certificates ]]; then # Debian's pip looks there, and fails; the usual ones are in its wheel as well
        sed -i "s|$certificates|$site/pip/_vendor/certifi/cacert.pem|" "$site/pip/_vendor/certifi/core.py"
    fi
}

pip_install() { # pip_install COUNT WHAT ARGUMENTS ...: all of its output is in the log from byte `log_start` on
    local count=$1 what=$2 code=0 before stage='' line
    shift 2
    log_start=$(($(wc -c <"$log") + 1))
    before=$(count_installed)
    : >"$scratch/details.log" # where pip says of each index why it had nothing
    TMPDIR="$scratch" "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-color \
        --log "$scratch/details.log" "$@" >>"$log" 2>&1 </dev/null &
    pip=$!
    while kill -0 "$pip" 2>/dev/null; do
        line=$(this_log | awk -v total="$count" '/^ *(Collecting|Processing) / { ++n; name = $2; sub(/.*\//, "", name) }
            /^Installing collected/ { unpacking = 1 }
            END { if (unpacking) print "unpacking"; else if (n) printf "package %d of %d: %s\n", n, total, name }')
        if [[ $line == unpacking ]]; then line="unpacking package $(($(count_installed) - before)) of $count"; fi
        if [[ -t 2 ]]; then
            printf '\r\033[K  %s' "${line:0:100}" >&2
        elif [[ -n $line && ${line%% *} != "$stage" ]]; then # one line for each stage
            stage=${line%% *}
            if [[ $stage == unpacking ]]; then say "  unpacking $what"; else say "  downloading $what"; fi
        fi
        sleep 0.5
    done
    wait "$pip" || code=$?
    pip=''
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    return "$code"
}

this_log() { tail -c "+$log_start" "$log"; }

count_installed() {
    find "$venv"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l
}

why_pip_failed() { # why_pip_failed CODE: the kind of failure, and what to do about it
    if pip_said 'No space left on device'; then
        printf 'the disk is full; name another place in RETOOL_CACHE'
    elif pip_said 'CERTIFICATE_VERIFY_FAILED|SSLError|SSLCertVerificationError' && ! an_index_answered; then
        printf "the index's certificate is not trusted here (a proxy that opens TLS?); name its CA file in PIP_CERT"
    elif pip_said 'ProxyError|Cannot connect to proxy' && ! an_index_answered; then
        printf 'the proxy does not answer; see HTTPS_PROXY'
    elif no_network; then
        printf 'no network: the index cannot be reached'
    elif pip_said "$refusal"; then
        printf 'the index refuses: %s' "$(grep -ohE "$refusal" "$scratch/details.log" | tail -n 1)"
    elif no_match; then
        printf 'the index has no such package for %s: %s' "$("$python" -V)" \
            "$(this_log | grep -oE 'No matching distribution found for .*' | tail -n 1)"
    elif (($1 == 137)); then
        printf 'pip was killed (SIGKILL), as the kernel does where memory runs out'
    elif (($1 > 128)); then
        printf 'pip was ended by signal %d' "$(($1 - 128))"
    else
        printf '%s' "$(this_log | grep -E 'ERROR|Error' | tail -n 1)"
    fi
    printf ' (all of it: %s)' "$log"
}

refusal='(40[1357]|429|5[0-9][0-9]) (Client|Server) Error|too many [0-9]{3} error responses'

pip_said() { grep -qE "$1" "$scratch/details.log" || this_log | grep -qE "$1"; }
no_match() { pip_said 'No matching distribution|Could not find a version|ResolutionImpossible'; } # the last: a constraint
an_index_answered() { pip_said 'Found link|Skipping link: none of|404 Client Error'; }
no_network() {
    local errors='NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|connection error'
    errors+='|Failed to establish a new connection|Connection (refused|reset)|Network is unreachable'
    pip_said "$errors" && ! pip_said "$refusal" && ! an_index_answered
}

install_torch() { # install_torch REQUIREMENT: first, since it is what an index most likely does not have
    local code=0
    pip_install 1 torch --no-deps "$1" || code=$?
    if ((code == 0)); then return; fi
    if ! no_match || no_network || pip_said "$refusal|SSLError|ProxyError"; then
        die "pip could not install $1: $(why_pip_failed "$code")"
    fi
    say "  pip's index has no $1: trying $torch_index"
    pip_install 1 torch --no-deps --retries 1 --index-url "$torch_index" "$1" && return
    say "  not there either: taking PyPI's own build of torch, which brings NVIDIA's libraries"
    check_room $((needed_mb + cuda_mb))
    code=0
    pip_install 1 torch --no-deps "${1%%+*}" || code=$?
    ((code == 0)) || die "pip could not install ${1%%+*}: $(why_pip_failed "$code")"
    "$venv/bin/python" -c 'from importlib.metadata import requires
names = ("nvidia-", "cuda-")
print(*(line.split(";")[0].strip() for line in requires("torch") if line.startswith(names)), sep="\n")' >"$scratch/cuda.txt"
    pip_install "$(wc -l <"$scratch/cuda.txt")" "NVIDIA's libraries" -r "$scratch/cuda.txt" || code=$?
    ((code == 0)) || die "pip could not install torch's libraries: $(why_pip_failed "$code")"
}

install_file() {
    local file=$1 count torch code=0
    count=$(grep -c '==' "$file")
    say "installing $count packages from $file (once; the log is $log)"
    torch=$(grep -E '^torch==' "$file" || true)
    if [[ -n $torch ]]; then install_torch "$torch"; fi
    grep -v '^torch==' "$file" >"$scratch/requirements.txt"
    pip_install "$count" "$count packages" --no-deps -r "$scratch/requirements.txt" || code=$?
    ((code == 0)) || die "pip could not install $file: $(why_pip_failed "$code")"
    : >"$venv/.installed-$(pins "$file" | digest)"
}

stopped() { # stopped CODE: by a signal, which a background process in a script does not get by itself
    if [[ -n ${pip:-} ]]; then
        kill "$pip" 2>/dev/null || true
        wait "$pip" || true
    fi
    say ""
    say "stopped; the next run goes on where this one was"
    exit "$1"
}

for file in "$requirements" "$@"; do
    [[ -r $file ]] || die "the requirements file $file is missing"
done
need_python
venv=${RETOOL_VENV:-$RETOOL_CACHE/venv-$({ pins "$requirements"; "$python" -VV; uname -m; } | digest)}
mkdir -p "$RETOOL_CACHE" "$venv" 2>/dev/null ||
    die "cannot write to $RETOOL_CACHE and $venv; name other folders in RETOOL_CACHE and RETOOL_VENV"
log="$RETOOL_CACHE/pip.log"

exec 9>"$venv/.lock" # two runs at once: the second waits for the first one's environment
if command -v flock >/dev/null; then flock 9; fi

missing=()
for file in "$requirements" "$@"; do
    installed "$file" || missing+=("$file")
done
if ((${#missing[@]})); then
    installed "$requirements" || check_room "$needed_mb"
    : >"$log"
    # For temporary files, beside the environment: TMPDIR may be small, and is not ours to leave anything in.
    scratch=$(mktemp -d "$RETOOL_CACHE/pip.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    trap 'stopped 130' INT
    trap 'stopped 143' TERM
    trap 'stopped 129' HUP
    make_venv
    for file in "${missing[@]}"; do
        install_file "$file"
    done
fi
printf '%s\n' "$venv"
