#!/usr/bin/env bash
# Starts a training script under torchrun: one rank a GPU where there are GPUs, else on the CPU with gloo.
#
#   scripts/launch.sh [--ranks N] [--nodes N --node-rank R --head HOST[:PORT]] SCRIPT [ARGS...]
#
# --ranks      ranks on this node (default: the GPUs that SLURM gave, else all, or 2 without any). More ranks than
#              GPUs run on the CPU.
# --nodes ...  several machines by hand; run the same line on each. Under SLURM (srun launch.sh ...) it is found out.
#
# The python on the PATH runs it.
set -euo pipefail

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

ranks="" nodes=${SLURM_JOB_NUM_NODES:-1} node_rank=${SLURM_NODEID:-0} head=""
while [[ $# -gt 0 && $1 == --* ]]; do
    [[ $1 == --help || $# -lt 2 ]] && usage
    case $1 in
        --ranks) ranks=$2 ;;
        --nodes) nodes=$2 ;;
        --node-rank) node_rank=$2 ;;
        --head) head=$2 ;;
        *) echo "launch.sh: unknown option $1" >&2; usage ;;
    esac
    shift 2
done
[[ $# -ge 1 ]] || usage
[[ -f $1 ]] || { echo "launch.sh: $1: no such script" >&2; exit 2; }
[[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || { echo "launch.sh: --ranks: expected a number above 0, found $ranks" >&2; exit 2; }

[[ $nodes =~ ^[1-9][0-9]*$ ]] || { echo "launch.sh: --nodes: expected a number above 0, found $nodes" >&2; exit 2; }
gpus=0
if command -v nvidia-smi > /dev/null; then
    gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU' || true)
    [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] && gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c . || true)
fi
# Nodes of one job may have different numbers of them.
ranks=${ranks:-${SLURM_GPUS_ON_NODE:-$((gpus > 0 ? gpus : 2))}}
if ((ranks > gpus)); then
    export CUDA_VISIBLE_DEVICES=""
fi

cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}

if ((nodes > 1)); then
    if [[ -z $head && -n ${SLURM_JOB_NODELIST:-} ]]; then
        # `reshard slurm wrap` sets it, as containers have no scontrol.
        head=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
    fi
    [[ -n $head ]] || { echo "launch.sh: --nodes $nodes needs --head HOST, the machine with --node-rank 0" >&2; exit 2; }
    # A port and a name per job and attempt, so that a requeued job does not meet the remains of the last one.
    [[ $head == *:* ]] || head=$head:${MASTER_PORT:-$((20000 + (${SLURM_JOB_ID:-0} + 997 * ${SLURM_RESTART_COUNT:-0}) % 20000))}
    rendezvous=(--nnodes="$nodes" --node-rank="$node_rank" --rdzv-backend=c10d --rdzv-endpoint="$head"
        --rdzv-id="${SLURM_JOB_ID:-job}.${SLURM_RESTART_COUNT:-0}")
else
    rendezvous=(--standalone)
fi

# torchrun puts its ranks into sessions of their own, hands SIGTERM on to them, and dies of SIGUSR1. So SIGUSR1 goes past
# it: ignored there, sent to its ranks from here.
(trap '' USR1 && exec python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$ranks" --max-restarts=0 "$@") &
torchrun=$!
# shellcheck disable=SC2046
trap 'kill -USR1 $(cat "/proc/$torchrun/task/$torchrun/children") 2> /dev/null || true' USR1
trap 'kill -TERM "$torchrun" 2> /dev/null || true' TERM INT HUP
# A trap ends a wait before its process has ended.
while true; do
    wait "$torchrun" && status=0 || status=$?
    kill -0 "$torchrun" 2> /dev/null || exit "$status"
done
