#!/usr/bin/env bash
# slurm_up.sh - a REAL multi-node Slurm on one machine, for CI (Debian/Ubuntu, root).
#
#   slurm_up.sh up   [--dir DIR] [--nodes N] [--cpus C] [--gpus G] [--netns] [--no-install]
#   slurm_up.sh down [--dir DIR]
#   slurm_up.sh env  [--dir DIR]        prints `export SLURM_CONF=...`  (eval it)
#   slurm_up.sh status [--dir DIR]
#   slurm_up.sh kill-node nK | revive-node nK | cut-node nK | heal-node nK [--dir DIR]    (faults)
#
# Default: N slurmd on 127.0.0.1, one port each.  --netns: each slurmd in its own network, UTS and mount
# namespace on a private bridge (10.77.0.0/24), so hostname is nK, node names resolve inside jobs, and a
# node can be cut off the network.
# No systemd, no cgroups.  Nothing is written in /etc: own slurm.conf, munge key, sockets, state under DIR.
# Everything it started is stopped by recorded PID (and only if that PID still is that program).
set -euo pipefail
T0=$(date +%s.%N)

cmd=${1:-}; [ $# -gt 0 ] && shift
node=; case $cmd in *-node) node=${1:?node name}; shift;; esac
DIR=${SLURM_CI_DIR:-/tmp/slurm-ci}; NODES=3; CPUS=2; GPUS=4; INSTALL=1; NETNS=0;
while [ $# -gt 0 ]; do case $1 in
  --dir) DIR=$2; shift 2;; --nodes) NODES=$2; shift 2;; --cpus) CPUS=$2; shift 2;;
  --gpus) GPUS=$2; shift 2;; --netns) NETNS=1; shift;; 
  --no-install) INSTALL=0; shift;; *) echo "unknown option $1" >&2; exit 2;; esac; done
PORT=${SLURM_CI_PORT:-26817}                 # slurmctld; slurmd: PORT+1...; slurmdbd: PORT-1
NET=${SLURM_CI_NET:-10.77.0}; TAG=${SLURM_CI_TAG:-slci}
export SLURM_CONF=$DIR/slurm.conf

say()   { printf '[slurm_up %5.1fs] %s\n' "$(awk -v a="$T0" -v b="$(date +%s.%N)" 'BEGIN{print b-a}')" "$*" >&2; }
# a zombie counts as gone: PID 1 of a container often does not reap
alive() { [ -n "${1:-}" ] && [ -r "/proc/$1/status" ] && ! grep -q '^State:.Z' "/proc/$1/status"; }
stop_pid() { # stop_pid NAME PIDFILE COMM [SIGNAL]
  local name=$1 file=$2 comm=$3 sig=${4:-TERM} pid i
  [ -s "$file" ] || return 0
  pid=$(cat "$file")
  if alive "$pid" && [ "$(cat "/proc/$pid/comm")" = "$comm" ]; then
    kill "-$sig" "$pid" || true
    for i in $(seq 100); do alive "$pid" || break; sleep 0.1; done
    if alive "$pid"; then say "$name ($pid) ignored $sig: KILL"; kill -KILL "$pid" || true; fi
  fi
  rm -f "$file"
}
wait_for() { # wait_for SECONDS WHAT command...
  local n=$(( $1 * 10 )) what=$2 i; shift 2
  for i in $(seq "$n"); do "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done
  say "gave up waiting for: $what"; return 1
}
start_slurmd() { # start_slurmd nK
  local n=$1
  mkdir -p "$DIR/spool-$n"
  if [ -e "$DIR/netns" ]; then
    # own hostname and own /etc/hosts, private to this "machine" and the jobs on it
    # (nsenter, not `ip netns exec`: that remounts /sys without /sys/fs/cgroup and slurmd refuses to start)
    nsenter --net="/run/netns/$TAG-$n" unshare --uts --mount sh -c \
      'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf; exec slurmd -c -N "$1" -f "$2/slurm.conf"' sh "$n" "$DIR"
  else
    unshare --mount sh -c 'mount --bind "$2/hosts" /etc/hosts; exec slurmd -c -N "$1" -f "$2/slurm.conf"' sh "$n" "$DIR"
  fi
}

