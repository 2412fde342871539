"""The two files that a user writes, read strictly: the job file (what to do) and the cluster file (where).

    load_job(path, environ) -> Job                                     [job], and [external_job] kept as it is
    find_cluster(option, job_folder, environ, home) -> path or None    --cluster, $GPURUN_CLUSTER, beside the job, ~/.config/gpurun, none
    load_cluster(path or None) -> Cluster                              None: this machine
    pick_host(cluster, name) -> Host or None                           what --node names

Whatever is in a file, the answer is one of these or a ConfigError with file, line and column (where TOML gives them), the key's
path, the valid keys and the nearest one. A value of `env` is in no error text and in no repr.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Mapping, NamedTuple

from gpurun.errors import ConfigError

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

MAX_FILE_BYTES = 256 * 1024    # what is in a job file goes over the wire in lines of 1 MiB, where JSON may triple its length
MAX_TEXT_BYTES = 128 * 1024 - 1  # Linux: the longest single argument (bash -c TEXT) or variable (KEY=value) of a program
MAX_PLAN_BYTES = 900_000       # setup, run and env together, as JSON, in such a line; only ${NAME} can make them longer than the file
MAX_DOTS = 100                 # of a key
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4096

JOB_KEYS = ("name", "run", "setup", "workspace", "outputs", "env")
WORKSPACE_KEYS = ("workdir", "exclude")
HARDWARE_KEYS = ("gpu", "gpus", "resources", "provider", "image", "nodes", "instance", "accelerators")
KINDS = ("local", "ssh", "vastai", "slurm")
KINDS_DONE = ("local", "ssh")
PROVIDER_KEYS = ("kind", "hosts", "relay", "udp_port", "python", "node_dir", "lost_after_s")
CLUSTER_FILE = "cluster.toml"

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", list: "an array", dict: "a table"}
_EXAMPLES = {"workspace": '{ workdir = "." }', "outputs": '["metrics.json"]', "env": '{ KEY = "value" }',
             "exclude": '["/data", "*.tmp"]', "run": '"python train.py"', "hosts": '[{ host = "gpu1" }]', "relay": '"disabled"'}
_HINTS = {"workdir": 'it belongs in `workspace = { workdir = "." }`', "exclude": 'it belongs in `workspace = { workdir = ".", exclude = [] }`',
          "command": "did you mean `run`?", "cmd": "did you mean `run`?"}


class Job(NamedTuple):
    """A job file, checked. Paths are absolute; `workdir` None: no workspace goes. `outputs` are normalised: no `./`, no trailing `/`, none within another."""

    path: str
    folder: str
    name: str
    run: str
    setup: str = ""
    workdir: str | None = None
    exclude: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    env: dict[str, str] = {}
    external_job: dict[str, Any] | None = None   # as it is in the file; nothing in it is checked here

    def __repr__(self) -> str:
        """Without the values of `env`."""
        return f"Job({self.name!r}, {self.path!r})"


class Host(NamedTuple):
    """`text` as in the cluster file; `user` "" and `port` 0 are left to the ssh configuration. `hostname` may be an alias of it."""

    text: str
    user: str = ""
    hostname: str = ""
    port: int = 0


class Cluster(NamedTuple):
    """A cluster file, checked. `relay`: "disabled", "n0" or URLs. `udp_port` 0: any. `python` "": what the probe finds."""

    path: str | None = None
    kind: str = "local"
    hosts: tuple[Host, ...] = ()
    relay: str | tuple[str, ...] = "disabled"
    udp_port: int = 0
    python: str = ""
    node_dir: str = "~/.gpurun"
    lost_after_s: float = 300


# ---- the job file ------------------------------------------------------------------------------------------------------------

def load_job(path: str | os.PathLike[str], environ: Mapping[str, str]) -> Job:
    """`environ` is the operator's, for `${NAME}` in `env`. The job's folder is where the path as given lies, links not followed."""
    file = _Toml(path, "job file", "a table [job] with at least `name` and `run`")
    for key in file.data:
        if key not in ("job", "external_job"):
            raise _unknown_in_job(file, (key,), ("job", "external_job"), also="put it below [job]" if key in JOB_KEYS else "")
    if "job" not in file.data:
        raise file.error((), "has no table [job]; a job file needs one with at least `name` and `run`")
    job = file.want(file.data["job"], dict, ("job",))
    for key in job:
        if key not in JOB_KEYS:
            raise _unknown_in_job(file, ("job", key), JOB_KEYS, also=_HINTS.get(key, ""))
    file.table(job, ("job",), JOB_KEYS, needed=("name", "run"))

    name = file.want(job["name"], str, ("job", "name"))
    if not _JOB_NAME.fullmatch(name):
        raise file.error(("job", "name"), f"{_shown(name)} can't be a name: 1 to 64 of A-Z a-z 0-9 . _ - and first a letter or digit")
    run = _command(file, job["run"], ("job", "run"))
    if not run.strip():
        raise file.error(("job", "run"), "is blank; it is the command that does the work, text for `bash -c`")
    setup = _command(file, job.get("setup", ""), ("job", "setup"))
    path = _absolute(path)
    workdir, exclude = _workspace(file, job["workspace"], os.path.dirname(path)) if "workspace" in job else (None, ())
    env = _env(file, job["env"], environ) if "env" in job else {}
    external = file.want(file.data["external_job"], dict, ("external_job",)) if "external_job" in file.data else None
    setup = setup if setup.strip() else ""
    if len(json.dumps([setup, run, env])) > MAX_PLAN_BYTES:
        raise file.error(("job",), f"setup, run and env are longer than {MAX_PLAN_BYTES:,} bytes together; put long text into a file")
    return Job(path, os.path.dirname(path), name, run, setup, workdir, exclude, _outputs(file, job.get("outputs", [])), env, external)


def error_at(path: str | os.PathLike[str], key: tuple, message: str) -> ConfigError:
    """An error about a key of a job file that was loaded, with its place; for what is found out later than in here."""
    return _Toml(path, "job file", "a table [job]").error(key, message)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Not os.path.abspath: what `link/..` means isn't for us to guess."""
    whole = os.path.join(os.getcwd(), os.fspath(path))
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))


