"""A TOML file that a user writes, read strictly: its values, the checks that they share, and errors that say where.

    Toml(path, what, needs, examples)   ConfigError when it can't be read or isn't TOML; `examples`: how a key's value is written
    shown(text), nearest(word, words)   for the text of an error

tomllib keeps no positions: `places_of` finds them again.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Mapping

from gpurun.errors import ConfigError

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

MAX_FILE_BYTES = 256 * 1024    # what is in a job file goes over the wire in lines of 1 MiB, where JSON may triple its length
MAX_DOTS = 100                 # of a key

_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", list: "an array", dict: "a table"}


class Toml:
    """One file: its values, the checks that they share, and errors that say where."""

    def __init__(self, path: str | os.PathLike[str], what: str, needs: str, examples: Mapping[str, str] = {}) -> None:
        self._examples = examples
        self.name = str(path) if str(path).isprintable() else shown(str(path))
        self.text = self._read(path, what)
        self._refuse_long_keys()
        try:
            self.data: dict[str, Any] = tomllib.loads(self.text)
        except RecursionError:
            raise self.error((), "is nested too deeply") from None
        except ValueError as error:  # TOMLDecodeError is one; a number of 5,000 digits is another
            raise self._syntax_error(str(error)) from None
        if not self.data:
            raise self.error((), f"is empty; a {what} has {needs}")

    def _read(self, path: str | os.PathLike[str], what: str) -> str:
        try:
            with open(path, "rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            raise self.error((), f"there is no such {what}; check the path") from None
        except IsADirectoryError:
            raise self.error((), f"is a folder; name the {what} in it") from None
        except (OSError, ValueError) as error:
            raise self.error((), f"can't be read as a {what}: {getattr(error, 'strerror', None) or 'not a path'}") from None
        if len(raw) > MAX_FILE_BYTES:
            raise self.error((), f"is longer than {MAX_FILE_BYTES:,} bytes, more than a {what} can have; put long text into another file")
        if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
            raise self.error((), "starts with a byte order mark; save it as UTF-8 without one (without BOM)")
        try:
            return raw.decode().replace("\r\n", "\n")  # as TOML reads it, so that lines and columns are those of its errors
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{self.name}:{line}: is not UTF-8 (byte {error.start + 1}); save it as UTF-8") from None

    def _refuse_long_keys(self) -> None:
        """A key of many dotted parts costs tomllib their number squared: 60,000 of them half a minute."""
        if self.text.count(".") <= MAX_DOTS:
            return
        dots, in_key = 0, True
        for match in re.finditer(_KEY_TOKEN, self.text, re.DOTALL):
            if match[0] in ("\n", ",", "[", "{"):
                dots, in_key = 0, True
            elif match[0] == "=":
                in_key = False
            elif match[0] == "." and in_key:
                dots += 1
                if dots > MAX_DOTS:
                    line = self.text.count("\n", 0, match.start()) + 1
                    raise ConfigError(f"{self.name}:{line}: is nested too deeply: a key of more than {MAX_DOTS} parts")

    def _syntax_error(self, message: str) -> ConfigError:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.DOTALL)
        if not match:
            return self.error((), f"is not valid TOML: {message}")
        lines = self.text.split("\n")
        line, column = (int(match[2]), int(match[3])) if match[2] else (len(lines), len(lines[-1]) + 1)
        quotes = " (text needs quotes)" if match[1] == "Invalid value" else ""
        return ConfigError(f"{self.name}:{line}:{column}: is not valid TOML: {match[1]}{quotes}")

    def error(self, path: tuple, message: str) -> ConfigError:
        places = places_of(self.text) if path else {}
        known = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in places), None)
        where = self.name
        if known:
            offset = places[known]
            where += f":{self.text.count(chr(10), 0, offset) + 1}:{offset - self.text.rfind(chr(10), 0, offset)}"
        return ConfigError(": ".join([where] + ([dotted_key(path)] if path else []) + [message]))

    def unknown(self, path: tuple, keys: tuple[str, ...], also: str = "") -> ConfigError:
        hint = f" {also};" if also else nearest(path[-1], keys)
        return self.error(path, f"is not a key here;{hint} the keys here are {', '.join(keys)}")

    def want(self, value: Any, kind: type, path: tuple) -> Any:
        if type(value) is not kind:
            like = f"; write it like {path[-1]} = {self._examples[path[-1]]}" if path[-1] in self._examples else ""
            raise self.error(path, f"must be {_WORDS[kind]}, but is {_WORDS.get(type(value), 'a date or time')}{like}")
        if kind is str and "\0" in value:
            raise self.error(path, "has a NUL character, which no command, path or variable can have; take it out")
        return value

    def table(self, value: Any, path: tuple, keys: tuple[str, ...], needed: tuple[str, ...] = ()) -> dict[str, Any]:
        for key in self.want(value, dict, path) if path else value:
            if key not in keys:
                raise self.unknown(path + (key,), keys)
        for key in needed:
            if key not in value:
                raise self.error(path + (key,), f"is missing; the keys here are {', '.join(keys)}")
        return value

    def texts(self, value: Any, path: tuple) -> tuple[str, ...]:
        return tuple(self.want(item, str, path + (index,)) for index, item in enumerate(self.want(value, list, path)))


_TOKEN = (r'"""(?:\\.|[^\\])*?"""(?:"{0,2})' r"|'''.*?'''(?:'{0,2})" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'"
                    r"|\#[^\n]*|[^\s\[\]{}=,.\"'\#]+|[\[\]{}=,.\n]")
# What ends, begins or is part of a key, and what may hide it. Each alternative takes what isn't closed too: no text makes it look twice.
_KEY_TOKEN = (r'"""(?:\\.|[^\\])*?(?:"""|\\?\Z)"{0,2}' r"|'''.*?(?:'''|\Z)'{0,2}" r'|"(?:\\[^\n]|[^"\\\n])*"?' r"|'[^'\n]*'?|\#[^\n]*|[\n,\[{=.]")
DEPTH = 6  # deeper than any key that is checked; a dotted key may be long, and its prefixes longer


def places_of(text: str) -> dict[tuple, int]:
    """{path of a key or an array's item: offset of its first mention} in a text that tomllib has taken; {} when it gets lost.

    tomllib keeps no positions, and a search for `key =` by lines finds it in comments, strings and other tables too.
    """
    tokens = [(match[0], match.start()) for match in re.finditer(_TOKEN, text, re.DOTALL) if match[0][0] != "#"] + [("\n", len(text))]
    places: dict[tuple, int] = {}
    at = 0

    def see(path: tuple, offset: int) -> tuple:
        for length in range(1, min(len(path), DEPTH) + 1):
            places.setdefault(path[:length], offset)
        return path

    def dotted() -> list[str]:
        nonlocal at
        parts: list[str] = []
        while not parts or tokens[at][0] == ".":
            at += bool(parts)
            word = tokens[at][0]
            parts.append(tomllib.loads(f"k = {word}")["k"] if word[0] in "\"'" else word)
            at += 1
        return parts

    def pair(table: tuple) -> None:
        nonlocal at
        offset = tokens[at][1]
        path = see(table + tuple(dotted()), offset)
        at += 1  # the =
        value(path)

    def value(path: tuple) -> None:
        nonlocal at
        word, index = tokens[at][0], 0
        at += 1
        if word in ("[", "{"):
            while tokens[at][0] not in ("]", "}"):
                if tokens[at][0] in ("\n", ","):
                    at += 1
                elif word == "{":
                    pair(path)
                else:
                    value(see(path + (index,), tokens[at][1]))
                    index += 1
            at += 1
        elif word[0] not in "\"'":
            while tokens[at][0] not in ("\n", ",", "]", "}"):
                at += 1

    table: tuple = ()
    counts: dict[tuple, int] = {}
    try:
        while at < len(tokens):
            word, offset = tokens[at]
            if word == "\n":
                at += 1
            elif word != "[":
                pair(table)
            else:
                doubled = tokens[at + 1] == ("[", offset + 1)
                at += 1 + doubled
                table = ()
                for part in dotted():  # below [[x]], [x.y] and [[x.y]] go on in its last item
                    table += (part,) if table not in counts else (counts[table] - 1, part)
                if doubled:
                    see(table, offset)
                    counts[table] = counts.get(table, 0) + 1
                    table += (counts[table] - 1,)
                see(table, offset)
                at += 1 + doubled
    except (IndexError, RecursionError, ValueError):
        return {}
    return places


def dotted_key(path: tuple) -> str:
    """job.workspace.exclude[2]; a key that isn't a bare one in quotes, so that no control character reaches a terminal."""
    text = ""
    for part in path:
        bare = isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part)
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if bare else f".{json.dumps(part[:64])}"
    return text[1:]


def shown(text: str) -> str:
    return json.dumps(text if len(text) <= 100 else text[:100] + "...", ensure_ascii=not text.isprintable())


def nearest(word: str, words: tuple[str, ...]) -> str:
    import difflib

    close = difflib.get_close_matches(word.lower(), words, 1)
    return f" did you mean `{close[0]}`?" if close else ""
