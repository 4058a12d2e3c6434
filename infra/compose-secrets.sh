#!/usr/bin/env bash
# Writes the secrets of infra/compose/compose.yaml to infra/compose/secrets: keys of the database, of the store (one that
# writes, one that only reads), of Prefect's API and of the served policy. It overwrites none.
set -euo pipefail
cd "$(dirname "$0")/compose"
umask 077
mkdir secrets || { echo "infra/compose/secrets exists: a running database and store have these keys" >&2; exit 1; }
cd secrets
auth="rlhf:$(openssl rand -hex 24)" write=$(openssl rand -hex 24) read=$(openssl rand -hex 24)
openssl rand -hex 24 | tr -d '\n' > postgres
openssl rand -hex 24 > serve
printf 'active = "rlhf"\n[profiles.rlhf]\nPREFECT_SERVER_API_AUTH_STRING = "%s"\nPREFECT_API_AUTH_STRING = "%s"\n' "$auth" "$auth" > profiles.toml
printf '[default]\naws_access_key_id = rlhf\naws_secret_access_key = %s\n' "$write" > aws
printf '[default]\naws_access_key_id = serve\naws_secret_access_key = %s\n' "$read" > aws-read
cat > s3.json << END
{"identities": [
  {"name": "rlhf", "credentials": [{"accessKey": "rlhf", "secretKey": "$write"}],
   "actions": ["Read:rlhf", "Write:rlhf", "List:rlhf", "Tagging:rlhf"]},
  {"name": "serve", "credentials": [{"accessKey": "serve", "secretKey": "$read"}], "actions": ["Read:rlhf", "List:rlhf"]}]}
END
# The folder is this user's alone; users inside the containers read the files.
chmod 644 -- *
