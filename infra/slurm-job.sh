# shellcheck shell=bash
# What both scripts of a job have in common; they read it first. `begin` starts the step, and `finish` ends the job.
signalled='' at=0 stops=0 step='' sender='' status=0
: "${RLHF_RESTARTS:=30}"
# For what the tasks of this node tell.
folder=$(mktemp -d)

# Before its time is over (USR1), or when the job is ended (TERM), the step gets Ctrl-C, and the run is recorded as
# interrupted. A preemption is for Slurm to tell the step.
stop() {
  stops=$((stops + 1))
  if [ -z "$signalled" ]; then signalled=$1 at=$SECONDS; fi
  send
}
trap 'stop time' USR1
trap 'stop end' TERM

send() {
  if [ -n "$signalled" ] && [ -n "$step" ] && [ -z "$sender" ]; then
    interrupt &
    sender=$!
  fi
}

# `scancel` succeeds, too, where the step has no task yet, and nothing gets the signal. A task says when it is there.
interrupt() {
  until [ -e "$folder/started" ] || [ $((SECONDS - at)) -ge 30 ]; do sleep 1; done
  while true; do
    if scancel --signal=INT "$SLURM_JOB_ID.0"; then sleep 60; else sleep 2; fi
  done
}

# Runs a task with arguments on each node, as a script for bash, which makes the file $0/started. The step's status is in
# $status: 130 too where the signal has come before it.
begin() {
  local seen=none task=$1
  shift
  status=130
  if [ -n "$signalled" ]; then return; fi
  # `srun` does not take --cpus-per-task over from its job.
  srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c "$task" "$folder" "$@" &
  step=$!
  send
  # A signal ends a wait before the step has ended.
  while [ "$seen" != "$stops" ]; do
    seen=$stops status=0
    wait "$step" || status=$?
  done
}

# A run that was interrupted, or ended by SIGTERM before it could say so, comes back.
finish() {
  trap '' USR1 TERM
  if [ -n "$sender" ]; then kill "$sender" 2> /dev/null || true; fi
  rm -rf "$folder"
  if [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then requeue; fi
  exit "$status"
}

requeue() {
  local state until=$((SECONDS + 150))
  while true; do
    # It may be away for a moment.
    if state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T); then
      # A job that was cancelled is COMPLETING by now, and must not come back.
      if [ "$state" != RUNNING ]; then return; fi
      if goes_nowhere || scontrol requeue "$SLURM_JOB_ID"; then return; fi
    fi
    if [ "$SECONDS" -ge "$until" ]; then
      echo "not in the queue again, as slurmctld does not take it; the same sbatch goes on" >&2
      return
    fi
    sleep 5
  done
}

# Whether the next life would be as this one, which has made nothing.
goes_nowhere() {
  local lives=${SLURM_RESTART_COUNT:-0}
  if [ "$signalled" = time ] && [ "$at" -lt 45 ] && [ "$lives" -gt 0 ]; then
    echo "not in the queue again: its time was over $at s after its start, as before; give the job more --time" >&2
  elif [ "$lives" -ge "$RLHF_RESTARTS" ]; then
    echo "not in the queue again after $lives restarts (RLHF_RESTARTS=$RLHF_RESTARTS); where stages advance the same" \
      "sbatch goes on, and else the job needs more --time" >&2
  else
    return 1
  fi
}
