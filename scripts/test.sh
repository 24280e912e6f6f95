#!/usr/bin/env bash
# Sets up and runs the tests:  bash scripts/test.sh [pytest arguments]
# Without arguments: what CI runs. The full grids: bash scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh
use_venv test,lint
exec python -m pytest "$@"
