"""Where gpurun keeps what is the operator's own: settings, keys and pins in one folder, what can be made again in another.

The second is made (0700) when it is first asked for. The first is made by who writes into it: `gpurun plan` looks and leaves no trace.
"""

from __future__ import annotations

import os

from gpurun.files import make_private_dir


def config_dir() -> str:
    """$GPURUN_CONFIG, else $XDG_CONFIG_HOME/gpurun, else ~/.config/gpurun: key, cluster.toml, known_hosts, nodes/."""
    own = os.environ.get("GPURUN_CONFIG")
    return own or _xdg("XDG_CONFIG_HOME", "~/.config")


def cache_dir() -> str:
    """$XDG_CACHE_HOME/gpurun, else ~/.cache/gpurun: agent files, packed iroh, what workspaces hashed to. May be deleted at any time."""
    return make_private_dir(_xdg("XDG_CACHE_HOME", "~/.cache"))


def _xdg(variable: str, default: str) -> str:
    base = os.environ.get(variable) or ""
    if not os.path.isabs(base):   # the XDG specification: a relative path is to be ignored
        base = os.path.expanduser(default)
    return os.path.join(base, "gpurun")
