#!/usr/bin/env bash
# Installs files of pinned requirements into a virtual environment: install.sh VENV FILE...
# uv takes a third of pip's time. An index that pip is configured for is uv's too; where uv cannot be had, or does not get
# through, pip does it.
set -euo pipefail
# pip ends with an ordinary error where it is interrupted, and nothing may go on then.
trap 'exit 130' INT TERM
venv=$1
bin=$venv/bin
shift

pip=("$bin/pip" install --quiet --no-compile --no-deps --require-hashes)
uv=("$bin/uv" pip install --quiet --python "$bin/python" --no-deps --require-hashes)
index=${PIP_INDEX_URL:-$("$bin/pip" config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
# One short try more where an index is silent. Nothing of the user's own files, which may install elsewhere. A cache of
# this environment alone: its files are linked, and an edit of one must not reach another environment.
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-20} UV_HTTP_RETRIES=${UV_HTTP_RETRIES:-1} UV_NO_CONFIG=1
export UV_CACHE_DIR=$venv/.uv

works() { "$bin/uv" --version >/dev/null 2>&1; }
works || "${pip[@]}" --force-reinstall -r infra/requirements-uv.txt 2>/dev/null || true
fast=true
works || fast=false
for file in "$@"; do
  # A package that was interrupted half-way looks installed to both of them.
  again=
  if [ -e "$venv/.installing" ]; then again=yes; fi
  touch "$venv/.installing"
  # shellcheck disable=SC2086
  if ! $fast || ! "${uv[@]}" ${again:+--reinstall} -r "$file"; then
    echo "$file: installed by pip, without uv, which takes longer"
    if $fast; then again=yes; fi
    fast=false
    "${pip[@]}" ${again:+--force-reinstall} -r "$file"
  fi
  rm "$venv/.installing"
done
rm -rf "$UV_CACHE_DIR"
