"""The two files that a user writes, read strictly: the job file (what to do) and the cluster file (where).

    load_job(path, environ) -> Job                                     [job] and [external_job]
    external_with(job, given) -> External                              with what options of the command line say in its place
    find_cluster(option, job_folder, environ, home) -> path or None    --cluster, $GPURUN_CLUSTER, beside the job, ~/.config/gpurun, none
    load_cluster(path or None) -> Cluster                              None: this machine
    pick_host(cluster, name) -> Host or None                           what --node names

Whatever is in a file, the answer is one of these or a ConfigError with file, line and column (where TOML gives them), the key's
path, the valid keys and the nearest one. A value of `env` is in no error text and in no repr.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import warnings
from typing import Any, Mapping, NamedTuple

from gpurun.budgets import TABLE
from gpurun.errors import ConfigError
from gpurun.tomlfile import Toml, nearest, shown

MAX_TEXT_BYTES = 128 * 1024 - 1  # Linux: the longest single argument (bash -c TEXT) or variable (KEY=value) of a program
MAX_PLAN_BYTES = 900_000       # setup, run and env together, as JSON, in such a line; only ${NAME} can make them longer than the file
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4096

JOB_KEYS = ("name", "run", "setup", "workspace", "outputs", "env")
WORKSPACE_KEYS = ("workdir", "exclude")
HARDWARE_KEYS = ("gpu", "gpus", "resources", "provider", "image", "nodes", "instance", "accelerators", "partition", "gres")
KINDS = ("local", "ssh", "vastai", "slurm")
PROVIDER_KEYS = ("kind", "hosts", "relay", "udp_port", "max_connections", "python", "node_dir", "lost_after_s")
MAX_CONNECTIONS = 64          # for one transfer; more never helped (lanes.MOST)
VASTAI_KEYS = ("image", "disk_gb", "nodes", "gpu", "selection", "limits", "bid", "ready_within_s")
SLURM_KEYS = ("login", "partition", "account", "time", "nodes", "gres", "extra", "pending_limit_s", "submit_timeout_s", "poll_timeout_s")
KEYS_OF = {"ssh": ("hosts",), "vastai": VASTAI_KEYS, "slurm": SLURM_KEYS}   # beside those that every kind has
BACKENDS = ("node", "slurm")
EXTERNAL_KEYS = ("runtime_budget", "plan", "phase", "expected", "verify", "resume", "backend", "hard_limit_s", "progress_every_s",
                 "health_check_s", "soft_review_s", "abort_silence_s", "abort_pattern", "expect_output")
CLUSTER_FILE = "cluster.toml"

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")
_IMAGE = re.compile(r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?(?:[a-z0-9]+(?:[._-]+[a-z0-9]+)*/)*[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
                    r"(:@?[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,128})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_EXAMPLES = {"workspace": '{ workdir = "." }', "outputs": '["metrics.json"]', "env": '{ KEY = "value" }',
             "exclude": '["/data", "*.tmp"]', "run": '"python train.py"', "hosts": '[{ host = "gpu1" }]', "relay": '"disabled"',
             "gpu": '{ name = "RTX 4090", count = 1 }', "selection": "{ max_price_per_hour = 0.5 }", "limits": "{ max_hours = 8 }",
             "image": '"vastai/base-image:cuda-12.8.1-cudnn-devel-ubuntu22.04-py310"',
             "partition": '"main"', "account": '"lab7"', "gres": '"gpu:2"', "extra": '["--qos=high"]', "login": '"login1"',
             "plan": '"3.1"', "phase": '"3"', "expected": '["metrics.json"]', "verify": '"python check.py"', "resume": '"gpurun poll"'}
_HINTS = {"workdir": 'it belongs in `workspace = { workdir = "." }`', "exclude": 'it belongs in `workspace = { workdir = ".", exclude = [] }`',
          "command": "did you mean `run`?", "cmd": "did you mean `run`?"}
_EXTERNAL_HINTS = {"budget": "did you mean `runtime_budget`?", "plan_id": "did you mean `plan`?", "verification_command": "did you mean `verify`?",
                   "resume_command": "did you mean `resume`?", "expected_artifacts": "did you mean `expected`?"}


class External(NamedTuple):
    """The table [external_job], checked; "", () and None: not set. `expected` are normalised as `outputs`, and each is one or lies within one."""

    runtime_budget: str = ""
    plan: str = ""
    phase: str = ""
    expected: tuple[str, ...] = ()
    verify: str = ""
    resume: str = ""
    backend: str = ""
    hard_limit_s: float | None = None
    progress_every_s: float | None = None
    health_check_s: float | None = None
    soft_review_s: float | None = None
    abort_silence_s: float | None = None
    abort_pattern: str | None = None
    expect_output: bool | None = None

    def settings(self) -> dict[str, Any]:
        """What of a budget it sets, by the names of budgets.Budget; None: not set."""
        return {"hard_s": self.hard_limit_s, "progress_s": self.progress_every_s, "health_s": self.health_check_s, "review_s": self.soft_review_s,
                "silence_s": self.abort_silence_s, "abort_pattern": self.abort_pattern, "expect_output": self.expect_output}


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
    external_job: External | None = None

    def __repr__(self) -> str:
        """Without the values of `env`."""
        return f"Job({self.name!r}, {self.path!r})"


class Host(NamedTuple):
    """`text` as in the cluster file; `user` "" and `port` 0 are left to the ssh configuration. `hostname` may be an alias of it."""

    text: str
    user: str = ""
    hostname: str = ""
    port: int = 0


class Gpu(NamedTuple):
    """Of each rented machine. `name` "": any; `min_vram_gb` is for each GPU."""

    name: str = ""
    count: int = 1
    min_vram_gb: float = 0.0


class Selection(NamedTuple):
    """Which offers will do. A price is in $/h for a whole machine, its disk included. `min_cuda` None: what the image's tag says."""

    min_reliability: float = 0.97
    min_down_mbps: float = 100.0
    min_up_mbps: float = 0.0
    require_verified: bool = True
    max_price_per_hour: float | None = None
    min_cuda: float | None = None