def _unknown_in_job(file: _Toml, path: tuple, keys: tuple[str, ...], also: str) -> ConfigError:
    if path[-1].lower() in HARDWARE_KEYS:
        return file.error(path, "a job says what to do, never on what hardware: that belongs in the cluster file "
                                f"(--cluster FILE, or {CLUSTER_FILE} beside the job). The keys here are {', '.join(keys)}")
    return file.unknown(path, keys, also)


def _command(file: _Toml, value: Any, path: tuple) -> str:
    text = file.want(value, str, path).replace("\r\n", "\n")
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise file.error(path, f"is longer than the {MAX_TEXT_BYTES:,} bytes that Linux takes for `bash -c`; "
                               "put it into a script in the workspace")
    return text


def _workspace(file: _Toml, value: Any, folder: str) -> tuple[str, tuple[str, ...]]:
    path = ("job", "workspace", "workdir")
    table = file.table(value, path[:2], WORKSPACE_KEYS, needed=("workdir",))
    name = file.want(table["workdir"], str, path)
    if not name.strip():
        raise file.error(path, 'is blank; "." is the folder of the job file')
    if name.startswith(("/", "~")):
        raise file.error(path, f'{_shown(name)} is not relative to the folder of the job file; '
                               'write it like "." or "../project" ("./~x" is a name with ~)')
    workdir = os.path.join(folder, *(part for part in name.split("/") if part not in ("", ".")))
    try:
        if ".." in workdir.split("/"):                   # behind a link that isn't the folder above it by name
            workdir = os.path.realpath(workdir, strict=True) if os.path.lexists(workdir) else workdir
        found = os.path.isdir(workdir)
        exists = found or os.path.lexists(workdir)
    except (OSError, ValueError, RuntimeError):  # too long, not a name of this system, links in a circle
        found = exists = False
    if not found:
        raise file.error(path, f"{_shown(workdir)} {'is not a folder' if exists else 'does not exist'}; "
                               "it is relative to the folder of the job file")
    exclude = file.texts(table.get("exclude", []), path[:2] + ("exclude",))
    for index, pattern in enumerate(exclude):
        if "\n" in pattern:
            raise file.error(path[:2] + ("exclude", index), "has a line break; one pattern is one item of the array")
    return workdir, exclude


