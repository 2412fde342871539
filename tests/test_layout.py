"""How the sources are laid out: what may import what, what runs on the node's Python, what is pure, what no file may have.

Imports are read from the syntax trees, those inside functions too; imports under TYPE_CHECKING are for a type checker and count nowhere.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from gpurun.agentfile import SHIPPED

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {path.stem: path for path in sorted((ROOT / "gpurun").glob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}

# A file imports only from the rows above its own.
ROWS = (
    "__init__ errors messages reconcile signals",
    "files fsm membership wire packing manifest tomlfile question offers limits budgets slurm external lanes searching",
    "config watch paths spare listings",
    "link sockets channels supervise known_hosts store screen records statcache",
    "agentfile ssh transfer onstart preflight machines slurmjobs asyncjobs supervisors rundisk runstate workspace",
    "provider noderun landing pushing logs guard vast_api",
    "agent bootstrap ways",
    "node provider_local provider_ssh provider_vastai session",
    "contact asking following provider_slurm",
    "orchestrator hosts fleet",
    "stopping doctor",
    "renting",
    "attaching housekeeping",
    "fetching",
    "polling",
    "submitting",
    "cli_shared",
    "cli_runs cli_nodes cli_jobs",
    "cli",
    "__main__",
)
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row.split()}
# `provider.nodes()` is the door to the kinds, each of which implements the contract that stands in the same file.
DOORS = {("provider", "provider_local"), ("provider", "provider_ssh"), ("provider", "provider_vastai"), ("provider", "provider_slurm")}
OUTSIDE = {"click": {"cli", "cli_jobs", "cli_nodes", "cli_runs", "cli_shared"}, "iroh": {"link"}, "fabric": {"ssh"}, "paramiko": {"ssh", "channels"}, "cryptography": {"ssh"},
           "pathspec": {"workspace"}, "compression": {"packing"}, "backports": {"packing"}, "tomli": {"tomlfile"},
           "vastai": {"vast_api"}, "requests": {"vast_api"}}
PURE = ("budgets", "external", "fsm", "limits", "membership", "messages", "offers", "preflight", "reconcile", "slurm", "wire")
PURE_MODULES = {"__future__", "collections", "dataclasses", "difflib", "enum", "json", "math", "re", "shlex", "struct", "typing"}
MAX_LINES = 800
TOP = {".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "contrib", "gpurun", "pyproject.toml", "tests"}


def for_a_type_checker(tree: ast.AST) -> set[ast.AST]:
    return {node for test in ast.walk(tree) if isinstance(test, ast.If) and ast.unparse(test.test).endswith("TYPE_CHECKING")
            for inner in test.body for node in ast.walk(inner)}


def imports(name: str, anywhere: bool = True) -> Iterator[str]:
    """Dotted names: `gpurun.x` for our own, the package's own name for others. `anywhere`: inside functions too."""
    tree = TREES[name]
    inside = {node for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef))
              for node in ast.walk(function)}
    unseen = for_a_type_checker(tree) | (set() if anywhere else inside)
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name if alias.name.startswith("gpurun") else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively; write it out: a zipapp and a grep both want the whole name"
            if node.module == "gpurun":
                for alias in node.names:
                    yield f"gpurun.{alias.name if alias.name in SOURCES else '__init__'}"
            else:
                yield node.module if node.module.startswith("gpurun.") else node.module.split(".")[0]


def ours(name: str, anywhere: bool = True) -> set[str]:
    return {one.split(".")[1] for one in imports(name, anywhere) if one.startswith("gpurun.")}


def outside(name: str) -> set[str]:
    return {one for one in imports(name) if not one.startswith("gpurun")}


# ---- who imports whom --------------------------------------------------------------------------------------------------------------

def test_every_file_has_a_row():
    assert set(ROW_OF) == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_one_way(name):
    """Rows are strict, so there is no circle either."""
    assert {one for one in ours(name) if ROW_OF[one] >= ROW_OF[name] and (name, one) not in DOORS} == set()
    assert {one for one in ours(name, anywhere=False) if (name, one) in DOORS} == set()   # a door is opened where it is gone through


@pytest.mark.parametrize("name", SHIPPED)
def test_what_goes_to_the_node_needs_nothing_but_itself_and_the_standard_library(name):
    assert ours(name) <= set(SHIPPED)
    lacking = {"packing": {"backports", "compression"}}.get(name, set())   # zstd, where it is; every Python does without
    assert outside(name) - set(sys.stdlib_module_names) - lacking == ({"iroh"} if name == "link" else set())


