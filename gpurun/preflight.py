"""Whether the GPUs of a rented machine can be used, asked of the CUDA driver itself before a job finds out: the program that runs there, and
what its one line means.

Hosts are rented out whose driver hangs, has lost a GPU or takes no memory, and nothing that their provider lists shows it. The program needs
Python 3.8 and nothing else: no toolkit, no nvidia-smi. On each GPU it makes a context, writes 16 MB there and reads them back. A container
that shows no trace of an NVIDIA GPU (no device file, no driver in /proc, no NVIDIA_VISIBLE_DEVICES of its first process) and has no libcuda
isn't judged: that is said, and no more. With any such trace a libcuda that is missing is the host's fault.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import NamedTuple

BOUND_S = 30.0                # a driver that works answers within 2 s, one of a machine with eight GPUs that nobody has used for days within 15

# A thread asks and the main one says what came of it, or where it hangs: a call into a driver can't be interrupted. os._exit: such a thread
# would be waited for.
SCRIPT = r"""
import ctypes, glob, json, os, sys, threading
wanted, bound_s = int(sys.argv[1]), float(sys.argv[2])
said = {"step": "loading libcuda.so.1", "problem": "", "gpus": [], "trace": "", "cuda": 0}

def variables():
    try:
        with open("/proc/1/environ", "rb") as stream:
            pairs = stream.read().decode("utf-8", "replace").split("\0")
    except OSError:
        pairs = []
    return dict([pair.partition("=")[::2] for pair in pairs] + list(os.environ.items()))

def trace(known):
    for path in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version"):
        if os.path.exists(path):
            return path
    visible = known.get("NVIDIA_VISIBLE_DEVICES", "")
    return "NVIDIA_VISIBLE_DEVICES=" + visible if visible not in ("", "void", "none") else ""

def library(known):
    folders = [folder for folder in known.get("LD_LIBRARY_PATH", "").split(":") if folder]
    others = ["/usr/local/nvidia/lib64", "/usr/lib64", "/usr/lib/wsl/lib"] + sorted(glob.glob("/usr/lib/*-linux-gnu"))
    why = ""
    for path in [folder + "/libcuda.so.1" for folder in folders] + ["libcuda.so.1"] + [folder + "/libcuda.so.1" for folder in others]:
        if "/" in path and not os.path.exists(path):
            continue
        try:
            return ctypes.CDLL(path), ""
        except OSError as error:
            why = why or str(error)
    return None, why

class Refused(Exception):
    pass

def ask():
    known = variables()
    said["trace"] = trace(known)
    cuda, why = library(known)
    if cuda is None:
        said["problem"] = "no driver: " + why
        return

    def call(name, *arguments):
        said["step"] = name.replace("_v2", "")
        code = getattr(cuda, name)(*arguments)
        if code:
            word = ctypes.c_char_p()
            try:
                cuda.cuGetErrorName(code, ctypes.byref(word))
            except AttributeError:
                pass
            raise Refused("%s %d%s" % (said["step"], code, " (%s)" % word.value.decode("utf-8", "replace") if word.value else ""))

    at = ""
    try:
        call("cuInit", 0)
        number = ctypes.c_int(0)
        call("cuDriverGetVersion", ctypes.byref(number))
        said["cuda"] = number.value
        call("cuDeviceGetCount", ctypes.byref(number))
        if number.value < wanted:
            said["problem"] = "the driver sees %d of %d GPUs" % (number.value, wanted)
            return
        size, written = 16 << 20, os.urandom(1 << 20) * 16
        for index in range(number.value):
            at = "GPU %d: " % index
            device, context, name = ctypes.c_int(0), ctypes.c_void_p(), ctypes.create_string_buffer(200)
            call("cuDeviceGet", ctypes.byref(device), index)
            call("cuDeviceGetName", name, 199, device)
            said["gpus"].append(name.value.decode("utf-8", "replace"))
            call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
            memory, back = ctypes.c_uint64(0), ctypes.create_string_buffer(size)
            call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
            call("cuMemcpyHtoD_v2", memory, written, ctypes.c_size_t(size))
            call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(size))
            if back.raw != written:
                said["problem"] = at + "its memory gives back something else than was written"
                return
            call("cuMemFree_v2", memory)
            call("cuCtxDestroy_v2", context)
    except (Refused, AttributeError) as error:
        said["problem"] = at + str(error)

def guarded():
    try:
        ask()
    except Exception as error:
        said["problem"] = said["problem"] or "%s: %s" % (type(error).__name__, error)

thread = threading.Thread(target=guarded)
thread.daemon = True
thread.start()
thread.join(bound_s)
if thread.is_alive():
    said["problem"] = "%s doesn't come back within %g s" % (said["step"], bound_s)
print("\nGPURUN-GPU " + json.dumps(said))
sys.stdout.flush()
os._exit(0)
"""


class Verdict(NamedTuple):
    """`problem`: why the GPUs can't be used, "" when they can or nothing is known of any. `text`: what to tell the user."""

    problem: str
    text: str


def command(python: str, count: int, bound_s: float = BOUND_S) -> str:
    """For a shell there; its stdin is SCRIPT."""
    return f"exec {shlex.quote(python)} -I - {count} {bound_s:g}"


def verdict(code: int, stdout: bytes, last_lines: str) -> Verdict:
    """What the program found. `last_lines`: of what it wrote, for one that ended without its line, as a driver that crashes makes it."""
    found = re.findall(rb"^GPURUN-GPU (\{.*\})\r?$", stdout, re.M)
    try:
        said = json.loads(found[-1])
        problem, names, trace, cuda = str(said["problem"]), [str(name) for name in said["gpus"]], str(said["trace"]), int(said["cuda"])
    except (IndexError, ValueError, KeyError, TypeError):
        return Verdict(f"the program that asks its driver ended without an answer (exit code {code}): {' '.join(last_lines.split())[-200:]}", "")
    if problem.startswith("no driver") and not trace:
        return Verdict("", "no trace of an NVIDIA GPU in it, so none was tried")
    if problem:
        return Verdict(_line(problem + (f", but there is {trace}" if problem.startswith("no driver") else "")), "")
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return Verdict("", _line(f"its GPU works: {kinds}, driver for CUDA {cuda // 1000}.{cuda % 1000 // 10}"))


def _line(text: str) -> str:
    """The node's words, as one short line that no terminal takes for more."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:300]
