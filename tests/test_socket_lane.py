"""A socket of this machine as a lane: what it does when it is given up."""

from __future__ import annotations

import asyncio
import socket

from gpurun.lanes import SocketLane


def test_a_lane_that_is_given_up_while_it_writes_and_reads_ends_without_a_word():
    """Whoever waits in it is ended right after it is, as where a stream is given up with all of its lanes."""
    said = []

    async def give_up(ours, theirs):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        lane = SocketLane(ours)
        tasks = [asyncio.ensure_future(work) for work in (lane.write_all(bytes(32 << 20)), lane.read(1))]
        theirs.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"\0"     # it writes, and can't go on
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        await lane.reset(1)
        await lane.stop(1)
        for task in tasks:
            task.cancel()
        lane.close()
        await asyncio.wait(tasks)
        for _ in range(3):
            await asyncio.sleep(0)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.run(give_up(ours, theirs))
        assert said == [] and ours.fileno() == -1