up() {
  [ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 1; }
  local pk="slurmctld slurmd slurm-client munge" need=0 c host i gres= ctl_addr=127.0.0.1 node_addr=127.0.0.1 node_host
  for c in slurmctld slurmd munged sbatch; do command -v $c >/dev/null || need=1; done
  if [ "$need" = 1 ]; then
    [ "$INSTALL" = 1 ] || { echo "not installed: $pk" >&2; exit 1; }
    say "apt-get install $pk"
    local log; log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1          # RUNLEVEL=1: packages start no service
    { apt-get -o DPkg::Lock::Timeout=300 -q update &&
      apt-get -o DPkg::Lock::Timeout=300 -q install -y --no-install-recommends $pk; } >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
    rm -f "$log"; say "installed"
  fi
  if [ -e "$DIR/slurm.conf" ]; then down; fi
  rm -rf "$DIR"; install -d -m 0755 "$DIR" "$DIR/munge" "$DIR/state" "$DIR/log"
  host=$(hostname -s)

  # --- network ---------------------------------------------------------------------
  { echo "127.0.0.1 localhost"; } > "$DIR/hosts"
  if [ "$NETNS" = 1 ]; then
    : > "$DIR/netns"; ctl_addr=$NET.1
    # no DNS in there: c10d's reverse lookups would wait 3 s each
    sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf > "$DIR/nsswitch.conf"
    ip link add "$TAG-br" type bridge; ip addr add "$NET.1/24" dev "$TAG-br"; ip link set "$TAG-br" up
    echo "$NET.1 $host" >> "$DIR/hosts"
    for i in $(seq "$NODES"); do
      ip netns add "$TAG-n$i"
      ip link add "$TAG-v$i" type veth peer name eth0 netns "$TAG-n$i"
      ip link set "$TAG-v$i" master "$TAG-br" up
      ip -n "$TAG-n$i" addr add "$NET.$((10 + i))/24" dev eth0
      ip -n "$TAG-n$i" link set eth0 up; ip -n "$TAG-n$i" link set lo up
      echo "$NET.$((10 + i)) n$i" >> "$DIR/hosts"
    done
  else
    { echo "127.0.0.1 $host"; for i in $(seq "$NODES"); do echo "127.0.0.1 n$i"; done; } >> "$DIR/hosts"
  fi

  # --- munge: own key, own socket -----------------------------------------------------
  ( umask 077; head -c 1024 /dev/urandom > "$DIR/munge/key" )
  munged --force --key-file="$DIR/munge/key" --socket="$DIR/munge/sock" --seed-file="$DIR/munge/seed" \
         --pid-file="$DIR/munged.pid" --log-file="$DIR/log/munged.log" --num-threads=10 2>>"$DIR/log/munged.log"
  wait_for 10 munged sh -c "munge -n -S $DIR/munge/sock | unmunge -S $DIR/munge/sock"

  # --- slurm.conf ------------------------------------------------------------------------
  [ "$GPUS" -gt 0 ] && gres="Gres=gpu:$GPUS"
  cat > "$DIR/slurm.conf" <<CONF
ClusterName=ci
SlurmctldHost=$host($ctl_addr)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool-%n
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
MailProg=/bin/true
# no cgroups, no systemd
ProctrackType=${SLURM_CI_PROCTRACK:-proctrack/linuxproc}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
MpiDefault=none
SwitchType=switch/none
# pretend cores: believe this file, not the hardware
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# quick reactions for CI (defaults: KillWait 30, bf_interval 30, sched_interval 60, SlurmdTimeout 300)
KillWait=${SLURM_CI_KILLWAIT:-5}
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
MessageTimeout=30
SlurmdTimeout=${SLURM_CI_SLURMD_TIMEOUT:-30}
InactiveLimit=0
ReturnToService=2
TCPTimeout=5
# a job in 'urgent' preempts jobs in 'main': TERM to the steps, GraceTime, KILL, requeue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/jobcomp.txt
CONF
  echo "AccountingStorageType=accounting_storage/none" >> "$DIR/slurm.conf"
  for i in $(seq "$NODES"); do
    if [ "$NETNS" = 1 ]; then node_addr=$NET.$((10 + i)); node_host=n$i; else node_host=$host; fi
    echo "NodeName=n$i NodeHostname=$node_host NodeAddr=$node_addr Port=$((PORT + i)) CPUs=$CPUS RealMemory=4000 $gres State=UNKNOWN" >> "$DIR/slurm.conf"
  done
  cat >> "$DIR/slurm.conf" <<CONF
PartitionName=main Nodes=n[1-$NODES] Default=YES DefaultTime=10 MaxTime=1-00:00:00 State=UP PriorityTier=1 GraceTime=${SLURM_CI_GRACE:-10}
PartitionName=urgent Nodes=n[1-$NODES] MaxTime=1-00:00:00 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=prepost Nodes=n1 MaxTime=1-00:00:00 State=UP PriorityTier=1
${SLURM_CI_EXTRA_CONF:-}
CONF
  # fake GPUs: gres/gpu insists on File= and on a device node (Count= alone reports 0); major 195 with no driver is enough
  : > "$DIR/gres.conf"
  if [ "$GPUS" -gt 0 ]; then
    mkdir -p "$DIR/dev"; for i in $(seq 0 $((GPUS - 1))); do mknod "$DIR/dev/gpu$i" c 195 "$i" 2>/dev/null || : > "$DIR/dev/gpu$i"; done
    echo "NodeName=n[1-$NODES] Name=gpu File=$DIR/dev/gpu[0-$((GPUS - 1))]" > "$DIR/gres.conf"
  fi
  # slurmd autodetects the cgroup version even when no plugin uses cgroups; name one so that it need not be mounted
  echo "CgroupPlugin=cgroup/v1" > "$DIR/cgroup.conf"
  : > "$DIR/jobcomp.txt"

  # --- daemons -----------------------------------------------------------------------------
  slurmctld -c -f "$SLURM_CONF"
  wait_for 20 "slurmctld" sh -c 'scontrol ping | grep -q UP'
  for i in $(seq "$NODES"); do start_slurmd "n$i"; done
  wait_for 30 "all nodes idle" sh -c "[ \"\$(sinfo -h -N -p main -t idle -o %N | sort -u | wc -l)\" = $NODES ]" || {
      sinfo -N -l >&2 || true; tail -n 30 "$DIR"/log/slurm*.log >&2; exit 1; }
  say "up: $NODES nodes idle;  export SLURM_CONF=$SLURM_CONF"
}

