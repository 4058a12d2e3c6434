#!/usr/bin/env bash
# Startup script of a TPU VM, on each host of a slice; it runs as root at each boot, so a preempted machine goes on with
# its run. Metadata of the machine: rlhf-source (a git URL), rlhf-recipe, rlhf-run, rlhf-store (gs://bucket/path), and of
# a slice of several hosts rlhf-token (openssl rand -hex 16).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
meta() {
  curl --fail --silent --show-error --retry 5 -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
source=$(meta rlhf-source) recipe=$(meta rlhf-recipe) run=$(meta rlhf-run) store=$(meta rlhf-store)
home=/opt/rlhf
# The pinned packages are resolved for Python 3.11; python3 of an image may be older.
if ! command -v python3.11 > /dev/null; then
  apt-get update
  apt-get install -y --no-install-recommends git gcc libc6-dev python3.11-venv
fi
id rlhf > /dev/null 2>&1 || useradd --system --create-home --home-dir "$home" rlhf
as_rlhf() { runuser -u rlhf -- "$@"; }
[ -d "$home/project" ] || as_rlhf git clone --quiet "$source" "$home/project"
cd "$home/project"
if [ ! -e .venv/.ready ]; then
  as_rlhf python3.11 -m venv .venv
  for file in image tpu model; do
    as_rlhf .venv/bin/pip install --quiet --no-deps --require-hashes -r "infra/requirements-$file.txt"
  done
  as_rlhf .venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
  as_rlhf touch .venv/.ready
fi
# The devices of a TPU belong to root on some images.
if compgen -G '/dev/vfio/*' > /dev/null; then chown rlhf /dev/vfio/*; fi
if compgen -G '/dev/accel*' > /dev/null; then chown rlhf /dev/accel*; fi
# Each host of a slice is a rank (docs/gangs.md). An endpoint is NAME:NUMBER:ADDRESS.
gang=()
IFS=, read -ra hosts <<< "$(meta worker-network-endpoints || true)"
if [ "${#hosts[@]}" -gt 1 ]; then
  lead=$(cut -d: -f3 <<< "${hosts[0]}") rank=$(meta agent-worker-number) token=$(meta rlhf-token)
  (umask 077 && printf '%s\n' "RLHF_GANG=${#hosts[@]}@$lead:9765" "RLHF_GANG_RANK=$rank" "RLHF_GANG_TOKEN=$token" \
    RLHF_GANG_WAIT=1500 > /etc/rlhf-gang)
  gang=(--property=EnvironmentFile=/etc/rlhf-gang)
fi
# What cannot run (2: the recipe, the name, a run that is finished already) would not run another time either, and five
# starts a day are enough for what fails. A lead waits until the one before it counts as ended, and ranks longer for it.
systemd-run --unit=rlhf-run --uid=rlhf --working-directory="$home/project" --property=LimitMEMLOCK=infinity \
  --property=Restart=on-failure --property=SuccessExitStatus=3 --property=RestartPreventExitStatus=2 \
  --property=RestartSec=30 --property=StartLimitBurst=5 --property=StartLimitIntervalSec=1d \
  --property=KillSignal=SIGINT --property=KillMode=mixed --property=TimeoutStopSec=300 "${gang[@]}" \
  .venv/bin/rlhf run "$recipe" --name "$run" --wait --no-prefect --set "store=$store"
