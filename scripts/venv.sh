# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes the virtual environment .venv in the repository and puts it on the PATH.
#
#   use_venv EXTRAS     EXTRAS of the package to install, such as plot or test,lint
#
# torch is pinned to the release that everything was tested with. Which build it is follows from pip's configuration:
# the default index serves one with CUDA, which runs on the CPU too.

TORCH=torch==2.13.0

use_venv() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null ||
        { echo "$0: needs Python 3.10 or newer as python3; set PYTHON to one" >&2; exit 2; }
    if [[ ! -x .venv/bin/python ]]; then
        echo "$0: making a virtual environment in $PWD/.venv" >&2
        "$python" -m venv .venv
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    local wanted marker=".venv/installed-$1"
    wanted="$TORCH $(cksum < pyproject.toml)"
    if [[ $(cat "$marker" 2> /dev/null) != "$wanted" ]]; then
        echo "$0: installing $TORCH and this package with its extras: $1 (the first time takes minutes)" >&2
        python -m pip install --quiet --disable-pip-version-check "$TORCH"
        python -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
        echo "$wanted" > "$marker"
    fi
}
