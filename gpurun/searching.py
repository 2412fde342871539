"""A pattern of the user's, searched for in lines by a process of its own. On some lines a pattern like `(a+)+$` takes longer than the world lasts, and
Python's `re` lets nothing else in its process run meanwhile: in the agent that would be every run of the node.

The process is a Python with the few lines of SEARCHER, started when there is something to search. It gets the pattern and then lists of lines, JSON
line by line, and answers each with what it found first: [number of the line, start, end], null, or "late". It ends with its stdin, so with the agent.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from typing import Any, Optional, Sequence, Tuple

SEARCH_S = 2.0                # of CPU, for a list of lines. One of 16 KiB takes a pattern as plain as `(?i).*error` 0.3 s
ANSWER_S = 60.0               # for its answer: on a machine that is out of breath those take longer

# The engine looks for signals between its steps, and a handler may end a search with an exception; only in a process's main thread, though.
SEARCHER = f"""
import json, re, signal, sys

def late(*_):
    raise TimeoutError

signal.signal(signal.SIGVTALRM, late)
pattern = re.compile(json.loads(sys.stdin.readline()))
for lines in sys.stdin:
    found = None
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, {SEARCH_S})
        try:
            for number, line in enumerate(json.loads(lines)):
                match = pattern.search(line)
                if match is not None:
                    found = [number, match.start(), match.end()]
                    break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeoutError:
        found = "late"
    print(json.dumps(found), flush=True)
"""


class Search:
    """Not for two threads at once."""

    def __init__(self, pattern: str) -> None:
        """ValueError where it is no pattern."""
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no regular expression: {error}") from None
        self.pattern = pattern
        self.given_up = ""        # why nothing is searched any more
        self._process: Optional["subprocess.Popen[bytes]"] = None

    def first(self, lines: Sequence[str]) -> Optional[Tuple[int, int, int]]:
        """The first line that it is found in: its number, and where it begins and ends there. None where it is in none, or was given up."""
        if self.given_up or not lines:
            return None
        try:
            found = self._ask(lines)
        except (OSError, ValueError) as error:
            self._give_up(f"its search failed ({error})")
            return None
        if found == "late":
            self._give_up(f"on a line of the log its search took longer than {SEARCH_S:g} s")
            return None
        return (found[0], found[1], found[2]) if found else None

    def _ask(self, lines: Sequence[str]) -> Any:
        if self._process is None:
            self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", SEARCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, start_new_session=True, close_fds=True)
            self._say(self.pattern)
        self._say(lines)
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise OSError(f"no answer for {ANSWER_S:g} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise OSError("its process was ended")
        return json.loads(answer.decode("ascii"))

    def _say(self, what: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode("ascii") + b"\n")
        self._process.stdin.flush()

    def _give_up(self, why: str) -> None:
        self.close()
        self.given_up = why

    def close(self) -> None:
        """Nothing more is searched."""
        self.given_up = self.given_up or "it is over"
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
