#!/usr/bin/env bash
# Startup script of a TPU VM, on each host of a slice; it runs as root at each boot, so a preempted machine resumes its run.
# Metadata of the machine: rlhf-source (a git URL), rlhf-commit (all hosts and later machines run the same code), rlhf-recipe,
# rlhf-run, rlhf-store (gs://bucket/path), and of a slice of several hosts rlhf-token (openssl rand -hex 16).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
meta() {
  curl --fail --silent --show-error --retry 5 -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
source=$(meta rlhf-source) commit=$(meta rlhf-commit) recipe=$(meta rlhf-recipe) run=$(meta rlhf-run) store=$(meta rlhf-store)
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
as_rlhf git cat-file -e "$commit^{commit}" 2> /dev/null || as_rlhf git fetch --quiet origin
as_rlhf git checkout --quiet --detach "$commit"
if [ ! -e ".venv/.ready-$commit" ]; then
  as_rlhf python3.11 -m venv .venv
  for file in image tpu model; do
    as_rlhf .venv/bin/pip install --quiet --no-deps --require-hashes -r "infra/requirements-$file.txt"
  done
  as_rlhf .venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
  as_rlhf touch ".venv/.ready-$commit"
fi
# The devices of a TPU belong to root on some images.
if compgen -G '/dev/vfio/*' > /dev/null; then chown rlhf /dev/vfio/*; fi
if compgen -G '/dev/accel*' > /dev/null; then chown rlhf /dev/accel*; fi
# The hosts of a slice are the nodes of a Ray cluster (docs/guides/cluster.md). An endpoint is NAME:NUMBER:ADDRESS.
cluster=() environment=()
IFS=, read -ra hosts <<< "$(meta worker-network-endpoints || true)"
if [ "${#hosts[@]}" -gt 1 ]; then
  head=$(cut -d: -f3 <<< "${hosts[0]}") number=$(meta agent-worker-number) token=$(meta rlhf-token)
  (umask 077 && printf '%s\n' RAY_AUTH_MODE=token "RAY_AUTH_TOKEN=$token" > /etc/rlhf-ray)
  environment=(--property=EnvironmentFile=/etc/rlhf-ray) cluster=(--cluster "$head:6379")
  place=(--address="$head:6379")
  if [ "$number" -eq 0 ]; then place=(--head --port=6379 --node-ip-address="$head" --dashboard-host=127.0.0.1); fi
  systemd-run --unit=rlhf-ray --uid=rlhf --working-directory="$home/project" --property=LimitMEMLOCK=infinity \
    --property=Restart=always --property=RestartSec=10 "${environment[@]}" .venv/bin/ray start --block "${place[@]}"
  # The first host runs the pipeline.
  if [ "$number" -ne 0 ]; then exit 0; fi
fi
# What cannot run (2: the recipe, the name, a run that is finished already) would not run another time either, and five
# starts a day are enough for what fails. A run waits until the one before it counts as ended.
systemd-run --unit=rlhf-run --uid=rlhf --working-directory="$home/project" --property=LimitMEMLOCK=infinity \
  --property=Restart=on-failure --property=SuccessExitStatus=3 --property=RestartPreventExitStatus=2 \
  --property=RestartSec=30 --property=StartLimitBurst=5 --property=StartLimitIntervalSec=1d \
  --property=KillSignal=SIGINT --property=KillMode=mixed --property=TimeoutStopSec=300 "${environment[@]}" \
  .venv/bin/rlhf run "$recipe" --name "$run" --wait --no-prefect --set "store=$store" "${cluster[@]}"
