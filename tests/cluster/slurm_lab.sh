#!/usr/bin/env bash
# A SLURM on one machine, for tests: munged, slurmctld and N emulated nodes, as root, without systemd, loopback only.
#   slurm_lab.sh start [N] | stop | crash nK | boot nK | cut nK | heal nK | exec CMD...      (clients: slurm_lab.sh exec sbatch ...)
# Node nK = slurmd in its own UTS+mount+PID namespace (own hostname, /etc/hosts, one kill fells the machine);
# own network namespace 10.77.0.K on a bridge that has no uplink: nothing is reachable from, or reaches, outside.
# (A namespace with only `lo` does not do: slurmctld's getaddrinfo(NULL, AI_ADDRCONFIG) wants a non-loopback address.)
# Needs: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge  (Debian 12: 22.05.8)
set -u
LAB=${SLURMLAB:?set SLURMLAB to an empty scratch folder, by its absolute path}
export SLURM_CONF=$LAB/slurm.conf
NETNS=$LAB/run/netns
NS=(nsenter --net="$NETNS")
log() { echo "[lab $(date +%T)] $*" >&2; }

write_conf() {  # $1 = number of nodes
  local n=$1 i g
  mkdir -p "$LAB"/{run,log,state,spool,dev}
  chmod 755 "$LAB" "$LAB/run"
  { echo "127.0.0.1 localhost"; echo "10.77.0.254 $(hostname)"; for i in $(seq "$n"); do echo "10.77.0.$i n$i"; done; } > "$LAB/hosts"
  # fake GPUs: character devices (aliases of /dev/null); odd nodes have 4, even nodes have 2 (heterogeneous on purpose)
  for g in 0 1 2 3; do [ -c "$LAB/dev/gpu$g" ] || { rm -f "$LAB/dev/gpu$g"; mknod "$LAB/dev/gpu$g" c 1 3; }; done
  { for i in $(seq "$n"); do
      if (( i % 2 )); then echo "NodeName=n$i Name=gpu File=$LAB/dev/gpu[0-3]"
      else echo "NodeName=n$i Name=gpu File=$LAB/dev/gpu[0-1]"; fi
    done; } > "$LAB/gres.conf"
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\n' > "$LAB/cgroup.conf"
  cat > "$LAB/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(10.77.0.254)
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is ALSO the hold-off before a requeued job may start again (default 120 s)
AuthInfo=socket=$LAB/run/munge.sock,cred_expire=${CRED_EXPIRE:-5}
MpiDefault=none
ProctrackType=${PROCTRACK:-$([ -d /sys/fs/cgroup/freezer ] && [ -w /sys/fs/cgroup/freezer ] && echo proctrack/cgroup || echo proctrack/linuxproc)}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.log
PropagateResourceLimits=NONE
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
${CTLD_PARAMS:+SlurmctldParameters=$CTLD_PARAMS}
KillWait=${KILLWAIT:-5}
CompleteWait=0
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=${SLURMD_TIMEOUT:-15}
InactiveLimit=0
MinJobAge=300
JobRequeue=1
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.pid
SlurmdPidFile=$LAB/run/slurmd.%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
SlurmctldDebug=debug
SlurmdDebug=debug
GresTypes=gpu
${EXTRA_CONF:-}
CONF
  sed -i '/^$/d' "$LAB/slurm.conf"
  for i in $(seq "$n"); do
    echo "NodeName=n$i NodeHostname=n$i NodeAddr=10.77.0.$i CPUs=8 RealMemory=2000 Gres=gpu:$(( i % 2 ? 4 : 2 )) State=UNKNOWN"
  done >> "$LAB/slurm.conf"
  cat >> "$LAB/slurm.conf" <<CONF
PartitionName=low     Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 PriorityTier=1  PreemptMode=REQUEUE GraceTime=${GRACE:-20}
PartitionName=nograce Nodes=ALL MaxTime=60 DefaultTime=10 PriorityTier=1  PreemptMode=REQUEUE GraceTime=0
PartitionName=high    Nodes=ALL MaxTime=60 DefaultTime=10 PriorityTier=10 PreemptMode=OFF
CONF
}