down() {
  local f n i
  if [ -s "$DIR/slurmctld.pid" ] && alive "$(cat "$DIR/slurmctld.pid")"; then
    timeout 10 scancel --state=PENDING --user=root 2>/dev/null || true
    timeout 10 scancel --user=root 2>/dev/null || true          # lets slurmstepd end its own tasks
    wait_for 15 "jobs to end" sh -c '[ -z "$(timeout 5 squeue -h)" ]' || true
  fi
  for f in "$DIR"/slurmd-*.pid; do
    [ -e "$f" ] || continue
    n=${f##*/slurmd-}; stop_pid "slurmd ${n%.pid}" "$f" slurmd
  done
  stop_pid slurmctld "$DIR/slurmctld.pid" slurmctld
  stop_pid munged    "$DIR/munged.pid" munged
  # only there with SLURM_CI_PROCTRACK=proctrack/cgroup (cgroup v1)
  find /sys/fs/cgroup -maxdepth 2 -type d -name 'slurm_n[0-9]*' 2>/dev/null | while read -r n; do find "$n" -depth -type d -exec rmdir {} \; 2>/dev/null || true; done
  if [ -e "$DIR/netns" ]; then
    for n in $(ip netns list | awk '{print $1}' | grep -E "^$TAG-n[0-9]+\$" || true); do
      for i in $(ip netns pids "$n"); do say "left in $n: $i $(tr '\0' ' ' < "/proc/$i/cmdline" 2>/dev/null | cut -c1-80)"; kill -KILL "$i" 2>/dev/null || true; done
      ip netns del "$n"
    done
    ip link del "$TAG-br" 2>/dev/null || true
    rm -f "$DIR/netns"
  fi
  say "down"
}

# --- faults ------------------------------------------------------------------------------------
# every process of node nK: its slurmd, its slurmstepds (cwd/args do not tell them apart, so by
# session: slurmstepd is found by its open spool socket), and what those started
node_pids() {
  if [ -e "$DIR/netns" ]; then ip netns pids "$TAG-$1"; return; fi
  local p; cat "$DIR/slurmd-$1.pid" 2>/dev/null || true
  for p in $(pgrep -x slurmstepd || true); do
    if ls -l "/proc/$p/fd" 2>/dev/null | grep -q "$DIR/log/slurmd-$1.log"; then
      echo "$p"; descendants "$p"; fi
  done
}
descendants() { local c; for c in $(pgrep -P "$1" || true); do echo "$c"; descendants "$c"; done; }

case $cmd in
  up) up;; down) down;; env) echo "export SLURM_CONF=$SLURM_CONF";;
  status) sinfo -N -l; squeue -a;;
  kill-node)   pids=$(node_pids "$node"); say "KILL $(echo $pids)"; kill -KILL $pids; rm -f "$DIR/slurmd-$node.pid";;
  revive-node) start_slurmd "$node";;
  cut-node)    ip link set "$TAG-v${node#n}" down;;
  heal-node)   ip link set "$TAG-v${node#n}" up;;
  *) sed -n '2,18p' "$0"; exit 2;;
esac
