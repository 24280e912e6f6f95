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
    1) legs=1:25,1:43,1 ;;
    2 | 3) legs=2:25,1:43,2 ;;
    *) legs=4:25,2:43,3 ;;
esac
for precision in fp32 bf16; do
    python scripts/quickstart.py --folder "runs/gpu-$precision" --legs "$legs" precision=$precision
done
# Without exact mode the traces may differ in the last bits where the ranks change, so only an equal world is compared.
python scripts/quickstart.py --folder runs/gpu-fp16 --legs "$gpus:25,$gpus" precision=fp16 exact=false
