"""What the tests of rented machines share: a machine that is up, a run that is at work, and the end of both."""

from __future__ import annotations

from typing import Any, Iterator

import pytest
import requests
from conftest import eventually
from renter import Renter
from running import Running, end_all

AT_WORK = "echo kept > out.txt; echo at-work; sleep 120"


def until_go(renter: Renter) -> str:
    """Shell that waits for `go(renter)`: a machine sees the files of this one."""
    return f"until [ -e {renter.folder}/go ]; do sleep 0.05; done"


def go(renter: Renter) -> None:
    (renter.folder / "go").touch()


@pytest.fixture(autouse=True)
def none_goes_on() -> Iterator[None]:
    """A test that fails half-way leaves no gpurun."""
    yield
    end_all()


def upped(renter: Renter, *args: Any, **options: Any) -> list[Any]:
    """The machines that are there after `gpurun up`."""
    done = renter.gpurun("up", *args, **options)
    assert done.returncode == 0, done.stderr.decode()
    return renter.server.alive()


def downed(renter: Renter, *args: Any) -> str:
    """What `gpurun down` said, after which nothing is left."""
    done = renter.gpurun("down", *args)
    assert done.returncode == 0, done.stderr.decode()
    renter.ended()
    return done.stderr.decode()


def at_work(renter: Renter, *args: Any, run: str = AT_WORK, **options: Any) -> Running:
    """`--up --down` whose job is at it."""
    running = Running(renter, renter.job(run, outputs=["out.txt"]), "--up", "--down", *args, **options)
    eventually(lambda: any("at-work" in line for line in running.printed) or running.process.poll() is not None, 60)
    assert running.process.poll() is None, running.err
    return running


def call(renter: Renter, method: str, path: str, **body: Any) -> Any:
    """A request by somebody else with the account's key."""
    answer = requests.request(method, renter.server.url + path, json=body, headers={"Authorization": f"Bearer {renter.server.key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def destroyed_by_hand(renter: Renter, one: Any) -> None:
    call(renter, "DELETE", f"/api/v0/instances/{one.id}/")
