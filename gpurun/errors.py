"""Every error that a user may read, with the exit code that belongs to it.

The text given to an error is the whole message: what happened, to what, and what to do now. `cli.py` is the only place that
prints one and exits. Exit codes: 2 usage or config, 124 a time limit, 125 gpurun or the node failed, 130 stopped by the operator.
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_TIME_LIMIT = 124
EXIT_FAILED = 125
EXIT_STOPPED = 130


class GpurunError(Exception):
    """Something of gpurun or of the node failed; the message says what to do."""

    exit_code = EXIT_FAILED


class ConfigError(GpurunError):
    """A job file, cluster file, option or variable is wrong. Nothing was sent or rented."""

    exit_code = EXIT_USAGE


class WorkspaceError(GpurunError):
    """The workspace can't be read as it is: the message names the file. Nothing was run."""

    exit_code = EXIT_USAGE


class RecordError(GpurunError):
    """A run record is missing, unreadable or of another version; the message names the folder."""

    exit_code = EXIT_USAGE


class NodeBusyError(GpurunError):
    """The node runs another job; the message names it and says how to wait for it."""


class LinkError(GpurunError):
    """The connection to the node could not be opened, broke, or a wait on it ran out."""


class LinkTimeoutError(LinkError):
    """A wait on the link ran out. Before Python 3.11 there are three `TimeoutError`s; `link.py` makes this one of them."""


class RefusedError(LinkError):
    """The other side answered and said no: an operator that it doesn't know, or another protocol version."""


class WireError(GpurunError):
    """The other side wrote something that the protocol doesn't allow; that session is over, nothing else is."""


class TransferError(GpurunError):
    """Bytes did not arrive as announced, or could not be stored; the message names the file."""


class UnkeptError(TransferError):
    """What arrived can't be written on this side: no room, not allowed. It is still on the node."""


class UnsafeNameError(TransferError):
    """The node named a path that may not be written on this side."""


class SSHError(GpurunError):
    """SSH to a host failed: the message names the host, what was tried and the file or setting to look at."""


class HostKeyError(SSHError):
    """A host shows another key than the one that was pinned; both are named."""


class DeployError(GpurunError):
    """The agent could not be put on the node or did not start there; the message has its last lines."""


class UnfitError(DeployError):
    """The node can't run the agent, whatever is tried: its system, its C library, its Python. So can't others with the same image."""


class ProviderError(GpurunError):
    """Who rents the machines out refused or failed; the message says what and what to do."""


class OfferGoneError(ProviderError):
    """This offer isn't there any more, or can't be had at that price; another one may be."""


class NoOfferError(ProviderError):
    """Nothing that may be rented fits; the message says what excluded how many."""


class UnclearError(ProviderError):
    """Nobody can tell whether it was done: the answer was lost, or it says both. Never asked for again; a listing settles it."""

    def __init__(self, message: str, contract_id: str = "") -> None:
        """`contract_id`: of the machine, where the answer had one."""
        super().__init__(message)
        self.contract_id = contract_id


class AccountError(ProviderError):
    """The key, its permissions, the credit or a spending limit of the account: no other offer will help."""


class TemporaryError(ProviderError):
    """The service can't be reached, is down or wants to be asked less often. Nothing was done; the same call may do later."""


class MachineGoneError(ProviderError):
    """The machine of this node doesn't exist any more; the message says since when and why, where that is known."""


def described(error: Exception) -> str:
    """One that nobody expected, in a line for the user."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {error}. This is a bug in gpurun"
