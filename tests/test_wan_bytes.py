"""What goes over a link of 50 ms, counted at its device: text goes packed, only what is new of a workspace and of a log goes at all."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import Here, eventually
from links import Wan, linked, needs_a_network, use

pytestmark = needs_a_network

LINES = b"".join(b"step %d: loss %f\n" % (step, random.Random(step).random()) for step in range(150_000))      # 3.6 MB
OVERHEAD = 150_000          # handshakes, acknowledgements, samples: what a run costs besides, and is never near the bytes that this counts


class Counted:
    """An operator at the near end of a link, and the bytes that his commands send over it, both ways."""

    def __init__(self, link: Wan) -> None:
        self.here: Here = link.operator("here")
        use(self.here, "~/.gpurun")
        number = re.search(r"HostName 10\.77\.(\d+)\.2", Path(link.config).read_text())
        assert number is not None
        self._device = Path(f"/sys/class/net/wan{number[1]}/statistics")

    def gpurun(self, *args: Any) -> tuple[int, int]:
        """Bytes to the node and from it."""
        before = self._counts()
        done = self.here.gpurun(*args)
        assert done.returncode == 0, done.stderr.decode()
        after = self._counts()
        return after[0] - before[0], after[1] - before[1]

    def _counts(self) -> tuple[int, int]:
        there, back = (int((self._device / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
        return there, back


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    with linked(tmp_path_factory.mktemp("bytes"), "y", rate="100mbit") as link:
        made = Counted(link)
        made.gpurun(made.here.job("true", name="first", workspace={"workdir": empty(made.here)}))
        yield made


def empty(here: Here) -> str:
    (here.folder / "empty").mkdir(exist_ok=True)
    return "../empty"


def test_a_text_workspace_and_its_outputs_take_less_than_half_of_their_bytes(counted: Counted) -> None:
    tree = counted.here.folder / "text"
    tree.mkdir()
    (tree / "log").write_bytes(LINES)
    there, back = counted.gpurun(counted.here.job("cp log out", name="text", workspace={"workdir": f"../{tree.name}"}, outputs=["out"]))
    assert len(LINES) / 10 < there < len(LINES) / 2 + OVERHEAD and len(LINES) / 10 < back < len(LINES) / 2 + OVERHEAD
    assert (counted.here.latest / "outputs" / "out").read_bytes() == LINES
    (tree / "new").write_bytes(b"new")
    there, back = counted.gpurun(counted.here.job("cat new", name="text", workspace={"workdir": f"../{tree.name}"}))
    assert there < OVERHEAD and back < OVERHEAD


def test_what_does_not_shrink_goes_once_and_as_it_is(counted: Counted) -> None:
    tree, noise = counted.here.folder / "noise", random.Random(1).randbytes(1 << 20)
    tree.mkdir()
    (tree / "noise").write_bytes(noise)
    there, _ = counted.gpurun(counted.here.job("true", name="noise", workspace={"workdir": f"../{tree.name}"}))
    assert len(noise) < there < 1.15 * len(noise) + OVERHEAD


def test_of_a_log_that_grows_each_fetch_brings_what_is_new(counted: Counted) -> None:
    here = counted.here
    counted.gpurun("submit", here.job("head -c 1000000 /dev/urandom > log; touch up; while [ ! -e go ]; do sleep 0.05; done; head -c 1000 /dev/urandom >> log",
                                      name="grow", workspace={"workdir": empty(here)}, outputs=["log"]))
    run_id = here.latest.name
    work = here.folder.parent / "home" / ".gpurun" / "runs" / run_id / "work"
    eventually((work / "up").exists, 60)
    _, back = counted.gpurun("fetch", run_id)
    assert back > 1_000_000
    (work / "go").touch()
    eventually(lambda: (work / "log").stat().st_size == 1_001_000, 60)
    _, back = counted.gpurun("fetch", run_id)
    assert back < OVERHEAD and (here.runs / run_id / "outputs" / "log").read_bytes() == (work / "log").read_bytes()
