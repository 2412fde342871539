"""SSH against real sshds on loopback: what the ssh config says is done, host keys are checked, every wait ends."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sshd import SSHD, Sshd, free_port, keygen, own_home_possible

from gpurun import known_hosts, ssh
from gpurun.config import parse_host
from gpurun.errors import HostKeyError, SSHError

pytestmark = pytest.mark.skipif(not SSHD or not shutil.which("ssh"), reason="needs OpenSSH's sshd and ssh (tests/run installs them)")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def second(tmp_path_factory, sshd):
    with Sshd(tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path / "gpurun"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(ssh, "_unlocked", {})


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the ssh config that gpurun is to use."""
    def write(text: str) -> Path:
        path = tmp_path / "ssh_config"
        path.write_text(text)
        monkeypatch.setenv("GPURUN_SSH_CONFIG", str(path))
        return path
    return write


def connect(host: str, **options) -> ssh.Connection:
    return ssh.Connection(parse_host(host), **options)


def port_seen(host: str) -> str:
    """Log in and ask the host which port we came to: tells the sshds apart."""
    with connect(host) as connection:
        return connection.run("echo $SSH_CONNECTION").stdout.split()[3].decode()


# ---- the ssh config --------------------------------------------------------------------------------------------------------

def test_alias_with_user_port_and_key_file(sshd, config):
    config(sshd.config_for("gpu1"))
    assert port_seen("gpu1") == str(sshd.port)
    target = ssh.resolve(parse_host("gpu1"))
    assert (target.hostname, target.user, target.port, target.source) == ("127.0.0.1", sshd.user, sshd.port, "ssh -G")
    assert target.identity_files == (str(sshd.key),) and target.identities_only


def test_what_the_cluster_file_says_wins_over_the_ssh_config(sshd, config):
    config(sshd.config_for("*", Port="1", User="nobody", HostName=""))
    assert port_seen(f"{sshd.user}@127.0.0.1:{sshd.port}") == str(sshd.port)


def test_include_match_and_host_star(sshd, config, tmp_path):
    (tmp_path / "more.conf").write_text(f"Host gpu-*\n    HostName 127.0.0.1\n    Port {sshd.port}\n")
    config(f"Include {tmp_path}/more.conf\n"
           f"Match host 127.0.0.1 exec \"true\"\n    IdentityFile {sshd.key}\n    User {sshd.user}\n"
           f"Match originalhost gpu-b\n    ConnectTimeout 7\n"
           f"Host *\n    User nobody\n    Port 1\n    IdentitiesOnly yes\n    UserKnownHostsFile {sshd.folder}/known_hosts\n")
    assert port_seen("gpu-a") == str(sshd.port)
    assert ssh.resolve(parse_host("gpu-b")).connect_timeout_s == 7


def test_tokens_and_home_in_paths(config):
    config("Host a\n  HostName 10.0.0.9\n  User u\n  Port 77\n  IdentityFile ~/%h/%r/100%%\n  ProxyCommand nc %h %p\n"
           "  UserKnownHostsFile /x/one /x/two\n  IdentityAgent /run/%u/sock\n")
    target = ssh.resolve(parse_host("a"))
    assert target.identity_files == (os.path.expanduser(f"~{target_user()}") + "/10.0.0.9/u/100%",)
    assert target.proxy_command == "nc 10.0.0.9 77" and target.user_known_hosts == ("/x/one", "/x/two")
    assert target.identity_agent == f"/run/{target_user()}/sock"


def target_user() -> str:
    import pwd
    return pwd.getpwuid(os.getuid()).pw_name


def test_a_broken_ssh_config_is_named_with_its_line(config):
    path = config("Host a\n  NoSuchWord yes\n")
    with pytest.raises(SSHError, match=rf"(?s)can't be read.*{path.name}.* 2"):
        ssh.resolve(parse_host("a"))


