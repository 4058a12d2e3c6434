"""API keys of a server. Imports nothing heavy: the command line checks keys before it starts a server."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.stages.serving.settings import ServeOptions

KEY_VARIABLE = "RLHF_API_KEY"
USABLE_KEY = re.compile(r"[!-~]{16,}")


class AccessError(ValueError):
    """Options with which a server may not start."""


def keys_of(options: ServeOptions, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the keys of RLHF_API_KEY and of the key file. Raises AccessError for a missing or weak key."""
    lines = [environment.get(KEY_VARIABLE, "")]
    if options.api_key_file is not None:
        try:
            lines += Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"--api-key-file {options.api_key_file} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for key in keys:
        if not USABLE_KEY.fullmatch(key):
            raise AccessError(
                f"a key of {len(key)} characters cannot be used: expected at least 16 printable ASCII characters "
                "without spaces, such as those of `openssl rand -hex 24`"
            )
    if not keys and (options.api_key_file is not None or not is_loopback(options.host)):
        raise AccessError(
            f"there is no key: set {KEY_VARIABLE} or --api-key-file, a file with one key a line, or leave both "
            f"--host ({options.host}) and --api-key-file out to serve this machine alone"
        )
    return keys


def owner_of(keys: Sequence[str], authorization: bytes) -> int | None:
    """Return the position of the key in a header `Authorization: Bearer KEY`, 0 if there are no keys, else None."""
    kind, _, given = authorization.partition(b" ")
    # All keys are compared, so that the time depends on none of them.
    matches = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]
    if not keys:
        return 0
    return matches.index(True) if kind.lower() == b"bearer" and True in matches else None


def is_loopback(host: str) -> bool:
    """Whether an address, or a header `Host` with or without its port, is this machine alone."""
    name = re.sub(r"(?<!:):\d+$", "", host).strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
