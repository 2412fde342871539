"""The account's key and those of the containers: in no record, log, error or command line, and with nobody but the provider itself."""

from __future__ import annotations

import pathlib
import secrets
import threading

import pytest
from renter import renter   # noqa: F401
from vast_rows import offer


# ---- what may not be anywhere -------------------------------------------------------------------------------------------------------

def test_the_keys_are_in_no_record_log_error_or_command_line(renter):
    renter.server.key = renter.env["VAST_API_KEY"] = secrets.token_hex(32)      # other tests run beside this one
    renter.server._next_id = secrets.randbelow(10 ** 8) + 10 ** 8
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    pass

    watcher = threading.Thread(target=look)
    watcher.start()
    renter.server.fault("destroy", "401", times=2)
    renter.server.fault("list", "dropped", nth=4)
    said = []
    for args in (("--up", "--down"), ("--up", "--down", "--json")):
        done = renter.gpurun(renter.job("echo kept > out.txt; exit 3", outputs=["out.txt"]), *args)
        said += [done.stdout, done.stderr]
    for command in (["offers"], ["up"], ["nodes"], ["doctor"], ["status"], ["down"]):
        done = renter.gpurun(*command)
        said += [done.stdout, done.stderr]
    over.set()
    watcher.join()
    renter.ended()
    keys = [renter.server.key, *(one.api_key for one in renter.server.instances.values())]
    texts = {str(path): path.read_bytes() for path in renter.folder.rglob("*") if path.is_file() and not path.is_symlink()}
    texts.update({f"said {number}": text for number, text in enumerate(said)}, argv="\n".join(seen).encode())
    assert any("gpurun" in line for line in seen)
    for key in keys:
        assert [name for name, text in texts.items() if key.encode() in text] == []
    assert renter.server.leaks() == []


@pytest.mark.parametrize("url", ["https://127.0.0.1:{port}", "http://127.0.0.1:1"], ids=["no TLS there", "nobody there"])
def test_an_error_of_the_connection_shows_no_key(renter, url):
    renter.env["VAST_URL"] = url.format(port=renter.server.port)
    done = renter.gpurun("up", pace="patience_s=1 timeout_s=1 asking=0.1", timeout=100)
    assert done.returncode == 125 and renter.server.key not in done.stderr.decode(), done.stderr.decode()


def test_two_factor_login_and_a_wrong_key_are_explained_before_anything_is_rented(renter):
    renter.server.fault("user list ssh_list ssh_create create show", "401_2fa", times=10 ** 6)
    done = renter.gpurun(renter.job("true"), "--up", "--down")
    assert done.returncode == 125 and "two-factor" in done.stderr.decode(), done.stderr.decode()
    renter.server._faults.clear()
    renter.env["VAST_API_KEY"] = "x" * 64
    done = renter.gpurun("up")
    assert done.returncode == 125 and "the key from $VAST_API_KEY (" in done.stderr.decode() and "xxxx" not in done.stderr.decode(), done.stderr.decode()
    assert renter.server.calls("create") == []


@pytest.mark.parametrize("endpoint", ["create", "destroy", "list", "user"])
def test_an_answer_from_elsewhere_gets_no_key_and_leaves_no_machine(renter, endpoint):
    renter.server.fault(endpoint, "redirect308")
    renter.gpurun(renter.job("true"), "--up", "--down")
    assert renter.server.leaks() == []
    renter.ended()


def test_none_that_matches_and_none_that_is_free_are_two_things(renter):
    renter.server.offers[:] = [offer(gpu_name="RTX 4090", dph_base=3.0)]
    dear = renter.gpurun("up").stderr.decode()
    renter.server.offers[:] = []
    none = renter.gpurun("up").stderr.decode()
    assert "price" in dear and "right now" in none and dear != none, (dear, none)