@pytest.mark.parametrize("name", SOURCES)
def test_each_package_from_outside_has_one_file_that_imports_it(name):
    for package in outside(name) - set(sys.stdlib_module_names):
        assert name in OUTSIDE.get(package, ()), f"{name}.py imports {package}"


@pytest.mark.parametrize("name", PURE)
def test_pure_files_touch_no_clock_chance_disk_process_or_network(name):
    assert outside(name) <= PURE_MODULES
    assert ours(name) <= {"errors", *PURE}
    called = {node.func.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "input", "print", "exec", "eval", "__import__"}


def test_a_warm_run_loads_neither_fabric_nor_a_deploy_and_help_loads_nothing():
    """What the orchestrator imports at the top, and what that imports, is what every run loads."""
    deploy = {"ssh", "bootstrap", "doctor", "stopping", "asking", "attaching", "fetching", "housekeeping", "machines", "reconcile", "renting"}
    for start, never in (("orchestrator", deploy), ("cli", set(SOURCES) - {"__init__", "errors", "cli", "cli_jobs", "cli_nodes", "cli_runs", "cli_shared"})):
        loaded, todo = set(), [start]
        while todo:
            for one in ours(todo.pop(), anywhere=False) - loaded:
                loaded.add(one)
                todo.append(one)
        assert not loaded & never, start


# ---- the node's Python -------------------------------------------------------------------------------------------------------------

BUILT_IN = {"list", "dict", "tuple", "set", "frozenset", "type", "deque", "OrderedDict", "defaultdict", "Queue", "SimpleQueue",
            "Popen", "Future"}
NEWER = {"removeprefix", "removesuffix", "is_relative_to", "with_stem", "bit_count", "to_thread", "TaskGroup", "StrEnum", "file_digest",
         "pairwise", "randbytes", "packages_distributions", "pidfd_open", "pidfd_send_signal", "waitstatus_to_exitcode"}
NEWER_DOTTED = {"asyncio.timeout", "asyncio.Runner", "datetime.UTC", "functools.cache", "math.lcm", "sys.exception", "ast.unparse",
                "contextlib.chdir", "typing.Self", "typing.ParamSpec", "typing.TypeAlias", "typing.Annotated", "typing.override"}
NEWER_MODULES = {"tomllib", "zoneinfo", "graphlib"}
NEWER_KEYWORDS = {"dataclass": {"slots", "kw_only", "match_args", "weakref_slot"}, "zip": {"strict"}, "Popen": {"process_group"},
                  "run": {"process_group"}}


