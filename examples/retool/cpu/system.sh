# shellcheck shell=bash
# Sourced: what the scripts need of the system (a Python, libnuma), brought where it is missing.
#
#   need_python      sets `python` to an interpreter that fits
#   need_libraries   makes sure that libnuma, which vLLM loads, can be loaded
#
# PYTHON names the interpreter. What is missing comes from Debian's or Ubuntu's packages: installed where this is root
# or sudo asks for no password, else unpacked below RETOOL_CACHE, which needs no rights and changes nothing of the
# system.

# shellcheck source=examples/retool/cpu/cache.sh
source "$(dirname "${BASH_SOURCE[0]}")/cache.sh"
unpacked="$RETOOL_CACHE/system"
# The caller's own modules and settings of Python are none of this: one of them may be another version's.
for name in $(compgen -e PYTHON); do if [[ $name != PYTHON ]]; then unset "$name"; fi; done

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

use_unpacked() { # what was unpacked earlier is used from now on
    local folder
    for folder in "$unpacked"/usr/lib/*-linux-gnu "$unpacked"/lib/*-linux-gnu; do
        if [[ -d $folder && :${LD_LIBRARY_PATH:-}: != *":$folder:"* ]]; then
            export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
        fi
    done
    if [[ -d $unpacked/usr/bin && :$PATH: != *":$unpacked/usr/bin:"* ]]; then
        export PATH="$PATH:$unpacked/usr/bin"
    fi
}

need_python() { # need_python: sets `python`; dies where none is to be had
    use_unpacked
    find_python && return
    if [[ -n ${PYTHON:-} ]]; then
        die "PYTHON=$PYTHON is no CPython from 3.11 to 3.14 with the module venv"
    fi
    bring "Python" python3 python3-venv
    find_python || die "this system's own Python is $(python3 -V 2>&1), and the CPU run needs CPython 3.11 to 3.14:" \
        "install one and name it in PYTHON"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
        if python_fits "$candidate"; then
            python=$candidate
            export PYTHON=$candidate
            return
        fi
        if [[ -n ${PYTHON:-} ]]; then return 1; fi # the one that is named or none
    done
    return 1
}

python_fits() { # the versions that every pinned package has a wheel for; a free-threaded build needs others
    "$1" -c 'import sys, sysconfig, venv
fits = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 14)
sys.exit(not fits or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1
}

need_libraries() {
    loads_libnuma && return
    bring "libnuma" libnuma1
    loads_libnuma || die "vLLM needs the system library libnuma, and it cannot be loaded"
}

loads_libnuma() {
    use_unpacked
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}

pip_wheel() { # prints where a wheel of pip is, for a Python without ensurepip (Debian's, without python3-venv)
    local wheel
    for wheel in /usr/share/python-wheels/pip-*.whl "$unpacked"/usr/share/python-wheels/pip-*.whl; do
        if [[ -r $wheel ]]; then
            printf '%s\n' "$wheel"
            return
        fi
    done
    return 1
}

bring() { # bring WHAT PACKAGES ...: from Debian or Ubuntu
    local what=$1 log="$RETOOL_CACHE/apt.log" as_root=()
    shift
    command -v apt-get >/dev/null ||
        die "$what is missing, and there is no apt-get to bring it: install what is called $* on Debian"
    mkdir -p "$RETOOL_CACHE" 2>/dev/null || die "cannot write to $RETOOL_CACHE; name another folder in RETOOL_CACHE"
    : >"$log"
    if ((EUID == 0)) || sudo -n true 2>/dev/null; then
        if ((EUID != 0)); then as_root=(sudo -n); fi
        say "installing $what: apt-get install $* (the log is $log)"
        {
            # In /tmp rather than in a TMPDIR that may be small, or closed to apt's own user.
            "${as_root[@]}" env -u TMPDIR apt-get update -q &&
                "${as_root[@]}" env -u TMPDIR DEBIAN_FRONTEND=noninteractive \
                    apt-get install -y -q --no-install-recommends "$@"
        } >>"$log" 2>&1 </dev/null || die "apt-get could not install $*: $(last_error "$log")"
    else
        say "unpacking $what below $unpacked: $* (the log is $log)"
        unpack "$@" >>"$log" 2>&1 </dev/null || die "cannot unpack $* without root: $(last_error "$log")." \
            "As root: apt-get install $*"
        use_unpacked
    fi
}

unpack() ( # unpack PACKAGES ...: them and what they need that is not installed, without root; package lists of its own
    set -e
    mkdir -p "$unpacked" "$RETOOL_CACHE/apt/lists/partial" "$RETOOL_CACHE/apt/cache/archives/partial"
    export TMPDIR="$RETOOL_CACHE/apt" # the user's may be small
    own=(-o "Dir::State::lists=$RETOOL_CACHE/apt/lists" -o "Dir::Cache=$RETOOL_CACHE/apt/cache" -o Debug::NoLocking=1)
    apt-get "${own[@]}" update -q
    needed=$(apt-get "${own[@]}" -s -q install --no-install-recommends "$@" | awk '/^Inst / { print $2 }')
    cd "$RETOOL_CACHE/apt"
    # shellcheck disable=SC2086 # names of packages, one word each
    apt-get "${own[@]}" -q download $needed
    for archive in *.deb; do dpkg-deb -x "$archive" "$unpacked"; done
    rm -rf "$RETOOL_CACHE/apt"
    wrap_pythons
)

# An unpacked Python has to find its libraries outside of these scripts too, where use_unpacked has set no variable.
wrap_pythons() {
    local program folder folders=''
    for folder in "$unpacked"/usr/lib/*-linux-gnu "$unpacked"/lib/*-linux-gnu; do
        if [[ -d $folder ]]; then folders+=":$folder"; fi
    done
    for program in "$unpacked"/usr/bin/python3.*; do
        if [[ $program =~ /python3\.[0-9]+$ && ! -e $program.bin ]]; then
            mv "$program" "$program.bin"
            # By the name that it was called by: beside that Python finds its environment.
            # shellcheck disable=SC2016 # for the wrapper to expand
            printf '#!/bin/bash\nLD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec -a "$0" %q "$@"\n' \
                "${folders#:}" "$program.bin" >"$program"
            chmod +x "$program"
        fi
    done
}

last_error() { # last_error LOG: the reason in one line, and where the rest is
    local line
    line=$(grep -E '^(E:|ERROR)|[A-Za-z]*Error: ' "$1" | tail -n 1 || true)
    printf '%s (all of it: %s)' "${line:-$(tail -n 1 "$1")}" "$1"
}