start_node() {
  local n=$1 p
  "${NS[@]}" ip link del "v$n" 2>/dev/null
  # shellcheck disable=SC2016
  setsid "${NS[@]}" unshare --net --uts --mount --pid --fork --kill-child --mount-proc \
    bash -c 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; ip link set lo up
             until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
             ip addr add "10.77.0.${1#n}/24" dev eth0; ip link set eth0 up
             mkdir -p "$2/spool/$1"; trap "kill \$p; wait \$p" TERM
             slurmd -D -N "$1" & p=$!; wait $p' node "$n" "$LAB" \
    </dev/null >>"$LAB/log/node.$n.out" 2>&1 &
  p=$!; echo $p > "$LAB/run/node.$n.pid"
  until [ "$(readlink /proc/$p/ns/uts)" != "$(readlink /proc/self/ns/uts)" ]; do sleep 0.02; done
  "${NS[@]}" ip link add "v$n" type veth peer name eth0 netns "$p"
  "${NS[@]}" ip link set "v$n" master br0 up
}

pid_alive() { case $(sed 's/.*) //;s/ .*//' "/proc/$1/stat" 2>/dev/null) in ''|Z) return 1;; esac; }  # a zombie is dead
alive() { [ -s "$1" ] && pid_alive "$(cat "$1")"; }

start() {
  local n=${1:-4} t0
  t0=$(date +%s%N)
  alive "$LAB/run/slurmctld.pid" && { log "already running"; return 0; }
  write_conf "$n"
  [ -s "$LAB/munge.key" ] || { (umask 077; head -c 1024 /dev/urandom > "$LAB/munge.key"); chmod 400 "$LAB/munge.key"; }
  : > "$NETNS"; unshare --net="$NETNS" true || return 1
  "${NS[@]}" sh -c 'ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.0.254/24 dev br0; ip link set br0 up' || return 1
  "${NS[@]}" munged --socket="$LAB/run/munge.sock" --key-file="$LAB/munge.key" --pid-file="$LAB/run/munged.pid" \
         --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munged.seed" --num-threads=4 || return 1
  "${NS[@]}" slurmctld -c || return 1     # -c: start clean; drop it to keep the queue over a restart
  for i in $(seq "$n"); do start_node "n$i"; done
  for _ in $(seq 100); do
    [ "$("${NS[@]}" timeout 2 sinfo -h -N -t idle -p low -o %N 2>/dev/null | wc -l)" = "$n" ] && { log "up: $n nodes in $(( ($(date +%s%N)-t0)/1000000 )) ms"; return 0; }
    sleep 0.1
  done
  log "nodes did not come up"; "${NS[@]}" sinfo -N >&2; return 1
}

stop() {
  local t0 f p
  t0=$(date +%s%N)
  for f in "$LAB"/run/node.*.pid "$LAB/run/slurmctld.pid" "$LAB/run/munged.pid"; do
    alive "$f" || continue; p=$(cat "$f")
    case $f in */node.*) kill -KILL "$p";; *) kill "$p";; esac
    for _ in $(seq 100); do pid_alive "$p" || break; sleep 0.1; done
    rm -f "$f"
  done
  find /sys/fs/cgroup/freezer -mindepth 1 -depth -type d -path '*/slurm_n*' -exec rmdir {} + 2>/dev/null
  umount "$NETNS" 2>/dev/null; rm -f "$NETNS" "$LAB"/run/slurmd.*.pid
  log "stopped in $(( ($(date +%s%N)-t0)/1000000 )) ms"
}

case ${1:-} in
  start) start "${2:-4}";;
  stop) stop;;
  crash) kill -KILL "$(cat "$LAB/run/node.$2.pid")";;
  boot) start_node "$2";;
  cut)  "${NS[@]}" ip link set "v$2" down;;     # silent network partition
  heal) "${NS[@]}" ip link set "v$2" up;;
  exec) shift; exec "${NS[@]}" "$@";;
  *) echo "usage: $0 start [N] | stop | crash NODE | boot NODE | cut NODE | heal NODE | exec CMD..." >&2; exit 2;;
esac