def _outputs(file: _Toml, value: Any) -> tuple[str, ...]:
    """Normalised, in the order of the file, without those that another one brings along."""
    names = []
    for index, text in enumerate(file.texts(value, ("job", "outputs"))):
        parts = [part for part in text.split("/") if part not in ("", ".")]
        wrong = ("is blank" if not text.strip() else
                 "is an absolute path" if text.startswith("/") else
                 "starts with ~, which isn't expanded (./~x is a name with ~)" if text.startswith("~") else
                 "leads out of the workdir by `..`" if ".." in parts else
                 "is the whole workdir, the workspace included" if not parts else
                 "is too long" if len(text.encode()) > MAX_PATH_BYTES or max(len(part.encode()) for part in parts) > MAX_NAME_BYTES else "")
        if wrong:
            raise file.error(("job", "outputs", index), f"{_shown(text)} {wrong}; name a file or folder relative to the job's workdir")
        names.append("/".join(parts))
    whole = set(names)
    inner = {name for name in names if any(name[:at] in whole for at, letter in enumerate(name) if letter == "/")}
    return tuple(name for name in dict.fromkeys(names) if name not in inner)


def _env(file: _Toml, value: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """No error in here may show a value, or a piece of one."""
    env = {}
    for key, text in file.want(value, dict, ("job", "env")).items():
        path = ("job", "env", key)
        if not _ENV_KEY.fullmatch(key):
            raise file.error(path, "can't be a variable's name: letters, digits and _, first no digit")
        if key.startswith("GPURUN_"):
            raise file.error(path, "names that start with GPURUN_ are gpurun's own; take another one")

        def operators(match: re.Match) -> str:
            if match[0] == "$${":
                return "${"
            if match[1] is None:
                raise file.error(path, "has a `${` that doesn't begin a `${NAME}`; `$${` is a literal `${`")
            if match[1] not in environ:
                raise file.error(path, f"takes ${match[1]} from your environment, where it is not set; set it (`$${{` is a literal `${{`)")
            return environ[match[1]]

        env[key] = _VARIABLE.sub(operators, file.want(text, str, path))
        if "\0" in env[key] or len(f"{key}={env[key]}".encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            raise file.error(path, f"has a NUL character, or is longer than the {MAX_TEXT_BYTES:,} bytes that Linux takes for one variable")
    return env


# ---- the cluster file ----------------------------------------------------------------------------------------------------------

def find_cluster(option: str | None, job_folder: str, environ: Mapping[str, str], home: str | None) -> str | None:
    """The first there is; None is this machine. What a user named must exist: it is never passed over for the next one."""
    if option == "":
        raise ConfigError("--cluster is empty; name a cluster file, or leave the option out")
    for named, by in ((option, "--cluster"), (environ.get("GPURUN_CLUSTER"), "$GPURUN_CLUSTER")):
        if named:  # a variable that is set but empty counts as not set
            path = os.path.join(home, named[2:]) if home and named.startswith("~/") else named
            if not os.path.lexists(path):
                raise ConfigError(f"{by} names the cluster file {_shown(named)}, which does not exist; correct the path, or leave {by} out")
            return path
    for folder in (job_folder, _settings(environ, home)):
        if folder and os.path.lexists(os.path.join(folder, CLUSTER_FILE)):
            return os.path.join(folder, CLUSTER_FILE)
    return None


def _settings(environ: Mapping[str, str], home: str | None) -> str | None:
    """Where `paths.config_dir` is, not made: looking for a cluster file leaves nothing behind."""
    xdg = environ.get("XDG_CONFIG_HOME") or ""
    if environ.get("GPURUN_CONFIG"):
        return environ["GPURUN_CONFIG"]
    return os.path.join(xdg, "gpurun") if os.path.isabs(xdg) else home and os.path.join(home, ".config/gpurun")


def load_cluster(path: str | os.PathLike[str] | None) -> Cluster:
    if path is None:
        return Cluster()
    file = _Toml(path, "cluster file", 'a table [provider] with `kind = "local"` or `kind = "ssh"`')
    if "job" in file.data:
        raise file.error(("job",), "this is a job file; a cluster file has a table [provider]")
    file.table(file.data, (), ("provider",), needed=("provider",))
    table = file.want(file.data["provider"], dict, ("provider",))
    if "kind" not in table:
        raise file.error(("provider", "kind"), f"is missing; it is one of {', '.join(KINDS)}")
    kind = file.want(table["kind"], str, ("provider", "kind"))
    if kind not in KINDS:
        raise file.error(("provider", "kind"), f"{_shown(kind)} is not a kind;{_nearest(kind, KINDS)} the kinds are {', '.join(KINDS)}")
    if kind not in KINDS_DONE:
        raise file.error(("provider", "kind"), f'"{kind}" is not in this version yet; the kinds that work are {" and ".join(KINDS_DONE)}')
    if kind == "local" and "hosts" in table:
        raise file.error(("provider", "hosts"), 'kind "local" is this machine and takes no hosts; kind "ssh" does')
    file.table(table, ("provider",), PROVIDER_KEYS if kind == "ssh" else tuple(key for key in PROVIDER_KEYS if key != "hosts"))

    options: dict[str, Any] = {}
    for key, check in (("relay", _relay), ("udp_port", _udp_port), ("python", _python), ("node_dir", _node_dir),
                       ("lost_after_s", _lost_after_s)):
        if key in table:
            options[key] = check(file, table[key], ("provider", key))
    return Cluster(path=_absolute(path), kind=kind, hosts=_hosts(file, table) if kind == "ssh" else (), **options)


def pick_host(cluster: Cluster, name: str | None) -> Host | None:
    """The host that `name` means: its text in the cluster file, or its hostname where only one has that. No name: the first host.

    None: this machine, for a cluster of kind local (which also answers to the name "local").
    """
    if cluster.kind == "local" and name in (None, "", "local"):
        return None
    if cluster.hosts and not name:
        return cluster.hosts[0]
    exact = [host for host in cluster.hosts if host.text == name]
    close = exact or [host for host in cluster.hosts if host.hostname == name]
    if len(close) == 1:
        return close[0]
    names = tuple(host.text for host in cluster.hosts) or ("local",)
    wrong = "is more than one node" if close else "is not a node"
    raise ConfigError(f"--node {_shown(str(name))} {wrong} of {cluster.path or 'this machine'};"
                      f"{_nearest(str(name), names)} the nodes are {', '.join(names)}")


def _hosts(file: _Toml, table: dict) -> tuple[Host, ...]:
    path = ("provider", "hosts")
    hosts: dict[tuple, Host] = {}
    for index, item in enumerate(file.want(table.get("hosts", []), list, path)):
        here = path + (index, "host")
        text = file.want(file.table(item, path + (index,), ("host",), needed=("host",))["host"], str, here)
        try:
            host = parse_host(text)
        except ValueError as error:
            raise file.error(here, f"{_shown(text)} {error}") from None
        if hosts.setdefault((host.user, host.hostname.lower(), host.port), host) is not host:
            raise file.error(here, f"{_shown(text)} is there twice; a node is listed once")
    if not hosts:
        raise file.error(path, 'kind "ssh" needs at least one host: [[provider.hosts]] with host = "gpu1" or "user@host:port"')
    return tuple(hosts.values())


def parse_host(text: str) -> Host:
    """`host`, `user@host:port`, `[IPv6]:port`. ValueError says what is wrong: what passes may stand on ssh's command line.

    Refused are the characters that OpenSSH (9.6 and newer) refuses itself, since a ProxyCommand takes them to a shell.
    """
    form = 'write "gpu1", "user@host:port" or "user@[IPv6]:port"'
    user, at, rest = text.rpartition("@")
    match = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?", rest)
    if not match:
        raise ValueError(f"is not a host: an IPv6 address stands in brackets; {form}" if rest.count(":") > 1 else f"is not a host; {form}")
    hostname, port = match[1], int(match[2] or 0)
    if hostname.startswith("["):
        import ipaddress  # in here, as urlsplit below: few need them, and each takes milliseconds of every start

        hostname = hostname[1:-1]
        try:
            ipaddress.IPv6Address(hostname)
        except ValueError:
            raise ValueError(f"has brackets around what is no IPv6 address; {form}") from None
    for part, bad in ((user, "'`\"$;&<>|(){}:/"), (hostname, "'`\"$\\;&<>|(){}/,")):  # DOMAIN\name is a user
        if part.startswith("-") or part.endswith("\\") or any(letter in bad or letter.isspace() or not letter.isprintable() for letter in part):
            raise ValueError(f"has a character that ssh doesn't take there, or a part that starts with `-`; {form}")
    if (at and not user) or (match[2] and not 1 <= port <= 65535):
        raise ValueError(f"has an empty user or a port that is not in 1 to 65535; {form}")
    return Host(text, user, hostname, port)


def _relay(file: _Toml, value: Any, path: tuple) -> str | tuple[str, ...]:
    if value in ("disabled", "n0"):
        return value
    if type(value) is not list or not value:
        raise file.error(path, 'must be "disabled", "n0" (the public relays of iroh\'s makers) or an array of https URLs')
    from urllib.parse import urlsplit

    for index, url in enumerate(file.texts(value, path)):
        try:
            parts = urlsplit(url)
            good = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        except ValueError:
            good = False
        if not good or not url.isprintable() or " " in url:
            raise file.error(path + (index,), "must be the https URL of a relay, like https://relay.example.org")
    return tuple(value)


def _udp_port(file: _Toml, value: Any, path: tuple) -> int:
    if not 0 <= file.want(value, int, path) <= 65535:
        raise file.error(path, "must be a port from 1 to 65535, or 0 for any")
    return value


def _python(file: _Toml, value: Any, path: tuple) -> str:
    """A command on the node's PATH, or a path from / or ~/ ; bootstrap.py expands the ~ there."""
    text = file.want(value, str, path)
    if _CONTROL.search(text) or not (text.startswith(("/", "~/")) or text and "/" not in text and text[0] not in "-~ "):
        raise file.error(path, 'must be a Python of the node: "python3.11", or a path that starts with / or ~/')
    return text


def _node_dir(file: _Toml, value: Any, path: tuple) -> str:
    text = file.want(value, str, path)
    parts = [part for part in text.split("/")[1:] if part not in ("", ".")]
    if _CONTROL.search(text) or not text.startswith(("/", "~/")) or not parts or ".." in parts:
        raise file.error(path, "must be a folder of gpurun's own on the node, from / or ~/ and without `..`, like ~/.gpurun")
    return "/".join([text.split("/")[0]] + parts)


def _lost_after_s(file: _Toml, value: Any, path: tuple) -> float:
    if type(value) not in (int, float) or not 1 <= value <= 365 * 86400:  # nan and inf are TOML too
        raise file.error(path, "must be a number of seconds, at least 1")
    return value


# ---- TOML with errors that say where -----------------------------------------------------------------------------------------

class _Toml:
    """One file: its values, the checks that they share, and errors that say where."""

    def __init__(self, path: str | os.PathLike[str], what: str, needs: str) -> None:
        self.name = str(path) if str(path).isprintable() else _shown(str(path))
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
        places = _places(self.text) if path else {}
        known = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in places), None)
        where = self.name
        if known:
            offset = places[known]
            where += f":{self.text.count(chr(10), 0, offset) + 1}:{offset - self.text.rfind(chr(10), 0, offset)}"
        return ConfigError(": ".join([where] + ([_dotted(path)] if path else []) + [message]))

    def unknown(self, path: tuple, keys: tuple[str, ...], also: str = "") -> ConfigError:
        hint = f" {also};" if also else _nearest(path[-1], keys)
        return self.error(path, f"is not a key here;{hint} the keys here are {', '.join(keys)}")

    def want(self, value: Any, kind: type, path: tuple) -> Any:
        if type(value) is not kind:
            like = f"; write it like {path[-1]} = {_EXAMPLES[path[-1]]}" if path[-1] in _EXAMPLES else ""
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
_DEPTH = 6  # deeper than any key that is checked; a dotted key may be long, and its prefixes longer


def _places(text: str) -> dict[tuple, int]:
    """{path of a key or an array's item: offset of its first mention} in a text that tomllib has taken; {} when it gets lost.

    tomllib keeps no positions, and a search for `key =` by lines finds it in comments, strings and other tables too.
    """
    tokens = [(match[0], match.start()) for match in re.finditer(_TOKEN, text, re.DOTALL) if match[0][0] != "#"] + [("\n", len(text))]
    places: dict[tuple, int] = {}
    at = 0

    def see(path: tuple, offset: int) -> tuple:
        for length in range(1, min(len(path), _DEPTH) + 1):
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


def _dotted(path: tuple) -> str:
    """job.workspace.exclude[2]; a key that isn't a bare one in quotes, so that no control character reaches a terminal."""
    text = ""
    for part in path:
        bare = isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part)
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if bare else f".{json.dumps(part[:64])}"
    return text[1:]


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 100 else text[:100] + "...", ensure_ascii=not text.isprintable())


def _nearest(word: str, words: tuple[str, ...]) -> str:
    import difflib

    close = difflib.get_close_matches(word.lower(), words, 1)
    return f" did you mean `{close[0]}`?" if close else ""
