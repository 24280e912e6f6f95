#!/usr/bin/env bash
# Sets up and runs the main job: trains a small language model with FSDP2 on 4 ranks, once without a break, once killed
# with SIGKILL and resumed on 2 ranks, killed again and resumed on 3; then compares every step of the two.
# Exit status 0: the two runs agree. Works in .venv and runs/quickstart of this repository.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh
use_venv plot
exec python scripts/quickstart.py "$@"