def newer_than_38(source: str) -> list[str]:
    """What of a source only a later Python can do, as far as it shows; the interpreters themselves are asked below."""
    try:
        tree = ast.parse(source, feature_version=(3, 8))
    except SyntaxError as error:
        return [f"{error.lineno}: {error.msg}"]
    lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" and any(one.name == "annotations" for one in node.names)
               for node in tree.body)
    said = []
    notes = set()
    for node in ast.walk(tree):                      # annotations are never evaluated, if the file says so
        for field in ("annotation", "returns"):
            note = getattr(node, field, None)
            if note is not None and lazy:
                notes.update(ast.walk(note))
    typed = {"Optional", "Union", "List", "Dict", "Tuple", "Set", "Any", "Callable", "str", "int", "bytes", "float", "bool"} | BUILT_IN
    for node in ast.walk(tree):
        if node in notes:
            continue
        at = f"{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if name in BUILT_IN:
                said.append(at + f"{name}[…] at run time")
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.BitOr):
            for side in (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,):
                if isinstance(side, ast.Constant) and side.value is None or isinstance(side, ast.Name) and side.id in typed:
                    said.append(at + "X | Y of types at run time")
                elif isinstance(side, (ast.Dict, ast.DictComp)) or isinstance(side, ast.Call) and getattr(side.func, "id", "") == "dict":
                    said.append(at + "dict | dict")
        elif isinstance(node, ast.Attribute):
            if node.attr in NEWER or ast.unparse(node) in NEWER_DOTTED:
                said.append(at + ast.unparse(node))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            said += [at + f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg in NEWER_KEYWORDS.get(name, ())]
        elif isinstance(node, ast.Import):
            said += [at + one.name for one in node.names if one.name.split(".")[0] in NEWER_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            said += [at + f"{node.module}.{one.name}" for one in node.names if f"{node.module}.{one.name}" in NEWER_DOTTED
                     or one.name in NEWER or node.module.split(".")[0] in NEWER_MODULES]
    return said


@pytest.mark.parametrize("name", SHIPPED)
def test_what_goes_to_the_node_is_python_3_8(name):
    assert newer_than_38(SOURCES[name].read_text()) == []


@pytest.mark.parametrize("source", [
    "match x:\n  case 1: pass", "def f(a: list[int]): pass", "from __future__ import annotations\nX = list[int]", "X = str | None",
    "isinstance(x, int | str)", "d = {} | e", "d = dict(a=1) | e", "d |= {}", "'ab'.removeprefix('a')", "zip(a, b, strict=True)",
    "@dataclass(slots=True)\nclass A: pass", "import tomllib", "from datetime import UTC", "asyncio.timeout(1)", "from functools import cache",
    "try: pass\nexcept* OSError: pass", "with (open(a) as b, open(c) as d): pass",
])
def test_the_rule_for_3_8_sees_what_is_newer(source):
    assert newer_than_38(source)


def test_the_rule_for_3_8_lets_pass_what_is_not():
    assert not newer_than_38("from __future__ import annotations\ndef f(a: list[int] | None) -> dict[str, int]:\n  x: list[int] = a[1:]\n"
                             "  flags = os.O_RDONLY | os.O_CLOEXEC\n  return {**x}\nList[int]")


def test_every_interpreter_here_loads_what_goes_to_the_node():
    """$GPURUN_TEST_PYTHONS (tests/run sets it), else this one. iroh isn't among what they have, so what needs link.py stays out."""
    needs_link = {"link"}
    names = [f"gpurun.{name}" for name in SHIPPED if name not in needs_link and not needs_link & ours(name, anywhere=False)]
    assert len(names) > 8
    for python in os.environ.get("GPURUN_TEST_PYTHONS", sys.executable).split(os.pathsep):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True\nimport {', '.join(names)}\n"
        code += "".join(f"compile(open({str(SOURCES[name])!r}).read(), {name!r}, 'exec')\n" for name in sorted(needs_link))
        done = subprocess.run([python, "-I", "-S", "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{python}: {done.stderr}"


# ---- what no file may have ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SOURCES)
def test_what_others_may_use_says_what_it_is(name):
    """A docstring for the file, and for each public class and function. Not for rows of a table (dataclasses, NamedTuples), classes that
    keep a contract, and functions that are read in one look or return a class of the same file that says it."""
    tree = TREES[name]
    assert ast.get_docstring(tree) or name in ("__init__", "__main__")
    documented = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and ast.get_docstring(node)}
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_") or ast.get_docstring(node):
            continue
        if isinstance(node, ast.ClassDef):
            row = node.bases or any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            assert row, f"class {node.name} has no docstring"
        else:
            obvious = len(node.body) <= 4 or node.name in said_elsewhere(tree) or node.returns and ast.unparse(node.returns) in documented
            assert obvious, f"{node.name}() has no docstring"


def said_elsewhere(tree: ast.Module) -> set[str]:
    """The functions that the file's own docstring names; and a program's main, which it is about."""
    return {"main"} | set(re.findall(r"[a-z_]{4,}", ast.get_docstring(tree) or ""))


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_commands_print_and_no_error_is_swallowed_unnamed(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            assert name in ("cli", "node"), f"line {node.lineno} prints"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"line {node.lineno}: a bare except"


def tracked() -> list[Path]:
    """The project's files: what git has (a user's own files beside them are his), in an unpacked archive what lies in our folders."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if done.returncode == 0 and (ROOT / ".git").exists():
        names = done.stdout.decode().split("\0")
    else:
        names = [str(path.relative_to(ROOT)) for folder in ("gpurun", "tests", "contrib") for path in (ROOT / folder).rglob("*.py")]
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def test_nothing_is_left_for_later_and_no_file_is_long():
    later = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")   # the brackets: this line isn't one of them
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".sh", ".yml", "") and path.parts[0] != "LICENSE":
            lines = (ROOT / path).read_text(errors="replace").splitlines()
            assert not [line for line in lines if later.search(line)], path
            assert len(lines) <= MAX_LINES or path.suffix == ".md", f"{path} has {len(lines)} lines"


def test_the_top_level_is_small():
    assert {path.parts[0] for path in tracked()} <= TOP
