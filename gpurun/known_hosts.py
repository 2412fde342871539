"""Host keys that are known: the user's and the system's known_hosts files, and gpurun's own file of pins.

Reads OpenSSH's format: plain, wildcard and hashed names, `[host]:port`, `@revoked`. A `@cert-authority` line says nothing about a
plain key and is passed over. Own code rather than paramiko's, since an error has to name the file and the line.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpurun.files import append_line, make_private_dir


class Known(NamedTuple):
    """One line that is about a host: its key is `key` (base64, as in the file)."""

    path: str
    line: int
    key_type: str
    key: str
    revoked: bool = False


def lookup_name(hostname: str, port: int, alias: str = "") -> str:
    """The name under which OpenSSH files the key of this host."""
    if alias:
        return alias.lower()
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find(name: str, paths: Iterable[str]) -> list[Known]:
    """Every line of these files that is about `name`, in order. A file that isn't there, or a line that can't be read, has none."""
    found = []
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked"):
                continue
            if _matches(fields[0], name) and _decode(fields[2]):
                found.append(Known(path, number, fields[1], fields[2], marker == "@revoked"))
    return found


def pin(path: Path, name: str, key_type: str, key: str) -> None:
    """Remember this key for `name` in gpurun's own file, a line that OpenSSH could read too."""
    make_private_dir(path.parent)
    append_line(path, f"{name} {key_type} {key}\n".encode())


def fingerprint(key: str) -> str:
    """`SHA256:…` as ssh and ssh-keygen show it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(_decode(key)).digest()).decode().rstrip("=")


def _decode(key: str) -> bytes:
    try:
        return base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _matches(patterns: str, name: str) -> bool:
    """OpenSSH's rule: one pattern of the list matches and no `!pattern` does. `[` and `]` are letters in it, `*` and `?` are not."""
    yes = False
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            yes = yes or _hash_matches(pattern.split("|"), name)
            continue
        negated, pattern = pattern.startswith("!"), pattern.removeprefix("!").lower()
        if fnmatch.fnmatchcase(name, pattern.replace("[", "[[]")):
            if negated:
                return False
            yes = True
    return yes


def _hash_matches(parts: Sequence[str], name: str) -> bool:
    if len(parts) != 4:
        return False
    salt, digest = _decode(parts[2]), _decode(parts[3])
    return bool(salt) and hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
