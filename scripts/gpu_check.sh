#!/usr/bin/env bash
# Checks the CUDA path on this machine's GPUs, in a few minutes: the tests marked gpu, then a short training that is
# killed and resumed, in fp32, bf16 and fp16; on other numbers of ranks where there is more than one GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh
use_venv test,lint

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
((gpus > 0)) || { echo "gpu_check.sh: torch sees no CUDA device here" >&2; exit 2; }
python -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0), "x", torch.cuda.device_count())'

python -m pytest -m gpu
case $gpus in
    1) ranks=1:1:1 ;;
    2 | 3) ranks=2:1:2 ;;
    *) ranks=4:2:3 ;;
esac
for precision in fp32 bf16 fp16; do
    reshard prove --ranks $ranks --kill-at 25,43 --steps 60 --folder "runs/gpu-$precision" --force -- \
        bash scripts/launch.sh --ranks '{ranks}' scripts/train_fsdp.py --config scripts/configs/tiny.yaml \
        precision=$precision
done