class Limits(NamedTuple):
    """When rented machines go, whatever they do. `max_cost` in $."""

    max_hours: float | None = None
    max_cost: float | None = None
    idle_minutes: float = 60.0


class Slurm(NamedTuple):
    """What Slurm is asked for; "", None and (): not said, so that Slurm decides. `extra` are options of sbatch, ready for its command line."""

    partition: str = ""
    account: str = ""
    time: str = ""
    nodes: int | None = None
    gres: str = ""
    extra: tuple[str, ...] = ()
    pending_limit_s: float = 7 * 86400
    submit_timeout_s: float = 30
    poll_timeout_s: float = 15


class Cluster(NamedTuple):
    """A cluster file, checked. `relay`: "disabled", "n0" or URLs. `udp_port` 0: any. `python` "": what the probe finds.

    From `image` on it is only for kind "vastai". `bid`: $/h for each machine, which makes it interruptible. `slurm` and `login` (None: this
    machine) are only for kind "slurm".
    """

    path: str | None = None
    kind: str = "local"
    hosts: tuple[Host, ...] = ()
    relay: str | tuple[str, ...] = "disabled"
    udp_port: int = 0
    python: str = ""
    node_dir: str = "~/.gpurun"
    lost_after_s: float = 300
    image: str = ""
    disk_gb: int = 64
    nodes: int = 1
    gpu: Gpu = Gpu()
    selection: Selection = Selection()
    limits: Limits = Limits()
    bid: float | None = None
    ready_within_s: float = 1200
    slurm: Slurm | None = None
    login: Host | None = None
    max_connections: int = MAX_CONNECTIONS

    @property
    def here(self) -> bool:
        """The node is this machine: its agent is reached over loopback, its files and processes can be seen."""
        return self.kind == "local" or self.kind == "slurm" and self.login is None


# ---- the job file ------------------------------------------------------------------------------------------------------------

def load_job(path: str | os.PathLike[str], environ: Mapping[str, str]) -> Job:
    """`environ` is the operator's, for `${NAME}` in `env`. The job's folder is where the path as given lies, links not followed."""
    file = Toml(path, "job file", "a table [job] with at least `name` and `run`", _EXAMPLES)
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
        raise file.error(("job", "name"), f"{shown(name)} can't be a name: 1 to 64 of A-Z a-z 0-9 . _ - and first a letter or digit")
    run = _command(file, job["run"], ("job", "run"))
    if not run.strip():
        raise file.error(("job", "run"), "is blank; it is the command that does the work, text for `bash -c`")
    setup = _command(file, job.get("setup", ""), ("job", "setup"))
    path = _absolute(path)
    workdir, exclude = _workspace(file, job["workspace"], os.path.dirname(path)) if "workspace" in job else (None, ())
    env = _env(file, job["env"], environ) if "env" in job else {}
    outputs = _outputs(file, job.get("outputs", []))
    external = _external(file, file.data["external_job"], outputs) if "external_job" in file.data else None
    setup = setup if setup.strip() else ""
    if len(json.dumps([setup, run, env])) > MAX_PLAN_BYTES:
        raise file.error(("job",), f"setup, run and env are longer than {MAX_PLAN_BYTES:,} bytes together; put long text into a file")
    return Job(path, os.path.dirname(path), name, run, setup, workdir, exclude, outputs, env, external)


