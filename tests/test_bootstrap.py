"""The agent file, the probe and the deploy: pure parts from recorded outputs, the rest against a real sshd and real interpreters."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from sshd import SSHD, Sshd, own_home_possible

from gpurun import bootstrap, provider
from gpurun.agentfile import SHIPPED, agent_file
from gpurun.bootstrap import check, parse_probe, parse_start, probe_script, what_is_missing
from gpurun.config import Cluster, parse_host
from gpurun.errors import DeployError

DATA = Path(__file__).parent / "data"
PACKAGE = Path(bootstrap.__file__).parent
OPERATOR = "ab" * 32


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def interpreters() -> list[str]:
    """Every Python that can be found here: on PATH, and those of pyenv and uv."""
    names = [f"python{v}" for v in ("2.7", "3", *(f"3.{n}" for n in range(5, 15)))]
    found = {shutil.which(name) for name in names} | {sys.executable}
    for folder in (Path("~/.pyenv/versions").expanduser(), Path("~/.local/share/uv/python").expanduser()):
        found |= {str(path) for path in folder.glob("*/bin/python")}
    works = {}
    for path in sorted(filter(None, found)):
        done = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True)
        if done.returncode == 0:
            works.setdefault(done.stdout.strip(), path)
    return [works[version] for version in sorted(works)]


# ---- the agent file ------------------------------------------------------------------------------------------------------------

def test_the_agent_file_is_the_same_bytes_each_time_and_named_by_its_sources(tmp_path, monkeypatch):
    first = agent_file()
    assert first.name == f"agent-{first.hash}.pyz" and first.size == len(Path(first.path).read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    again = agent_file()
    assert again.hash == first.hash and again.path != first.path and Path(again.path).read_bytes() == Path(first.path).read_bytes()
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert agent_file(copy).hash == first.hash
    (copy / "node.py").write_text((copy / "node.py").read_text() + "\n# changed\n")
    assert agent_file(copy).hash != first.hash
    with zipfile.ZipFile(first.path) as archive:
        assert sorted(archive.namelist()) == sorted(["__main__.py", *(f"gpurun/{name}.py" for name in SHIPPED)])
        assert archive.read("gpurun/node.py") == (PACKAGE / "node.py").read_bytes()


def test_a_shipped_module_imports_only_shipped_modules():
    for module in SHIPPED:
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "gpurun":
                names = [alias.name for alias in node.names if alias.name != "__version__"]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpurun."):
                names = [node.module.split(".")[1]]
            else:
                continue
            assert set(names) <= set(SHIPPED), f"{module}.py imports {names}"


@pytest.mark.parametrize("python", interpreters())
def test_the_agent_file_under_every_python_here(python):
    """An old one is refused with a line that we can read, a new one gets as far as reading its options."""
    version = tuple(json.loads(subprocess.check_output([python, "-c", "import sys; print(list(sys.version_info[:2]))"])))
    isolated = ["-I"] if version >= (3, 4) else []
    done = subprocess.run([python, *isolated, agent_file().path, "start"], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    if version < (3, 8):
        assert done.returncode == 10, done
        with pytest.raises(DeployError, match=r"needs Python 3.8 or newer; .* is \d\.\d.*exit code 10"):
            parse_start("gpu1", done.returncode, done.stdout, done.stderr)
    else:
        assert done.returncode == 2 and b"--node-dir" in done.stderr, done


# ---- the probe -----------------------------------------------------------------------------------------------------------------

def facts_of(name: str) -> bootstrap.Facts:
    return parse_probe((DATA / f"probe-{name}.txt").read_bytes())


SHELLS = [words for words in (["dash"], ["bash"], ["bash", "--posix"], ["busybox", "ash"], ["ksh"], ["zsh"]) if shutil.which(words[0])]


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_probe_in_every_shell_here(shell, tmp_path):
    home = tmp_path / "it's a home"
    (home / "x y/agent").mkdir(parents=True)
    (home / "x y/agent/agent-00ff.pyz").write_bytes(b"12345")
    (home / "x y/lib/iroh-1.2.0-tag/iroh").mkdir(parents=True)
    (home / "x y/lib/iroh-1.2.0-tag/iroh/__init__.py").touch()
    (home / "x y/lib/iroh-1.2.0-half").mkdir()
    before = sorted(home.rglob("*"))
    done = subprocess.run([*shell, "-s"], input=probe_script("~/x y").encode(), capture_output=True, env={**os.environ, "HOME": str(home)})
    facts = parse_probe(done.stdout)
    uname = os.uname()
    assert (facts.os, facts.arch, facts.uid, facts.home) == (uname.sysname, uname.machine, os.getuid(), str(home))
    assert facts.node_dir == facts.near == f"{home}/x y" and facts.writable
    assert facts.agents == (("agent-00ff.pyz", 5),) and facts.libs == ("iroh-1.2.0-tag",)
    assert 0.5 < facts.free_bytes / shutil.disk_usage(home).free < 2      # other tests write meanwhile
    assert facts.python.startswith("/") and facts.libc in ("glibc", "musl") and facts.libc_version
    assert sorted(home.rglob("*")) == before and done.stderr == b""


def test_the_probe_of_a_folder_that_can_not_be_and_of_one_python():
    script = probe_script("/proc/version/x/.gpurun", sys.executable)
    facts = parse_probe(subprocess.run(["sh", "-s"], input=script.encode(), capture_output=True).stdout)
    assert (facts.near, facts.writable) == ("/proc/version", False)
    assert [path for path, _, _ in facts.pythons] == [sys.executable]
    script = probe_script("~/.gpurun", "no-such-python")
    assert parse_probe(subprocess.run(["sh", "-s"], input=script.encode(), capture_output=True).stdout).pythons == ()


def test_recorded_probes():
    debian = facts_of("debian12")
    assert (debian.libc, debian.libc_version, debian.python, debian.container) == ("glibc", (2, 36), "/usr/bin/python3", True)
    assert debian.agents == (("agent-0123456789abcdef.pyz", 251904), ("agent-fedcba9876543210.pyz", 0))
    assert check(debian, "gpu1", Cluster()) == "manylinux_2_28_x86_64"
    conda = facts_of("noisy-conda")
    assert (conda.os, conda.python, conda.free_bytes) == ("Linux", "/opt/conda/bin/python3.10", -1)
    assert conda.node_dir == "/workspace/my runs/.gpurun"
    assert check(conda, "gpu1", Cluster()) == "manylinux_2_28_x86_64"
    assert (facts_of("alpine").libc, facts_of("alpine").libc_version) == ("musl", (1, 2))
    assert (facts_of("ubuntu1804").libc_version, facts_of("ubuntu1804").python) == ((2, 27), "/usr/bin/python3.8")


@pytest.mark.parametrize("name, words", [
    ("no-python", r"(?s)no Python that the agent can run on.*/usr/bin/python3.9: 3.9.2 No module named 'asyncio'.*apt-get install python3.*"
                  r"in /etc/c.toml: python = "),
])
def test_nodes_that_can_not_run_the_agent_and_the_ways_out(name, words):
    with pytest.raises(DeployError, match=words):
        check(facts_of(name), "gpu1", Cluster(path=Path("/etc/c.toml")))


def test_more_nodes_that_can_not_run_the_agent():
    debian = facts_of("debian12")
    with pytest.raises(DeployError, match="/root/.gpurun can't be written by root"):
        check(dataclasses.replace(debian, writable=False), "gpu1", Cluster())
    with pytest.raises(DeployError, match='python = "python9"` in the cluster file isn\'t there'):
        check(dataclasses.replace(debian, pythons=()), "gpu1", Cluster(python="python9"))
    assert check(dataclasses.replace(debian, os="Darwin", arch="arm64", libc=""), "mac", Cluster()) == "macosx_11_0_arm64"


def test_nodes_that_iroh_has_no_build_for_have_none():
    debian = facts_of("debian12")
    for facts, words in [(facts_of("alpine"), "musl as its C library, .*only with glibc 2.28"), (facts_of("ubuntu1804"), "glibc 2.27, .*only with glibc 2.28"),
                         (dataclasses.replace(debian, arch="riscv64"), "Linux riscv64, which iroh has no build for"),
                         (dataclasses.replace(debian, os="FreeBSD"), "FreeBSD x86_64"), (dataclasses.replace(debian, libc=""), "no glibc")]:
        assert check(facts, "gpu1", Cluster()) == "" and re.search(words, bootstrap.why_no_iroh(facts))
        assert what_is_missing(facts, "agent-x.pyz", 1, "") == (True, False)
    assert not bootstrap.why_no_iroh(debian)


@pytest.mark.parametrize("output", [b"", b"open terminal failed: not a terminal\n", b"GPURUN-PROBE-BEGIN\nos=Linux\n",
                                    b"echo GPURUN-PROBE-BEGIN GPURUN-PROBE-END"])
def test_a_login_shell_that_does_not_run_commands(output):
    with pytest.raises(DeployError, match="login shell did not run our command"):
        parse_probe(output)


@pytest.mark.parametrize("key, value", [("os", ""), ("uid", "x"), ("node_dir", "~/.gpurun"), ("free_kib", "much"), ("writable", "maybe"),
                                        ("home", None)])
def test_a_probe_with_a_line_that_makes_no_sense(key, value):
    lines = (DATA / "probe-debian12.txt").read_text().splitlines()
    lines = [f"{key}={value}" if line.startswith(key + "=") else line for line in lines]
    lines = [line for line in lines if not line.endswith("=None")]
    with pytest.raises(DeployError, match="can't be read"):
        parse_probe("\n".join(lines).encode())


def test_what_is_missing():
    facts = facts_of("debian12")
    assert what_is_missing(facts, "agent-0123456789abcdef.pyz", 251904, "iroh-1.2.0-manylinux_2_28_x86_64") == (False, False)
    assert what_is_missing(facts, "agent-fedcba9876543210.pyz", 251904, "iroh-1.3.0-manylinux_2_28_x86_64") == (True, True)   # cut short


# ---- iroh for another machine ----------------------------------------------------------------------------------------------------

def test_our_own_iroh_is_packed_once_and_unpacks_whole(tmp_path):
    tags = bootstrap._own_tags()
    packed = bootstrap.iroh_zip(tags[0], pytest.fail)
    stamp = packed.stat().st_mtime_ns
    assert bootstrap.iroh_zip(tags[0], pytest.fail) == packed and packed.stat().st_mtime_ns == stamp
    target = tmp_path / "lib/iroh-x"
    target.parent.mkdir()

    def unpack(name):
        shutil.copy(packed, tmp_path / name)
        return subprocess.run([sys.executable, "-I", "-", tmp_path / name, target], input=bootstrap.UNPACK, capture_output=True, text=True)
    results = []
    threads = [threading.Thread(target=lambda name=name: results.append(unpack(name))) for name in ("one.zip", "two.zip")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.stdout for done in results] == ["GPURUN-UNPACKED\n"] * 2, results
    assert os.listdir(target.parent) == ["iroh-x"] and not (tmp_path / "one.zip").exists()
    ours = bootstrap.iroh_folder()
    for path in (target / "iroh").iterdir():
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256((ours / path.name).read_bytes()).digest()
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    done = subprocess.run([sys.executable, "-I", "-", tmp_path / "bad.zip", tmp_path / "lib/bad"], input=bootstrap.UNPACK.encode(),
                          capture_output=True)
    assert done.returncode == 1 and os.listdir(target.parent) == ["iroh-x"]


def test_iroh_of_another_platform_is_fetched_with_pip_once(tmp_path, monkeypatch):
    """A stand-in for pip, since tests don't touch the network; contrib/bench and people use the real one."""
    log, fake = tmp_path / "log", tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\nwhile [ $# -gt 1 ]; do [ "$1" = --dest ] && dest=$2; shift; done\n'
                    '[ "$1" = iroh==0 ] && { echo "No matching distribution found"; exit 1; }\n'
                    'echo wheel > "$dest/iroh-1.2.0-py3-none-some_platform.whl"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    said = []
    wheel = bootstrap.iroh_zip("manylinux_2_28_other", said.append)
    assert wheel.read_text() == "wheel\n" and len(said) == 1 and bootstrap.iroh_zip("manylinux_2_28_other", said.append) == wheel
    words = log.read_text()
    assert words.count("\n") == 1 and "--no-deps --only-binary :all: --platform manylinux_2_28_other" in words
    monkeypatch.setattr(bootstrap, "iroh_version", lambda: "0")
    with pytest.raises(DeployError, match=r"(?s)No matching distribution found.*put the wheel there yourself: .*iroh-0-py3-none-x.whl"):
        bootstrap.iroh_zip("x", said.append)


# ---- what the start says ----------------------------------------------------------------------------------------------------------

GOOD = {"id": "ab" * 32, "addresses": ["10.0.0.1:4433", "[fd00::1]:4433"], "port": 4433, "pid": 7, "agent": "00ff", "version": "0.1.0",
        "protocol": 1, "python": "3.11.2", "note": ""}


def test_the_start_is_read_behind_its_word():
    noise = b"motd\r\n\x1b]0;title\x07GPURUN-ENDPOINT " + json.dumps(GOOD).encode() + b"\nlogout\n"
    assert parse_start("gpu1", 0, noise, b"")["addresses"] == GOOD["addresses"]
    with pytest.raises(DeployError, match=r"gpu1: the agent did not start: no room \(exit code 12\)"):
        parse_start("gpu1", 12, b'GPURUN-FAILED {"reason": "no room"}\n', b"")
    with pytest.raises(DeployError, match=r"(?s)exit code 127.*line 14\Z"):
        parse_start("gpu1", 127, b"", "".join(f"line {n}\n" for n in range(15)).encode())


@pytest.mark.parametrize("change", [{"id": "x"}, {"id": None}, {"port": 0}, {"port": True}, {"addresses": ["evil host:1"]},
                                    {"addresses": "1.2.3.4:5"}, {"protocol": "1"}])
def test_a_start_that_says_nonsense(change):
    with pytest.raises(DeployError, match="can't be read"):
        parse_start("gpu1", 0, b"GPURUN-ENDPOINT " + json.dumps({**GOOD, **change}).encode(), b"")


# ---- deploy to a real host ---------------------------------------------------------------------------------------------------------

needs_host = pytest.mark.skipif(not SSHD or not own_home_possible(), reason="needs OpenSSH's sshd and a home folder of its own for it (root)")

FAKE_NODE = """\
import json, os, sys
def main():
    words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    with open(os.path.join(words["--node-dir"], "argv"), "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
    FAIL
    print("GPURUN-ENDPOINT " + json.dumps({"id": "cd" * 32, "addresses": ["10.9.9.9:4433"], "port": 4433, "pid": 1, "agent": "x",
                                           "version": "0", "protocol": 1, "python": "3", "note": "hello"}))
    return 0
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")   # packing iroh takes a second


@pytest.fixture
def host(sshd, tmp_path, monkeypatch, packed_once):
    """A node that has never seen gpurun, with a noisy login shell."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(packed_once))
    config = tmp_path / "ssh_config"
    config.write_text(sshd.config_for("gpu1"))
    monkeypatch.setenv("GPURUN_SSH_CONFIG", str(config))
    (sshd.home / ".bashrc").write_text("echo Welcome; printf GPURUN-PROBE-BEGIN; echo; tput cols; echo noise >&2\n")
    yield sshd
    shutil.rmtree(sshd.home / ".gpurun", ignore_errors=True)


def use_fake_agent(monkeypatch, tmp_path, fail: str = "pass") -> None:
    package = tmp_path / "fake"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (package / "node.py").write_text(FAKE_NODE.replace("FAIL", fail))
    original = agent_file
    monkeypatch.setattr(bootstrap, "agent_file", lambda: original(package))


def deploy(cluster: Cluster, **options):
    from gpurun import ssh
    with ssh.Connection(parse_host("gpu1")) as connection:
        return bootstrap.deploy(connection, cluster, OPERATOR, **options)


@needs_host
def test_deploy_sends_what_is_missing_over_one_connection_and_nothing_the_second_time(host, tmp_path, monkeypatch):
    use_fake_agent(monkeypatch, tmp_path)
    cluster, before, sent = Cluster(kind="ssh", udp_port=4433, relay=("https://a.example", "https://b.example")), host.logins, []
    said = deploy(cluster, progress=lambda what, done, size: sent.append((what, done == size)))
    assert said["id"] == "cd" * 32 and said["note"] == "hello"
    assert host.logins == before + 1 and ("agent", True) in sent and ("iroh", True) in sent
    folder = host.home / ".gpurun"
    agent, lib = bootstrap.agent_file(), f"iroh-{bootstrap.iroh_version()}-{bootstrap._own_tags()[0]}"
    assert (folder / "agent" / agent.name).read_bytes() == Path(agent.path).read_bytes() and os.listdir(folder / "lib") == [lib]
    for path in [folder, *folder.rglob("*")]:
        assert path.name == "argv" or path.stat().st_mode & 0o077 == 0, path
    home = Path(f"~{host.user}").expanduser()
    assert json.loads((folder / "argv").read_text()) == [
        "start", "--node-dir", f"{home}/.gpurun", "--authorize", OPERATOR, "--bind", "0.0.0.0:4433", "--lib", f"{home}/.gpurun/lib/{lib}",
        "--relay", "https://a.example,https://b.example", "--carrier", "any", "--idle-exit-s", "604800"]
    deploy(cluster, progress=lambda *_: pytest.fail("nothing is missing"))
    assert host.logins == before + 2


@needs_host
@pytest.mark.parametrize("fail, words", [
    ("print('GPURUN-FAILED {\"reason\": \"no iroh here\"}'); return 11", r"did not start: no iroh here \(exit code 11\)"),
    ("raise SystemError('odd')", r"(?s)did not start \(exit code 1\).*SystemError: odd"),
    ("os.kill(os.getpid(), 9)", r"did not start \(exit code -1\)"),
])
def test_an_agent_that_does_not_start(host, tmp_path, monkeypatch, fail, words):
    use_fake_agent(monkeypatch, tmp_path, fail)
    with pytest.raises(DeployError, match=words):
        deploy(Cluster(kind="ssh"))


@needs_host
def test_too_little_disk_and_a_folder_that_is_a_file(host, tmp_path, monkeypatch):
    use_fake_agent(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "SPARE_BYTES", 1 << 60)
        with pytest.raises(DeployError, match=r"has .* free, gpurun needs .*Make room"):
            deploy(Cluster(kind="ssh"))
    assert not (host.home / ".gpurun").exists()
    (host.home / "file").touch()
    with pytest.raises(DeployError, match="file/x can't be written"):
        deploy(Cluster(kind="ssh", node_dir="~/file/x"))


@needs_host
def test_a_login_shell_that_ends_every_session(host):
    (host.home / ".bashrc").write_text("echo goodbye; exit 0\n")
    with pytest.raises(DeployError, match=r"(?s)gpu1 .*login shell did not run our command.*goodbye"):
        deploy(Cluster(kind="ssh"))


@needs_host
def test_the_real_agent_on_a_host_that_has_never_seen_gpurun(host, monkeypatch):
    """First use deploys over one SSH connection; what was learned is found again without Fabric; a second deploy finds it running."""
    (node,) = provider.nodes(Cluster(kind="ssh", hosts=(parse_host("gpu1"),)))
    assert node.cached_endpoint() is None and node.describe()["agent_id"] is None
    before, begun, said = host.logins, time.monotonic(), []
    endpoint = node.deploy(said.append, lambda *_: None)
    seconds = time.monotonic() - begun
    pid = json.loads((host.home / ".gpurun/agent/endpoint.json").read_text())["pid"]
    try:
        assert host.logins == before + 1 and seconds < 60 and endpoint.addresses[0].startswith("127.0.0.1:")
        assert endpoint.agent == agent_file().hash and len(endpoint.agent_id) == 64 and endpoint.node == "gpu1"
        os.kill(pid, 0)
        again = node.deploy(said.append, lambda *_: pytest.fail("nothing is missing"))
        assert (again.agent_id, again.addresses) == (endpoint.agent_id, endpoint.addresses) and said == []
        code = ("import sys; from gpurun import config, provider\n"
                "n, = provider.nodes(config.Cluster(kind='ssh', hosts=(config.parse_host('gpu1'),)))\n"
                "print(n.cached_endpoint().agent_id, [m for m in sys.modules if m in ('fabric', 'paramiko', 'iroh')])")
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out == f"{endpoint.agent_id} []\n" and host.logins == before + 2
    finally:
        os.kill(pid, signal.SIGTERM)


WAN = Path(__file__).parent / "wan"


@pytest.mark.skipif(not SSHD or os.getuid() != 0 or not shutil.which("ip") or not os.path.exists("/dev/net/tun"),
                    reason="needs root, iproute2 and /dev/net/tun for a network namespace")
def test_a_node_without_internet_gets_all_of_it_over_ssh(tmp_path, monkeypatch, packed_once):
    monkeypatch.setenv("XDG_CACHE_HOME", str(packed_once))
    name = f"gpurun{os.getpid()}"
    subprocess.run([WAN, "up", name, "--rtt", "20ms"], check=True, stdout=subprocess.DEVNULL)
    try:
        config = subprocess.check_output([WAN, "sshd", name, "2222", "--home", tmp_path / "home"], text=True).strip()
        monkeypatch.setenv("GPURUN_SSH_CONFIG", config)
        (link,) = json.loads(subprocess.check_output([WAN, "status", name, "--json"]))
        code = "import socket; socket.create_connection(('1.1.1.1', 53), 3)"
        assert subprocess.run([WAN, "exec", name, "--", sys.executable, "-c", code], capture_output=True).returncode == 1
        (node,) = provider.nodes(Cluster(kind="ssh", hosts=(parse_host("node"),)))
        endpoint = node.deploy(lambda _text: None, lambda *_: None)
        port = json.loads((tmp_path / "home/.gpurun/agent/endpoint.json").read_text())["port"]
        assert endpoint.addresses == (f"{link['node']}:{port}",)
    finally:
        subprocess.run([WAN, "down", "--kill", name], check=True, stdout=subprocess.DEVNULL)


# ---- providers -----------------------------------------------------------------------------------------------------------------------

def test_an_agent_with_a_new_identity_is_said_and_kept():
    (node,) = provider.nodes(Cluster(kind="ssh", hosts=(parse_host("me@gpu1"),)))
    said = []
    node.learned(GOOD, ("1.2.3.4:5", "1.2.3.4:5"), said.append)
    assert said == [] and node.cached_endpoint().addresses == ("1.2.3.4:5",)
    node.learned({**GOOD, "id": "cd" * 32, "note": "x"}, ("1.2.3.4:6",), said.append)
    assert "new identity, cdcdcdcdcd… and no longer ababababab…" in said[0] and node.cached_endpoint().agent_id == "cd" * 32
    assert node.cached_endpoint().note == "" and os.stat(node.cache_file()).st_mode & 0o777 == 0o600
    whole = json.loads(Path(node.cache_file()).read_bytes())
    damages = ({"agent_id": 5}, {"blocked": "yes"}, {"retry_at": "x"}, {"addresses": [1]}, {"relay_url": 3}, {"join": None}, {"socket": []})
    for broken in (b"", b"[]", b"{}", b'{"record": 99}', b'{"record": 1}', *(json.dumps({**whole, **damage}).encode() for damage in damages)):
        Path(node.cache_file()).write_bytes(broken)
        assert node.cached_endpoint() is None
    node.forget()
    node.forget()
    assert node.cached_endpoint() is None


def test_hosts_and_node_folders_have_an_endpoint_each():
    hosts = (parse_host("gpu1"), parse_host("gpu2"), parse_host("me@gpu1"))
    found = provider.nodes(Cluster(kind="ssh", hosts=hosts)) + provider.nodes(Cluster(kind="ssh", hosts=hosts[:1], node_dir="/data/g"))
    assert [node.name for node in found] == ["gpu1", "gpu2", "me@gpu1", "gpu1"] and len({node.cache_file() for node in found}) == 4


def test_this_machine_with_nothing_set_up(tmp_path):
    (node,) = provider.nodes(Cluster(node_dir=str(tmp_path / "node dir")))
    assert node.cached_endpoint() is None
    endpoint = node.deploy(pytest.fail, pytest.fail)
    pid = json.loads((tmp_path / "node dir/agent/endpoint.json").read_text())["pid"]
    try:
        assert node.cached_endpoint().agent_id == endpoint.agent_id == node.deploy(pytest.fail, pytest.fail).agent_id
        assert endpoint.addresses == node.cached_endpoint().addresses and endpoint.addresses[0].startswith("127.0.0.1:")
    finally:
        os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)
    assert node.cached_endpoint() is None   # no process, no endpoint: found without a timeout


def test_this_machine_with_a_python_that_is_not_there(tmp_path):
    (node,) = provider.nodes(Cluster(node_dir=str(tmp_path / "n"), python="/no/such/python"))
    with pytest.raises(DeployError, match="/no/such/python can't be started"):
        node.deploy(pytest.fail, pytest.fail)
    (node,) = provider.nodes(Cluster(node_dir="/dev/null/n"))
    with pytest.raises(DeployError, match="can't be written"):
        node.deploy(pytest.fail, pytest.fail)