def test_without_an_ssh_client_paramiko_reads_the_config(sshd, config, monkeypatch):
    config(sshd.config_for("gpu1"))
    monkeypatch.setattr(ssh.shutil, "which", lambda _name: None)
    assert "paramiko" in ssh.resolve(parse_host("gpu1")).source
    assert port_seen("gpu1") == str(sshd.port)


def test_fabrics_own_files_change_nothing(sshd, config, tmp_path, monkeypatch):
    config(sshd.config_for("gpu1"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".fabric.json").write_text('{"user": "nobody", "port": 1, "gateway": "nowhere"}')
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host 127.0.0.1\n  HostName 127.0.0.9\n  Port 1\n  ProxyJump nowhere\n")
    assert port_seen("gpu1") == str(sshd.port)


# ---- keys --------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def agent(tmp_path):
    """A real ssh-agent with six keys; the last is the one that the sshd takes."""
    sock = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while subprocess.run(["ssh-add", "-l"], env={**os.environ, "SSH_AUTH_SOCK": str(sock)}, capture_output=True).returncode == 2:
        assert process.poll() is None                         # 2: nobody is there (yet)
        time.sleep(0.01)

    def add(*keys):
        subprocess.run(["ssh-add", "-q", *keys], env={**os.environ, "SSH_AUTH_SOCK": str(sock)}, check=True)
    yield sock, add
    process.terminate()
    process.wait(30)


def test_six_agent_keys_and_identities_only(sshd, config, agent, tmp_path):
    sock, add = agent
    for number in range(6):
        add(keygen(tmp_path / f"other{number}"))
    add(sshd.key)
    config(sshd.config_for("few", IdentityAgent=str(sock)) + sshd.config_for("many", IdentityAgent=str(sock), IdentitiesOnly="no",
                                                                            IdentityFile=str(tmp_path / "other0")))
    assert port_seen("few") == str(sshd.port)
    with pytest.raises(SSHError, match=r"(?s)hung up after . key\(s\): other0 of the agent.*'IdentitiesOnly yes'"):
        port_seen("many")


def test_a_key_that_only_the_agent_holds_is_chosen_by_its_public_file(sshd, config, agent, tmp_path):
    sock, add = agent
    add(*(keygen(tmp_path / f"other{number}") for number in range(6)), sshd.key)
    shutil.copy(f"{sshd.key}.pub", tmp_path / "chosen.pub")
    config(sshd.config_for("gpu1", IdentityAgent=str(sock), IdentityFile=str(tmp_path / "chosen.pub")))
    assert port_seen("gpu1") == str(sshd.port)


def test_the_agent_of_the_environment(sshd, config, agent, monkeypatch):
    sock, add = agent
    add(sshd.key)
    config(sshd.config_for("gpu1", IdentityAgent="", IdentityFile="", IdentitiesOnly=""))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    assert port_seen("gpu1") == str(sshd.port)


def test_a_key_with_a_passphrase_is_taken_from_the_agent_without_asking(sshd, config, agent, tmp_path):
    sock, add = agent
    add(sshd.key)
    locked = tmp_path / "locked"
    shutil.copy(sshd.key, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True)
    config(sshd.config_for("gpu1", IdentityAgent=str(sock), IdentityFile=str(locked)))
    assert port_seen("gpu1") == str(sshd.port)


CHILD = """
import sys
from gpurun import ssh
from gpurun.config import parse_host
from gpurun.errors import SSHError
try:
    with ssh.Connection(parse_host("gpu1")) as connection:
        print("in:", connection.run("echo yes").stdout.decode())
except SSHError as error:
    print("SSHError:", error)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def locked(sshd, config, tmp_path):
    path = tmp_path / "locked"
    shutil.copy(sshd.key, path)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", path], check=True)
    config(sshd.config_for("gpu1", IdentityFile=str(path)))
    return path


def test_a_key_with_a_passphrase_and_no_terminal_is_an_error_that_names_it(locked):
    done = subprocess.run([sys.executable, "-c", CHILD], start_new_session=True, capture_output=True, text=True, timeout=90,
                          stdin=subprocess.DEVNULL)
    assert f"key {locked} has a passphrase and there is no terminal" in done.stdout and "ssh-add" in done.stdout, done
    assert done.stderr == ""


@pytest.mark.parametrize("typed, want", [(b"wrong\nsecret\n", b"in: yes"), (b"\x03", b"interrupted"), (b"\n", b"no passphrase was given")])
def test_a_passphrase_is_asked_for_on_the_terminal(locked, typed, want):
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CHILD])
    seen, answers = b"", typed.splitlines(keepends=True)
    try:
        while block := os.read(fd, 4096):
            seen += block
            if answers and seen.count(b"Passphrase for") > len(typed.splitlines()) - len(answers):
                time.sleep(0.1)   # getpass drops what was typed before it asked
                os.write(fd, answers.pop(0))
    except OSError:   # how Linux says that the other end of a pty is closed
        pass
    os.close(fd)
    os.waitpid(pid, 0)
    assert want in seen and b"secret" not in seen


def test_a_key_that_others_may_read_is_not_used_and_named(sshd, config, tmp_path):
    loose = tmp_path / "loose"
    shutil.copy(sshd.key, loose)
    loose.chmod(0o644)
    config(sshd.config_for("gpu1", IdentityFile=str(loose)))
    with pytest.raises(SSHError, match=f"key {loose} may be read by others .mode 0644.*chmod 600 {loose}"):
        connect("gpu1").open()


def test_a_file_that_is_no_key_and_a_missing_one_are_named(sshd, config, tmp_path):
    (tmp_path / "junk").write_text("hello")
    (tmp_path / "junk").chmod(0o600)
    config(sshd.config_for("junk", IdentityFile=str(tmp_path / "junk")) + sshd.config_for("gone", IdentityFile=str(tmp_path / "gone")))
    with pytest.raises(SSHError, match=f"key {tmp_path}/junk can't be used"):
        connect("junk").open()
    with pytest.raises(SSHError, match=f"no such file: {tmp_path}/gone"):
        connect("gone").open()


def test_a_refused_key_says_what_was_tried(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", IdentityFile=str(keygen(tmp_path / "stranger"))))
    with pytest.raises(SSHError, match=f"(?s)login as {sshd.user} on gpu1 .*{tmp_path}/stranger.*ssh-copy-id gpu1"):
        connect("gpu1").open()


def test_a_rented_machine_that_refuses_the_key_is_not_answered_with_advice_for_ones_own_hosts(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", IdentityFile=str(keygen(tmp_path / "stranger"))))
    rented = replace(ssh.resolve(parse_host("gpu1")), text="node1, direct", pins=str(tmp_path / "pins"))
    with pytest.raises(SSHError, match=f"(?s)login as {sshd.user} on node1, direct .*{tmp_path}/stranger.*That key is gpurun's own") as raised:
        ssh.Connection(rented).open()
    assert "ssh-copy-id" not in str(raised.value) and "'ssh node1" not in str(raised.value)


def test_a_login_that_failed_leaves_no_thread_and_no_socket(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", IdentityFile=str(keygen(tmp_path / "stranger")))
           + sshd.config_for("bad", HostKeyAlias="x", StrictHostKeyChecking="yes"))
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for host in ("gpu1", "bad"):
        with pytest.raises(SSHError):
            connect(host).open()
    deadline = time.monotonic() + 20
    while (threading.active_count(), len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) <= before


@pytest.mark.parametrize("kind", [["-t", "rsa", "-b", "2048"], ["-t", "ecdsa"], ["-t", "rsa", "-b", "2048", "-m", "PEM"]])
def test_other_kinds_of_keys(sshd, config, tmp_path, kind):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", path, *kind], check=True)
    with open(sshd.folder / "authorized_keys", "a") as file:
        file.write((tmp_path / "key.pub").read_text())
    config(sshd.config_for("gpu1", IdentityFile=str(path)))
    assert port_seen("gpu1") == str(sshd.port)


def test_a_host_where_md5_is_forbidden(sshd, config, monkeypatch):
    def forbidden(*_args, **_options):
        raise ValueError("disabled for FIPS")
    for module in [module for name, module in sys.modules.items() if name.startswith("paramiko.") and hasattr(module, "md5")]:
        monkeypatch.setattr(module, "md5", forbidden)
    monkeypatch.setattr(hashlib, "md5", forbidden)
    config(sshd.config_for("gpu1"))
    assert port_seen("gpu1") == str(sshd.port)


# ---- jump hosts --------------------------------------------------------------------------------------------------------------

def test_proxy_jump_goes_through_the_other_host(sshd, second, config):
    config(sshd.config_for("gpu1", ProxyJump="bastion") + second.config_for("bastion"))
    before, opened = second.logins, ssh.connections_opened
    with connect("gpu1") as connection:
        assert connection.run("echo $SSH_CONNECTION").stdout.split()[3].decode() == str(sshd.port)
        assert connection.peer_ip() == "127.0.0.1"   # the name's, as there is no connection of our own
    assert second.logins == before + 1 and ssh.connections_opened == opened + 2


def test_a_chain_of_jump_hosts_and_one_with_a_jump_of_its_own(sshd, second, config):
    config(sshd.config_for("gpu1", ProxyJump=f"{second.user}@b1:{second.port},b2") + sshd.config_for("gpu2", ProxyJump="b3")
           + second.config_for("b1", Port="1", User="nobody") + second.config_for("b2 b4") + second.config_for("b3", ProxyJump="b4"))
    before = second.logins
    assert port_seen("gpu1") == str(sshd.port)
    assert second.logins == before + 2
    assert port_seen("gpu2") == str(sshd.port)
    assert second.logins == before + 4


def test_proxy_jump_none_and_a_jump_host_that_is_meant_by_its_own_rule(sshd, second, config):
    rule = "Host *\n    ProxyJump bastion\n"
    config(sshd.config_for("plain", ProxyJump="none") + sshd.config_for("gpu1") + second.config_for("bastion") + rule)
    before = second.logins
    assert port_seen("plain") == str(sshd.port) and second.logins == before
    assert port_seen("gpu1") == str(sshd.port) and second.logins == before + 1


def test_jump_hosts_in_a_circle_are_an_error(sshd, config):
    config(sshd.config_for("a", ProxyJump="b") + sshd.config_for("b", ProxyJump="a"))
    with pytest.raises(SSHError, match="leads? back to itself"):
        connect("a").open()


def test_a_jump_host_that_cannot_reach_the_host(sshd, second, config):
    config(sshd.config_for("gpu1", ProxyJump="bastion", Port=str(free_port())) + second.config_for("bastion"))
    with pytest.raises(SSHError, match="the jump host 127.0.0.1 can't reach gpu1"):
        connect("gpu1").open()


def test_proxy_command_with_shell_syntax(sshd, config, tmp_path):
    relay = tmp_path / "relay.py"
    relay.write_text("import os, socket, sys, threading\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
                     "def up():\n    while b := os.read(0, 65536): s.sendall(b)\n"
                     "threading.Thread(target=up, daemon=True).start()\n"
                     "while b := s.recv(65536): os.write(1, b)\n")
    config(sshd.config_for("gpu1", ProxyCommand=f"{sys.executable} {relay} %h %p 2>/dev/null"))
    assert port_seen("gpu1") == str(sshd.port)


def test_a_proxy_command_that_fails_is_quoted_and_ends_at_once(sshd, config):
    config(sshd.config_for("gpu1", ProxyCommand="sh -c 'echo no route to there >&2; exit 3'"))
    begun = time.monotonic()
    with pytest.raises(SSHError, match=r"(?s)ProxyCommand for gpu1.*no route to there"):
        connect("gpu1").open()
    assert time.monotonic() - begun < 20


# ---- host keys ---------------------------------------------------------------------------------------------------------------

def test_a_host_never_seen_is_pinned_once_and_said(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", UserKnownHostsFile="/dev/null"))
    said = []
    with connect("gpu1", say=said.append):
        pass
    print_of = subprocess.run(["ssh-keygen", "-lf", sshd.folder / "host_key.pub"], capture_output=True, text=True).stdout.split()[1]
    pins = tmp_path / "gpurun/known_hosts"
    assert len(said) == 1 and print_of in said[0] and str(pins) in said[0]
    assert pins.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n"
    assert pins.stat().st_mode & 0o777 == 0o600 and pins.parent.stat().st_mode & 0o777 == 0o700
    with connect("gpu1", say=said.append):
        pass
    assert len(said) == 1 and pins.read_text().count("\n") == 1


@pytest.mark.parametrize("where", ["pin", "user"])
def test_a_changed_key_is_an_error_that_names_both_and_nothing_is_sent(sshd, config, tmp_path, where):
    other = (keygen(tmp_path / "other").with_suffix(".pub")).read_text().split()
    file = tmp_path / "gpurun/known_hosts" if where == "pin" else tmp_path / "kh"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"# mine\n[127.0.0.1]:{sshd.port} {other[0]} {other[1]}\n")
    config(sshd.config_for("gpu1", UserKnownHostsFile=str(tmp_path / "kh")))
    before = sshd.log.read_text().count("userauth") + sshd.logins
    with pytest.raises(HostKeyError) as caught:
        connect("gpu1").open()
    text = str(caught.value)
    assert known_hosts.fingerprint(other[1]) in text and known_hosts.fingerprint(sshd.host_key.split()[1]) in text
    assert f"{file} line 2" in text and f"ssh-keygen -R '[127.0.0.1]:{sshd.port}' -f {file}" in text
    assert sshd.log.read_text().count("userauth") + sshd.logins == before


def test_strict_checking_refuses_a_host_never_seen(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", UserKnownHostsFile="/dev/null", StrictHostKeyChecking="yes"))
    with pytest.raises(HostKeyError, match="StrictHostKeyChecking yes"):
        connect("gpu1").open()
    assert not (tmp_path / "gpurun/known_hosts").exists()


def test_no_checking_and_no_file_pins_nothing_but_says_so(sshd, config, tmp_path):
    config(sshd.config_for("gpu1", UserKnownHostsFile="/dev/null", StrictHostKeyChecking="no"))
    said = []
    connect("gpu1", say=said.append).open().close()
    assert "not checked" in said[0] and not (tmp_path / "gpurun/known_hosts").exists()


def test_hashed_known_hosts_written_by_ssh_keygen(sshd, config, tmp_path):
    file = tmp_path / "kh"
    shutil.copy(sshd.folder / "known_hosts", file)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert file.read_text().startswith("|1|")
    config(sshd.config_for("gpu1", UserKnownHostsFile=str(file), StrictHostKeyChecking="yes"))
    assert port_seen("gpu1") == str(sshd.port)


def test_host_key_alias(sshd, config, tmp_path):
    file = tmp_path / "kh"
    file.write_text(f"my-gpu {sshd.host_key}\n")
    config(sshd.config_for("gpu1", HostKeyAlias="my-gpu", UserKnownHostsFile=str(file), StrictHostKeyChecking="yes"))
    assert port_seen("gpu1") == str(sshd.port)


def test_a_known_key_of_another_type_than_the_host_likes_best(tmp_path, config):
    folder = tmp_path / "two"
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", folder / "rsa_key"], check=True)
    with Sshd(folder, [f"HostKey {folder}/host_key", f"HostKey {folder}/rsa_key"]) as sshd:
        rsa = " ".join((folder / "rsa_key.pub").read_text().split()[:2])
        (tmp_path / "kh").write_text(f"[127.0.0.1]:{sshd.port} {rsa}\n")
        config(sshd.config_for("gpu1", UserKnownHostsFile=str(tmp_path / "kh"), StrictHostKeyChecking="yes"))
        assert port_seen("gpu1") == str(sshd.port)


def test_which_known_hosts_lines_are_about_a_host(tmp_path):
    key = base64.b64encode(b"k" * 40).decode()
    salt = b"s" * 20
    hashed = "|1|" + base64.b64encode(salt).decode() + "|" + base64.b64encode(hmac.new(salt, b"h.x", "sha1").digest()).decode()
    lines = [f"h.x ssh-rsa {key}", f"*.x,!h.x ssh-rsa {key}", f"?.x ssh-rsa {key} comment", f"{hashed} ssh-rsa {key}",
             f"@cert-authority *.x ssh-rsa {key}", f"@revoked * ssh-rsa {key}", f"# h.x ssh-rsa {key}", f"H.X,b ssh-rsa {key}",
             "h.x ssh-rsa ????", "h.x", "", f"[h.x]:22 ssh-rsa {key}", "|1|bad ssh-rsa x", "\x00\xff"]
    (tmp_path / "kh").write_text("\n".join(lines))
    found = known_hosts.find("h.x", [str(tmp_path / "kh"), str(tmp_path / "none"), str(tmp_path)])
    assert [line.line for line in found] == [1, 3, 4, 6, 8] and [line.revoked for line in found] == [False] * 3 + [True, False]
    assert known_hosts.find("[h.x]:22", [str(tmp_path / "kh")])[-1].line == 12
    assert known_hosts.lookup_name("Host", 22) == "host" and known_hosts.lookup_name("Host", 23) == "[host]:23"


def test_a_revoked_key_is_refused(sshd, config, tmp_path):
    (tmp_path / "kh").write_text(f"@revoked * {sshd.host_key}\n[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    config(sshd.config_for("gpu1", UserKnownHostsFile=str(tmp_path / "kh")))
    with pytest.raises(HostKeyError, match="line 1 calls revoked"):
        connect("gpu1").open()


# ---- hosts that aren't there, or not yet -----------------------------------------------------------------------------------------

class Stub:
    """A port that does with each connection in turn what `steps` say: "silent", "reset", "junk" or the port to go on to."""

    def __init__(self, *steps):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.steps, self.held = self.listener.getsockname()[1], list(steps), []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
            if step == "silent":
                self.held.append(sock)
            elif step == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.close()
            elif step == "junk":
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.close()
            else:
                other = socket.create_connection(("127.0.0.1", step))
                for a, b in ((sock, other), (other, sock)):
                    threading.Thread(target=self.pump, args=(a, b), daemon=True).start()

    def pump(self, a, b):
        try:
            while block := a.recv(65536):
                b.sendall(block)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_port_that_is_open_but_silent_ends_within_the_bound(sshd, config, monkeypatch):
    monkeypatch.setattr(ssh, "BANNER_S", 0.5)
    config(sshd.config_for("gpu1", Port=str(Stub("silent").port)))
    begun = time.monotonic()
    with pytest.raises(SSHError, match="something listens there but doesn't say hello"):
        connect("gpu1").open()
    assert time.monotonic() - begun < 15


def test_banner_errors_while_sshd_comes_up(sshd, config, monkeypatch):
    monkeypatch.setattr(ssh, "BANNER_S", 0.5)
    stub = Stub("silent", "reset", "junk", sshd.port)
    config(sshd.config_for("gpu1", Port=str(stub.port), HostKeyAlias="new"))
    with connect("gpu1", connect_within_s=60) as connection:
        assert connection.run("echo up").stdout == b"up\n"


def test_a_closed_port_and_a_name_that_nobody_knows(sshd, config):
    config(sshd.config_for("gpu1", Port=str(free_port())) + "Host gpu2\n    HostName no-such-host.invalid\n")
    with pytest.raises(SSHError, match="no connection to gpu1 .*Connection refused"):
        connect("gpu1").open()
    begun = time.monotonic()
    with pytest.raises(SSHError, match=r"tried for 1 s"):
        connect("gpu1", connect_within_s=1).open()
    assert time.monotonic() - begun < 15
    with pytest.raises(SSHError, match="no-such-host.invalid' can't be looked up"):
        connect("gpu2", connect_within_s=30).open()


# ---- commands and files --------------------------------------------------------------------------------------------------------

@pytest.fixture
def connection(sshd, config):
    config(sshd.config_for("gpu1"))
    with connect("gpu1") as opened:
        yield opened


def test_a_command_gives_its_bytes_and_its_code(connection):
    done = connection.run("printf 'a\\377\\n'; printf err >&2; exit 7")
    assert (done.code, done.stdout, done.stderr) == (7, b"a\xff\n", b"err")
    assert connection.run("cat", stdin=b"x" * 300_000).stdout == b"x" * 300_000
    assert connection.run("test -t 0 || echo no terminal; cat").stdout == b"no terminal\n"
    assert connection.run("kill -9 $$").code == -1
    both = connection.run("i=0; while [ $i -lt 3000 ]; do echo $i; echo e$i >&2; i=$((i+1)); done")
    assert both.stdout.count(b"\n") == both.stderr.count(b"\n") == 3000
    assert connection.peer_ip() == "127.0.0.1"


def test_a_command_that_hangs_is_given_up(connection):
    begun = time.monotonic()
    with pytest.raises(SSHError, match="no end after 0.5 s, given up: sleep 30"):
        connection.run("sleep 30", timeout_s=0.5)
    assert time.monotonic() - begun < 15
    assert connection.run("echo on").stdout == b"on\n"


def test_a_process_left_behind_with_our_output_does_not_hold_us(connection):
    begun = time.monotonic()
    assert connection.run("sleep 60 & echo done").stdout == b"done\n"
    assert time.monotonic() - begun < 30


def test_endless_output_is_given_up(connection, monkeypatch):
    monkeypatch.setattr(ssh, "MAX_OUTPUT", 1 << 20)
    with pytest.raises(SSHError, match="more than 1 MiB of output"):
        connection.run("yes")


def test_put_is_whole_or_not_at_all(connection, sshd, tmp_path):
    data = os.urandom(3_000_000)
    (tmp_path / "big").write_bytes(data)
    seen = []
    connection.put(tmp_path / "big", "~/a b/it's $big", seen.append)
    there = sshd.home / "a b/it's $big"
    assert there.read_bytes() == data and there.stat().st_mode & 0o777 == 0o600 and seen[-1] == len(data) and seen == sorted(seen)
    (tmp_path / "none").write_bytes(b"")
    connection.put(tmp_path / "none", "~/a b/none")
    assert sorted(path.name for path in there.parent.iterdir()) == ["it's $big", "none"]
    with pytest.raises(SSHError, match="(?s)/dev/null/x could not be written.*/dev/null"):
        connection.put(tmp_path / "big", "/dev/null/x")
    shutil.rmtree(there.parent)


def test_put_that_nobody_takes_is_given_up(connection, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "NO_PROGRESS_S", 0.5)
    (tmp_path / "big").write_bytes(bytes(8 << 20))
    monkeypatch.setattr(ssh, "remote_path", lambda _path: "/dev/null; sleep 5; :")
    with pytest.raises(SSHError, match="nothing was taken for 0.5 s"):
        connection.put(tmp_path / "big", "~/x")


def test_a_connection_that_is_cut_during_a_command(sshd, config):
    config(sshd.config_for("gpu1"))
    with connect("gpu1") as connection, pytest.raises(SSHError, match="broke while this ran"):
        connection.run("kill -9 $PPID; sleep 5", timeout_s=10)


@pytest.mark.skipif(not own_home_possible(), reason="needs a home folder of its own for the sshd (root)")
def test_a_noisy_bashrc_does_not_matter_to_put_and_run(sshd, config, tmp_path):
    config(sshd.config_for("gpu1"))
    noise = sshd.home / ".bashrc"
    noise.write_text("echo welcome\ntput cols\nstty -a\nprintf '\\033]0;title\\007'\n")
    try:
        with connect("gpu1") as connection:
            (tmp_path / "f").write_bytes(b"data")
            connection.put(tmp_path / "f", "~/f")
            assert (sshd.home / "f").read_bytes() == b"data"
            assert connection.run("echo here").stdout.endswith(b"here\n")
    finally:
        noise.unlink()