def error_at(path: str | os.PathLike[str], key: tuple, message: str) -> ConfigError:
    """An error about a key of a job file that was loaded, with its place; for what is found out later than in here."""
    return Toml(path, "job file", "a table [job]").error(key, message)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Not os.path.abspath: what `link/..` means isn't for us to guess."""
    whole = os.path.join(os.getcwd(), os.fspath(path))
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))


def _unknown_in_job(file: Toml, path: tuple, keys: tuple[str, ...], also: str) -> ConfigError:
    if path[-1].lower() in HARDWARE_KEYS:
        return file.error(path, "a job says what to do, never on what hardware: that belongs in the cluster file "
                                f"(--cluster FILE, or {CLUSTER_FILE} beside the job). The keys here are {', '.join(keys)}")
    return file.unknown(path, keys, also)


def _command(file: Toml, value: Any, path: tuple) -> str:
    text = file.want(value, str, path).replace("\r\n", "\n")
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise file.error(path, f"is longer than the {MAX_TEXT_BYTES:,} bytes that Linux takes for `bash -c`; "
                               "put it into a script in the workspace")
    return text


def _workspace(file: Toml, value: Any, folder: str) -> tuple[str, tuple[str, ...]]:
    path = ("job", "workspace", "workdir")
    table = file.table(value, path[:2], WORKSPACE_KEYS, needed=("workdir",))
    name = file.want(table["workdir"], str, path)
    if not name.strip():
        raise file.error(path, 'is blank; "." is the folder of the job file')
    if name.startswith(("/", "~")):
        raise file.error(path, f'{shown(name)} is not relative to the folder of the job file; '
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
        raise file.error(path, f"{shown(workdir)} {'is not a folder' if exists else 'does not exist'}; "
                               "it is relative to the folder of the job file")
    exclude = file.texts(table.get("exclude", []), path[:2] + ("exclude",))
    for index, pattern in enumerate(exclude):
        if "\n" in pattern:
            raise file.error(path[:2] + ("exclude", index), "has a line break; one pattern is one item of the array")
    return workdir, exclude


def _outputs(file: Toml, value: Any) -> tuple[str, ...]:
    """Normalised, in the order of the file, without those that another one brings along."""
    here = ("job", "outputs")
    names = [_relative(file, text, here + (index,)) for index, text in enumerate(file.texts(value, here))]
    whole = set(names)
    return tuple(name for name in dict.fromkeys(names) if not whole & set(_above(name)))


def _relative(file: Toml, text: str, path: tuple) -> str:
    parts = [part for part in text.split("/") if part not in ("", ".")]
    wrong = ("is blank" if not text.strip() else
             "is an absolute path" if text.startswith("/") else
             "starts with ~, which isn't expanded (./~x is a name with ~)" if text.startswith("~") else
             "leads out of the workdir by `..`" if ".." in parts else
             "is the whole workdir, the workspace included" if not parts else
             "is too long" if len(text.encode()) > MAX_PATH_BYTES or max(len(part.encode()) for part in parts) > MAX_NAME_BYTES else "")
    if wrong:
        raise file.error(path, f"{shown(text)} {wrong}; name a file or folder relative to the job's workdir")
    return "/".join(parts)


def _above(name: str) -> list[str]:
    """The folders that it lies in."""
    return [name[:at] for at, letter in enumerate(name) if letter == "/"]


def _env(file: Toml, value: Any, environ: Mapping[str, str]) -> dict[str, str]:
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


# ---- [external_job] ------------------------------------------------------------------------------------------------------------

def _external(file: Toml, value: Any, outputs: tuple[str, ...]) -> External:
    """Nothing in it is needed: an option of a command may say it instead. What is there must make sense."""
    here = ("external_job",)
    table = file.want(value, dict, here)
    for key in table:
        if key not in EXTERNAL_KEYS:
            raise _unknown_in_job(file, here + (key,), EXTERNAL_KEYS, also=_EXTERNAL_HINTS.get(key, ""))
    external = External(**{key: _external_value(file, key, value, outputs) for key, value in table.items()})
    _refuse_contradictions(file, external)
    return external


def external_with(job: Job, given: Mapping[str, Any]) -> External:
    """[external_job] with what the command line says in its place: by the keys of the table, None for nothing. An error names the option.

    What is written for one run overrides: a review that a shorter --limit comes before is no mistake."""
    line = _CommandLine()
    said = {key: _external_value(line, key, list(value) if isinstance(value, tuple) else value, job.outputs)
            for key, value in given.items() if value is not None}
    return (job.external_job or External())._replace(**said)


class _CommandLine(Toml):
    """For checks that say where a mistake is: here in an option."""

    def __init__(self) -> None:
        self._examples = {}

    def error(self, path: tuple, message: str) -> ConfigError:
        option = {"runtime_budget": "budget", "hard_limit_s": "limit"}.get(path[1], path[1].replace("_", "-"))
        return ConfigError(f"--{option}: {message}")


def _external_value(file: Toml, key: str, value: Any, outputs: tuple[str, ...]) -> Any:
    path = ("external_job", key)
    if key == "expected":
        return _expected(file, value, outputs)
    if key == "expect_output":
        return file.want(value, bool, path)
    checks = {"runtime_budget": _one_of, "backend": _one_of, "plan": _identifier, "phase": _identifier, "verify": _nonblank, "resume": _nonblank,
              "abort_pattern": _pattern}
    return checks.get(key, _seconds)(file, value, path)


def _one_of(file: Toml, value: Any, path: tuple) -> str:
    words = {"runtime_budget": tuple(TABLE), "backend": BACKENDS}[path[-1]]
    if file.want(value, str, path) not in words:
        raise file.error(path, f"{shown(value)} is none;{nearest(value, words)} it is one of {', '.join(words)}")
    return value


def _identifier(file: Toml, value: Any, path: tuple) -> str:
    """Compared as an exact string by whoever reads the manifest: 3.10 as a number would be 3.1."""
    if type(value) in (int, float):
        raise file.error(path, f'is a number, and must be a string, which is compared letter by letter; quote it: {path[-1]} = "{value}"')
    if not file.want(value, str, path).strip() or not value.isprintable() or len(value) > MAX_NAME_BYTES:
        raise file.error(path, f"{shown(value)} can't be it: a line of text, not blank, of at most {MAX_NAME_BYTES} characters")
    return value


def _nonblank(file: Toml, value: Any, path: tuple) -> str:
    text = _command(file, value, path)
    if not text.strip():
        raise file.error(path, "is blank; it is a command, or leave it out")
    return text


def _expected(file: Toml, value: Any, outputs: tuple[str, ...]) -> tuple[str, ...]:
    here = ("external_job", "expected")
    names = [_relative(file, text, here + (index,)) for index, text in enumerate(file.texts(value, here))]
    if not names:
        raise file.error(here, "names nothing; name at least one path that the job must make, or leave it out")
    for index, name in enumerate(names):
        if not {name, *_above(name)} & set(outputs):
            raise file.error(here + (index,), f"{shown(name)} would not come home: it is no declared output and lies in none; add it to `outputs` "
                                              f"of [job], which {'are ' + ', '.join(map(shown, outputs)) if outputs else 'has none'}")
    return tuple(dict.fromkeys(names))


def _seconds(file: Toml, value: Any, path: tuple) -> float:
    if type(value) not in (int, float) or not 0 < value <= 366 * 86400:   # nan and inf are TOML too
        raise file.error(path, "must be a number of seconds, above 0, up to a year")
    return value


def _pattern(file: Toml, value: Any, path: tuple) -> str:
    text = file.want(value, str, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")              # of what another Python may read differently: nothing to bother a user with
            empty = re.compile(text).search("") is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise file.error(path, f"is not a regular expression of Python: {error}") from None
    if empty:
        raise file.error(path, f"{shown(text)} is found in every line, an empty one too: each job would be stopped at once")
    return text


def _refuse_contradictions(file: Toml, external: External) -> None:
    """What is written would never come to pass. A default that doesn't is no mistake: a hard limit of a minute is before any review."""
    hard_s, whose = external.hard_limit_s, "hard_limit_s"
    if hard_s is None and external.runtime_budget:
        hard_s, whose = TABLE[external.runtime_budget].hard_s or None, f"the hard limit of the budget {external.runtime_budget}"
    for key, what in (("health_check_s", "the health check"), ("progress_every_s", "a word about missing progress"),
                      ("soft_review_s", "the review"), ("abort_silence_s", "the end of a silent job")):
        after_s = getattr(external, key)
        if after_s is not None and hard_s is not None and after_s >= hard_s:
            raise file.error(("external_job", key), f"{what} after {after_s:g} s would never come: {whose} = {hard_s:g} ends the job before; "
                                                    f"lower the one or {'raise' if whose == 'hard_limit_s' else 'set'} hard_limit_s")
    if external.expect_output and external.runtime_budget and external.health_check_s is None and not TABLE[external.runtime_budget].health_s:
        raise file.error(("external_job", "expect_output"), f"is for the health check, and the budget {external.runtime_budget} has none; "
                                                            "set health_check_s")
    if external.health_check_s is not None and external.soft_review_s is not None and external.health_check_s >= external.soft_review_s:
        raise file.error(("external_job", "health_check_s"), f"the first look at the job, after {external.health_check_s:g} s, comes before the review, "
                                                             f"soft_review_s = {external.soft_review_s:g}; lower the one or raise the other")


# ---- the cluster file ----------------------------------------------------------------------------------------------------------

def find_cluster(option: str | None, job_folder: str, environ: Mapping[str, str], home: str | None) -> str | None:
    """The first there is; None is this machine. What a user named must exist: it is never passed over for the next one."""
    if option == "":
        raise ConfigError("--cluster is empty; name a cluster file, or leave the option out")
    for named, by in ((option, "--cluster"), (environ.get("GPURUN_CLUSTER"), "$GPURUN_CLUSTER")):
        if named:  # a variable that is set but empty counts as not set
            path = os.path.join(home, named[2:]) if home and named.startswith("~/") else named
            if not os.path.lexists(path):
                raise ConfigError(f"{by} names the cluster file {shown(named)}, which does not exist; correct the path, or leave {by} out")
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
    file = Toml(path, "cluster file", 'a table [provider] with a `kind`, like `kind = "local"`', _EXAMPLES)
    if "job" in file.data:
        raise file.error(("job",), "this is a job file; a cluster file has a table [provider]")
    file.table(file.data, (), ("provider",), needed=("provider",))
    table = file.want(file.data["provider"], dict, ("provider",))
    if "kind" not in table:
        raise file.error(("provider", "kind"), f"is missing; it is one of {', '.join(KINDS)}")
    kind = file.want(table["kind"], str, ("provider", "kind"))
    if kind not in KINDS:
        raise file.error(("provider", "kind"), f"{shown(kind)} is not a kind;{nearest(kind, KINDS)} the kinds are {', '.join(KINDS)}")
    if kind != "ssh" and "hosts" in table:
        what = {"local": "is this machine", "vastai": "rents its machines", "slurm": "has one host, which is its `login`,"}[kind]
        raise file.error(("provider", "hosts"), f'kind "{kind}" {what} and takes no hosts; kind "ssh" does')
    keys = tuple(key for key in PROVIDER_KEYS if key != "hosts") + KEYS_OF.get(kind, ())
    for key in table:
        owners = [f'"{one}"' for one, has in KEYS_OF.items() if key in has]
        if owners and key not in keys:
            only = f"only kind {owners[0]} has it" if len(owners) == 1 else f"only the kinds {' and '.join(owners)} have it"
            raise file.unknown(("provider", key), keys, also=only)
    file.table(table, ("provider",), keys)

    options: dict[str, Any] = {"vastai": _vastai, "slurm": _slurm}.get(kind, lambda file, table: {})(file, table)
    for key, check in (("relay", _relay), ("udp_port", _udp_port), ("max_connections", _max_connections), ("python", _python),
                       ("node_dir", _node_dir), ("lost_after_s", _lost_after_s)):
        if key in table:
            options[key] = check(file, table[key], ("provider", key))
    return Cluster(path=_absolute(path), kind=kind, hosts=_hosts(file, table) if kind == "ssh" else (), **options)


def pick_host(cluster: Cluster, name: str | None) -> Host | None:
    """The host that `name` means: its text in the cluster file, or its hostname where only one has that. No name: the first host.

    None: this machine, for a cluster of kind local (which also answers to the name "local") or of kind slurm without a login host.
    """
    if cluster.here and name in (None, "", cluster.kind):
        return None
    hosts = (cluster.login,) if cluster.login else cluster.hosts
    if hosts and not name:
        return hosts[0]
    exact = [host for host in hosts if host.text == name]
    close = exact or [host for host in hosts if host.hostname == name]
    if len(close) == 1:
        return close[0]
    names = tuple(host.text for host in hosts) or (cluster.kind,)
    wrong = "is more than one node" if close else "is not a node"
    raise ConfigError(f"--node {shown(str(name))} {wrong} of {cluster.path or 'this machine'};"
                      f"{nearest(str(name), names)} the nodes are {', '.join(names)}")


def _hosts(file: Toml, table: dict) -> tuple[Host, ...]:
    path = ("provider", "hosts")
    hosts: dict[tuple, Host] = {}
    for index, item in enumerate(file.want(table.get("hosts", []), list, path)):
        here = path + (index, "host")
        host = _host(file, file.table(item, path + (index,), ("host",), needed=("host",))["host"], here)
        if hosts.setdefault((host.user, host.hostname.lower(), host.port), host) is not host:
            raise file.error(here, f"{shown(host.text)} is there twice; a node is listed once")
    if not hosts:
        raise file.error(path, 'kind "ssh" needs at least one host: [[provider.hosts]] with host = "gpu1" or "user@host:port"')
    return tuple(hosts.values())


def _host(file: Toml, value: Any, path: tuple) -> Host:
    text = file.want(value, str, path)
    try:
        return parse_host(text)
    except ValueError as error:
        raise file.error(path, f"{shown(text)} {error}") from None


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


def _relay(file: Toml, value: Any, path: tuple) -> str | tuple[str, ...]:
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


def _udp_port(file: Toml, value: Any, path: tuple) -> int:
    if not 0 <= file.want(value, int, path) <= 65535:
        raise file.error(path, "must be a port from 1 to 65535, or 0 for any")
    return value


def _max_connections(file: Toml, value: Any, path: tuple) -> int:
    if not 1 <= file.want(value, int, path) <= MAX_CONNECTIONS:
        raise file.error(path, f"must be from 1 to {MAX_CONNECTIONS}: so many connections one transfer may get where that makes it faster")
    return value


def _python(file: Toml, value: Any, path: tuple) -> str:
    """A command on the node's PATH, or a path from / or ~/ ; bootstrap.py expands the ~ there."""
    text = file.want(value, str, path)
    if _CONTROL.search(text) or not (text.startswith(("/", "~/")) or text and "/" not in text and text[0] not in "-~ "):
        raise file.error(path, 'must be a Python of the node: "python3.11", or a path that starts with / or ~/')
    return text


def _node_dir(file: Toml, value: Any, path: tuple) -> str:
    text = file.want(value, str, path)
    parts = [part for part in text.split("/")[1:] if part not in ("", ".")]
    if _CONTROL.search(text) or not text.startswith(("/", "~/")) or not parts or ".." in parts:
        raise file.error(path, "must be a folder of gpurun's own on the node, from / or ~/ and without `..`, like ~/.gpurun")
    return "/".join([text.split("/")[0]] + parts)


def _lost_after_s(file: Toml, value: Any, path: tuple) -> float:
    if type(value) not in (int, float) or not 1 <= value <= 365 * 86400:  # nan and inf are TOML too
        raise file.error(path, "must be a number of seconds, at least 1")
    return value


# From, to; whole numbers where both are. Nothing may be infinite or too large for a clock. A price's bounds are Vast.ai's for a bid.
_ABOVE_0, _MUCH = 1e-6, 1e6
_NUMBERS = {
    "disk_gb": (8, 65536), "nodes": (1, 64), "ready_within_s": (1.0, _MUCH), "bid": (0.001, 128.0),
    "gpu.count": (1, 64), "gpu.min_vram_gb": (0.0, _MUCH),
    "selection.min_reliability": (0.0, 1.0), "selection.min_down_mbps": (0.0, _MUCH), "selection.min_up_mbps": (0.0, _MUCH),
    "selection.max_price_per_hour": (_ABOVE_0, _MUCH), "selection.min_cuda": (1.0, 1000.0),
    "limits.max_hours": (_ABOVE_0, _MUCH), "limits.max_cost": (_ABOVE_0, _MUCH), "limits.idle_minutes": (_ABOVE_0, _MUCH),
}


def _vastai(file: Toml, table: dict) -> dict[str, Any]:
    """What only kind "vastai" has, as arguments of Cluster."""
    here = ("provider",)
    if "image" not in table:
        raise file.error(here + ("image",), f'is missing; kind "vastai" needs a container image, like image = {_EXAMPLES["image"]}')
    options: dict[str, Any] = {"image": _image(file, table["image"], here + ("image",))}
    for key, kind in (("gpu", Gpu), ("selection", Selection), ("limits", Limits)):
        if key in table:
            inner = file.table(table[key], here + (key,), kind._fields)
            options[key] = kind(**{name: _vastai_value(file, value, here + (key, name)) for name, value in inner.items()})
    for key in ("disk_gb", "nodes", "bid", "ready_within_s"):
        if key in table:
            options[key] = _vastai_value(file, table[key], here + (key,))
    highest = options.get("selection", Selection()).max_price_per_hour
    if highest is not None and options.get("bid", 0) > highest:
        raise file.error(here + ("bid",), f"{options['bid']:g} is more than selection.max_price_per_hour = {highest:g}: no offer could fit; "
                                          "lower the one or raise the other")
    return options


def _vastai_value(file: Toml, value: Any, path: tuple) -> Any:
    if path[-1] == "require_verified":
        return file.want(value, bool, path)
    if path[-1] == "name":
        if len(file.want(value, str, path)) > 64 or not value.isprintable():
            raise file.error(path, 'must be the name of a GPU, like "RTX 4090"')
        return value.strip()
    low, high = _NUMBERS[".".join(path[1:])]
    whole = type(low) is int
    if type(value) is not int and (whole or type(value) is not float) or not low <= value <= high:   # nan and inf are TOML too
        bounds = "above 0" if low == _ABOVE_0 else f"of at least {low:g}" if high == _MUCH else f"from {low:g} to {high:g}"
        raise file.error(path, f"must be a {'whole ' * whole}number {bounds}" + f", up to {high:,.0f}" * (high == _MUCH))
    return value


def _image(file: Toml, value: Any, path: tuple) -> str:
    """Vast.ai answers one without a tag with an error that doesn't say so, and what such a one is changes from day to day."""
    text = file.want(value, str, path)
    match = _IMAGE.fullmatch(text) if len(text) <= 512 else None
    if not match:
        raise file.error(path, f"{shown(text)} is not the name of a container image; write it like {_EXAMPLES['image']}")
    if not match[1] and not match[2]:
        raise file.error(path, f"{shown(text)} has no tag; name the one that you mean, like {shown(text + ':1.0')}, or a digest")
    return text


# ---- kind "slurm" --------------------------------------------------------------------------------------------------------------------

# sbatch's options that gpurun sets itself or that would break what it does, and why. sbatch takes abbreviations of them too.
_RESERVED = {
    **dict.fromkeys(("output", "error", "open-mode"), "the job's output goes into the run's own logs"),
    "input": "a job's stdin is /dev/null",
    "chdir": "the job runs in the run's workspace",
    "job-name": "the job has the run's id as its name, by which it is found again",
    **dict.fromkeys(("parsable", "quiet", "verbose"), "gpurun reads what sbatch prints"),
    "wrap": "the command is `run` of the job file",
    "array": "a run is one job; start one run for each task",
    **dict.fromkeys(("export", "export-file", "get-user-env"), "the job's variables come from `env` of the job file and the login shell"),
    "wait": "gpurun waits for the job itself",
    "test-only": "nothing would be submitted; `gpurun plan` shows what would be",
    **dict.fromkeys(("clusters", "cluster"), "the job would be on another cluster than the one that is asked about it; write a cluster file for that one"),
    **dict.fromkeys(("help", "usage", "version"), "nothing would be submitted"),
    **dict.fromkeys(("uid", "gid"), "the job must be yours, as its files are"),
    "jobid": "a job's number is Slurm's to give",
    **dict.fromkeys(("bb", "bbf"), "sbatch would write it into the job's script"),
    "workdir": "the job runs in the run's workspace",       # chdir, before Slurm 17.11
}
_OWN = ("partition", "account", "time", "nodes", "gres")
# Those that sbatch (to 24.11) takes without a value. One that needs a value and has none would swallow the next argument of sbatch.
_FLAGS = ("consolidate-segments", "contiguous", "exclusive", "hold", "ignore-pbs", "nice", "no-kill", "no-requeue", "overcommit",
          "oversubscribe", "propagate", "reboot", "requeue", "share", "spread-job", "spread-segments", "stepmgr", "use-min-nodes", "x11")
_VALUED = ("acctg-freq", "batch", "begin", "cluster-constraint", "comment", "constraint", "container", "container-id", "core-spec", "cores-per-socket",
           "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "exclude", "extra", "extra-node-info",
           "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres-flags", "hint", "kill-on-invalid-dep",
           "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile",
           "nodelist", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "oom-kill-step", "power", "prefer",
           "priority", "profile", "qos", "reservation", "resv-ports", "segment", "signal", "sockets-per-node", "switches", "thread-spec",
           "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "wait-all-nodes", "wckey")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?")
_SLURM_TIME = re.compile(r"[0-9]{1,9}(:[0-9]{1,5}){0,2}|[0-9]{1,7}-[0-9]{1,5}(:[0-9]{1,5}){0,2}")


def _slurm(file: Toml, table: dict) -> dict[str, Any]:
    """What only kind "slurm" has, as arguments of Cluster."""
    checks: dict[str, Any] = {"time": _slurm_time, "nodes": _slurm_nodes, "extra": _extra}
    checks.update(dict.fromkeys(("partition", "account", "gres"), _word))
    checks.update(dict.fromkeys(("pending_limit_s", "submit_timeout_s", "poll_timeout_s"), _seconds))
    options = {key: check(file, table[key], ("provider", key)) for key, check in checks.items() if key in table}
    return {"slurm": Slurm(**options), "login": _host(file, table["login"], ("provider", "login")) if "login" in table else None}


def _word(file: Toml, value: Any, path: tuple) -> str:
    """What Slurm reads up to the end of the argument: a newline or a control character in it is a mistake, and never one of Slurm's names."""
    text = file.want(value, str, path)
    if not text or not text.isprintable() or " " in text or len(text) > 1024:
        raise file.error(path, f"{shown(text)} can't be it: one word without blanks or control characters, like {path[-1]} = {_EXAMPLES[path[-1]]}")
    return text


def _slurm_time(file: Toml, value: Any, path: tuple) -> str:
    """As sbatch takes it. Of a negative one Slurm makes a limit of ages, and 0 is none at all."""
    form = 'write minutes (90), or like "30:00", "12:00:00", "2-12" or "2-12:00:00" (days-hours:minutes:seconds); "UNLIMITED" is no limit'
    if isinstance(value, (datetime.time, datetime.date)):
        raise file.error(path, f'is a time of day or a date, and must be a string; quote it: time = "{value}"')
    if type(value) not in (int, str):
        raise file.error(path, f"must be a time limit; {form}")
    text = str(value)
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return "UNLIMITED"
    if not _SLURM_TIME.fullmatch(text) or not text.strip("0:-"):
        raise file.error(path, f"{shown(text)} is not a time limit; {form}")
    return text


def _slurm_nodes(file: Toml, value: Any, path: tuple) -> int:
    if type(value) is not int or not 1 <= value <= 65536:
        raise file.error(path, "must be a whole number of at least 1: on how many nodes the job runs (`srun` in its `run` starts a process on each)")
    return value


def _extra(file: Toml, value: Any, path: tuple) -> tuple[str, ...]:
    """Each is one argument of sbatch, which takes any beginning of an option's name that is clear to its version."""
    options = file.texts(value, path)
    for index, text in enumerate(options):
        here = path + (index,)
        match = _OPTION.fullmatch(text) if text.isprintable() and len(text) <= 1024 else None
        if not match:
            raise file.error(here, f'{shown(text)} is not an option of sbatch in its long form, in one piece: "--name" or "--name=value"')
        name, valued = match[1], match[2] is not None
        if name in _FLAGS or name in _VALUED:
            clash, near = "", [name]
        else:
            known = (*_RESERVED, *_OWN)
            clash = name if name in known else next((one for one in known if one.startswith(name)), "")
            near = [one for one in _FLAGS + _VALUED if one.startswith(name)]
        short = f"--{name}{'' if clash == name else f', short for --{clash},'}"
        if clash in _OWN:
            raise file.error(here, f"{short} has a key of its own; write {clash} = … ({', '.join(_OWN)} have one)")
        if clash:
            raise file.error(here, f"{short} can't be set here: {_RESERVED[clash]}")
        if near and not valued and not set(near) & set(_FLAGS):
            raise file.error(here, f'--{name} needs a value, in the same piece: "--{near[0]}=…"')
    return options
