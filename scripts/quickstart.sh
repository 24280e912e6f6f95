#!/usr/bin/env bash
# Sets up and runs the main job: trains a small language model with FSDP2 on 4 ranks, once without a break, once killed
# with SIGKILL and resumed on 2 ranks, killed again and resumed on 3; then compares every step of the two.
# Exit status 0: the two runs agree. Works in .venv and runs/quickstart of this repository; takes options of
# `reshard prove`.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh
use_venv plot
exec reshard prove --ranks 4:2:3 --kill-at 25,43 --steps 60 --folder runs/quickstart --force "$@" -- \
    bash scripts/launch.sh --ranks '{ranks}' scripts/train_fsdp.py --config scripts/configs/tiny.yaml
