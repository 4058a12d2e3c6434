"""Who may use a server: keys, and where one is needed. Nothing heavy is imported: the command line asks it first."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.stages.serving.settings import ServeOptions

KEY_VARIABLE = "RLHF_API_KEY"
SHORTEST = 16
"""Characters of a key, at least: a shorter one is guessed."""


class AccessError(ValueError):
    """A server that may not start as it is asked to."""


class Keys:
    """The keys that a server takes, by their digests. No keys: whoever reaches it may use it."""

    def __init__(self, keys: Sequence[str] = ()):
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def take(self, authorization: bytes | None) -> bool:
        """Whether a header `Authorization: Bearer KEY` has one of them. Its time tells nothing of the keys."""
        kind, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # All of them, whichever fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return not self._digests or (kind.lower() == b"bearer" and any(fits))

    def owner(self, authorization: bytes | None) -> str:
        """Whose requests these are among several keys: the digest of the key; empty where all requests are of one."""
        return _digest((authorization or b"").partition(b" ")[2].strip()).hex() if len(self._digests) > 1 else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def keys_of(options: ServeOptions, environment: Mapping[str, str] = os.environ) -> Keys:
    """The keys of RLHF_API_KEY and of the file, one a line. Raises AccessError where a needed one is missing."""
    found = [environment[KEY_VARIABLE].strip()] if environment.get(KEY_VARIABLE, "").strip() else []
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"--api-key-file {options.api_key_file} cannot be read: {error}") from error
        in_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not in_file:
            raise AccessError(f"--api-key-file {options.api_key_file} has no key; write one a line")
        found += in_file
    for key in found:
        if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise AccessError(
                f"a key of {len(key)} characters cannot be used: at least {SHORTEST} printable ASCII characters "
                "without spaces, such as those of `openssl rand -hex 24`"
            )
    if not found and not is_loopback(options.host):
        raise AccessError(
            f"--host {options.host} can be reached by others, and there is no key: set {KEY_VARIABLE} or "
            "--api-key-file, or leave --host out to serve this machine alone"
        )
    return Keys(found)


def is_loopback(host: str) -> bool:
    """Whether an address to listen at, or the name in a header `Host`, is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether the `Host` of a request, with or without its port, is no name that somebody else's DNS can answer for."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
