#!/usr/bin/env bash
# Startup script of a TPU VM of one host; it runs as root at each boot, so a preempted machine goes on with its run.
# Metadata of the machine: rlhf-source (a git URL), rlhf-recipe, rlhf-run, rlhf-store (gs://bucket/path).
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
systemd-run --unit=rlhf-run --uid=rlhf --working-directory="$home/project" --property=LimitMEMLOCK=infinity \
  --property=Restart=on-failure --property=SuccessExitStatus=3 --property=RestartSec=660 --property=KillSignal=SIGINT --property=KillMode=mixed \
  --property=TimeoutStopSec=300 \
  .venv/bin/rlhf run "$recipe" --name "$run" --no-prefect --set "store=$store"
