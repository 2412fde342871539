"""Channels of an SSH connection that lead to a unix socket of the host. What paramiko doesn't have by itself; ssh.py is its only user.

OpenSSH forwards sockets by "direct-streamlocal@openssh.com". A server that doesn't (AllowStreamLocalForwarding no, dropbear, a proxy) runs a
command that joins its own ends to the socket.
"""

from __future__ import annotations

import threading
import time

import paramiko

WINDOW_BYTES = 8 << 20    # of a channel: what may be under way, 300 Mbit/s at 200 ms
SEND_BYTES = 1 << 15      # paramiko's largest packet
CHATTER_BYTES = 1 << 20   # of a login shell's start files, before a command's own output
SAID_BYTES = 500          # of a command that leads nowhere


class Transport(paramiko.Transport):
    """paramiko opens channels of any kind, and adds fields for those only that it knows."""

    _adding = threading.local()               # the path, for the one message that its thread is about to send

    def open_socket(self, path: str, timeout_s: float) -> paramiko.Channel:
        """SSHException where the server won't, or nobody is at that socket."""
        self._adding.path = path
        try:
            return self.open_channel("direct-streamlocal@openssh.com", window_size=WINDOW_BYTES, timeout=timeout_s)
        finally:
            self._adding.path = ""

    def _send_user_message(self, data: paramiko.Message) -> None:
        """What `open_channel` sends its message with."""
        path, self._adding.path = getattr(self._adding, "path", ""), ""
        if path:
            data.add_string(path)
            data.add_string("")               # reserved, as the number is
            data.add_int(0)
        super()._send_user_message(data)


class Channel:
    """A channel as the socket that it leads to: what sockets.Stream needs. An end that wasn't said is an error."""

    def __init__(self, channel: paramiko.Channel, first: bytes = b"") -> None:
        """`first`: what has arrived already."""
        self._channel, self._first = channel, first
        self.shutdown, self.settimeout, self.close = channel.shutdown, channel.settimeout, channel.close

    def send(self, data: memoryview) -> int:
        return int(self._channel.send(bytes(data[:SEND_BYTES])))

    def recv(self, size: int) -> bytes:
        first, self._first = self._first, b""
        data = first or self._channel.recv(size)
        if not data and not self._channel.eof_received:
            raise ConnectionError("the SSH connection ended")
        return data


def to_socket(transport: paramiko.Transport, path: str, timeout_s: float) -> Channel:
    """SSHException where the server won't, or nobody is at that socket."""
    if not isinstance(transport, Transport) or not hasattr(paramiko.Transport, "_send_user_message"):
        raise paramiko.SSHException("this paramiko opens no channels to sockets")
    return Channel(transport.open_socket(path, timeout_s))


def to_command(transport: paramiko.Transport, command: str, mark: bytes, timeout_s: float) -> Channel:
    """A channel to the ends of a command, from behind the `mark` that it prints. SSHException, with what it said, for one that doesn't."""
    deadline, said = time.monotonic() + timeout_s, b""
    try:
        channel = transport.open_session(window_size=WINDOW_BYTES, timeout=timeout_s)
    except paramiko.ChannelException as error:
        raise paramiko.SSHException(f"and no further session over this connection ({error.text or 'refused'}): its sshd_config needs MaxSessions 4 "
                                    "or more, or AllowStreamLocalForwarding yes") from None
    try:
        channel.settimeout(timeout_s)
        channel.exec_command(command)
        while mark not in said and len(said) < CHATTER_BYTES:
            channel.settimeout(max(0.1, deadline - time.monotonic()))
            more = channel.recv(1 << 16)
            if not more:
                break
            said += more
        _, found, rest = said.partition(mark)
        if found:
            return Channel(channel, rest)
        last = (channel.recv_stderr(1 << 16) if channel.recv_stderr_ready() else said)[-SAID_BYTES:].decode("utf-8", "replace")
        raise paramiko.SSHException(" ".join(last.split()) or f"{command} said nothing")
    except BaseException:
        channel.close()
        raise
