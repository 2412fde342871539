"""Whether a rented machine's GPUs work: the real program against a libcuda.so.1 that was compiled to behave badly, and whom a bad one costs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from renter import renter  # noqa: F401

from gpurun import preflight, supervise

GCC = shutil.which("gcc") or shutil.which("cc")
PYTHONS = os.environ.get("GPURUN_TEST_PYTHONS", sys.executable).split(os.pathsep)

# What the program calls, with the driver's own signatures. Memory is this process'. $FAKE says what goes wrong.
CUDA = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifndef FAKE
#define FAKE getenv("FAKE") ? getenv("FAKE") : ""
#endif
static int is(const char *what) { const char *fake = FAKE; return strcmp(fake, what) == 0; }
static int alive, current;
int cuInit(unsigned flags) {
    if (is("hangs")) for (;;) pause();
    if (is("crashes")) abort();
    return is("init fails") ? 999 : flags;
}
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = is("one is lost") ? 1 : is("none is left") ? 0 : 2; return is("none is left") ? 100 : 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index > 1; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA GeForce RTX 4090", size); return device > 1; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    if (is("second context fails") && device == 1) return 46;
    current = device; *context = &alive; alive++; return flags;
}
int cuMemAlloc_v2(unsigned long long *memory, size_t size) {
    if (is("full")) return 2;
    *memory = (unsigned long long)malloc(size); return size != 16 << 20;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
    if (is("second hangs") && current == 1) for (;;) pause();
    memcpy(to, (void *)from, size); if (is("forgets")) ((char *)to)[size - 1] ^= 1; return 0;
}
int cuMemFree_v2(unsigned long long memory) { free((void *)memory); return 0; }
int cuCtxDestroy_v2(void *context) { return context != &alive || --alive; }
#ifndef NAMELESS
int cuGetErrorName(int code, const char **name) {
    *name = code == 999 ? "CUDA_ERROR_UNKNOWN" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE" :
            "CUDA_ERROR_NO_DEVICE";
    return 0;
}
#endif
"""


def compiled(folder: Path, *options: str) -> Path:
    """A folder with such a libcuda.so.1."""
    if GCC is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(parents=True)
    argv = [GCC, "-shared", "-fPIC", "-x", "c", *options, "-o", str(folder / "libcuda.so.1"), "-"]
    done = subprocess.run(argv, input=CUDA.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda") / "lib")


def ask(folder: Path | None, fake: str = "", wanted: int = 1, bound_s: float = 30.0, traces: Path = Path("/nowhere"),
        python: str = sys.executable, environ: bytes | None = None) -> preflight.Verdict:
    """What gpurun makes of a machine with that driver. `traces`: a root with what a container shows of its GPUs, instead of this machine's."""
    script = preflight.SCRIPT
    for path in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/proc/1/environ"):
        assert f'"{path}"' in script
        script = script.replace(f'"{path}"', repr(f"{traces}{path}"))
    if environ is not None:
        (traces / "proc/1").mkdir(parents=True)
        (traces / "proc/1/environ").write_bytes(environ)
    env = {"PATH": os.environ["PATH"], "FAKE": fake, **({"LD_LIBRARY_PATH": str(folder)} if folder else {})}
    done = subprocess.run(["sh", "-c", preflight.command(python, wanted, bound_s)], input=script.encode(), env=env, capture_output=True, timeout=60)
    return preflight.verdict(done.returncode, b"Welcome!\n" + done.stdout, done.stderr.decode(errors="replace"))


def test_gpus_that_work_are_named_whatever_python_the_machine_has(cuda):
    assert len(PYTHONS) >= 1
    for python in PYTHONS:
        assert ask(cuda, wanted=2, python=python) == ("", "its GPU works: 2 × NVIDIA GeForce RTX 4090, driver for CUDA 12.8"), python


@pytest.mark.parametrize("fake, problem", [
    ("init fails", "cuInit 999 (CUDA_ERROR_UNKNOWN)"),
    ("one is lost", "the driver sees 1 of 2 GPUs"),
    ("none is left", "cuDeviceGetCount 100 (CUDA_ERROR_NO_DEVICE)"),
    ("second context fails", "GPU 1: cuCtxCreate 46 (CUDA_ERROR_DEVICE_UNAVAILABLE)"),
    ("full", "GPU 0: cuMemAlloc 2 (CUDA_ERROR_OUT_OF_MEMORY)"),
    ("forgets", "GPU 0: its memory gives back something else than was written"),
])
def test_what_is_wrong_with_a_gpu_is_said_with_the_drivers_own_word(cuda, fake, problem):
    assert ask(cuda, fake, wanted=2) == (problem, "")


@pytest.mark.parametrize("fake, step", [("hangs", "cuInit"), ("second hangs", "cuMemcpyDtoH")])
def test_a_driver_that_hangs_costs_no_more_than_the_bound(cuda, fake, step):
    began = time.monotonic()
    assert ask(cuda, fake, bound_s=4) == (f"{step} doesn't come back within 4 s", "")
    assert time.monotonic() - began < 25 and preflight.BOUND_S == 30


def test_a_driver_that_takes_the_program_down_is_a_fault_too(cuda):
    found = ask(cuda, "crashes")
    assert "ended without an answer (exit code " in found.problem and found.text == ""


def test_a_driver_that_names_no_errors_or_lacks_a_call_has_a_number_or_the_calls_name(tmp_path):
    assert ask(compiled(tmp_path / "nameless", "-DNAMELESS"), "init fails").problem == "cuInit 999"
    assert "cuCtxCreate_v2" in ask(compiled(tmp_path / "old", "-DcuCtxCreate_v2=cuCtxCreate")).problem


def no_driver() -> None:
    if not ask(None).text.startswith("no trace"):
        pytest.skip("this machine has a CUDA driver")


def test_a_container_without_any_trace_of_a_gpu_isnt_judged():
    no_driver()
    assert ask(None) == ("", "no trace of an NVIDIA GPU in it, so none was tried")


@pytest.mark.parametrize("trace", ["/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "NVIDIA_VISIBLE_DEVICES=all"])
def test_a_container_that_should_have_a_gpu_and_has_no_driver_is_of_no_use(trace, tmp_path):
    no_driver()
    environ = None
    if trace.startswith("/"):
        path = tmp_path / trace[1:]
        path.parent.mkdir(parents=True)
        path.touch()
    else:
        environ = f"PATH=/bin\0{trace}\0".encode()
    found = ask(None, traces=tmp_path, environ=environ)
    assert found.problem.startswith("no driver: libcuda.so.1: ") and found.problem.endswith(f"but there is {tmp_path if environ is None else ''}{trace}")


@pytest.mark.parametrize("value", ["void", "none", ""])
def test_an_image_that_wants_no_gpu_leaves_no_trace(value, tmp_path):
    no_driver()
    assert ask(None, traces=tmp_path, environ=f"NVIDIA_VISIBLE_DEVICES={value}\0".encode()).problem == ""


def test_the_driver_is_found_where_only_the_containers_first_process_would_look(cuda, tmp_path):
    """A session over SSH has the image's LD_LIBRARY_PATH nowhere; a job has it."""
    found = ask(None, traces=tmp_path, environ=f"LD_LIBRARY_PATH=/nowhere:{cuda}\0".encode())
    assert found == ("", "its GPU works: 2 × NVIDIA GeForce RTX 4090, driver for CUDA 12.8")


@pytest.mark.parametrize("line", [b"", b"GPURUN-GPU {", b'GPURUN-GPU {"problem": ""}', b'GPURUN-GPU []', b"no sessions\n"])
def test_a_session_that_says_nothing_of_the_kind_is_no_working_gpu(line):
    assert "without an answer (exit code 1): last words" in preflight.verdict(1, line, "  last\n words").problem


def test_what_the_node_says_is_one_printable_line():
    said = b'GPURUN-GPU {"problem": "", "gpus": ["\\u001b[2J\\nx"], "trace": "", "cuda": 13000}'
    assert preflight.verdict(0, said, "").text == "its GPU works: 1 ×  [2J x, driver for CUDA 13.0"


# ---- whom it costs -------------------------------------------------------------------------------------------------------------

def rented(renter: Any, folder: Path) -> dict[str, Any]:
    """Quirks of a machine whose sessions find that driver."""
    home = folder / "home"
    (home / "cuda").mkdir(parents=True)
    shutil.copy(folder / "libcuda.so.1", home / "cuda")
    (home / ".bashrc").write_text("export LD_LIBRARY_PATH=/root/cuda\n")      # bash reads it for a command over SSH
    return {"home": home}


def test_a_host_whose_gpu_cant_be_used_is_left_for_the_next_and_avoided(renter, tmp_path):
    from vast_server import Quirks, offer
    bad, good = (compiled(tmp_path / name, *options) for name, options in (("bad", ['-DFAKE="init fails"']), ("good", ['-DFAKE=""'])))
    renter.server.offers[:] = [offer(machine_id=1, dph_base=0.2), offer(machine_id=2, dph_base=0.3)]
    renter.server.script(1, machine=Quirks(**rented(renter, bad)))
    renter.server.script(2, machine=Quirks(**rented(renter, good)))
    done = renter.gpurun("up")
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert "is of no use: its GPU can't be used: cuInit 999 (CUDA_ERROR_UNKNOWN)" in said
    assert "its GPU works: 2 × NVIDIA GeForce RTX 4090" in said and "Traceback" not in said
    (one,) = renter.server.alive()
    assert one.offer["machine_id"] == 2
    avoided = json.loads((renter.home / ".config/gpurun/machines/avoid.json").read_text())
    assert list(avoided) == ["1"] and "cuInit 999" in avoided["1"]["why"]
    assert "its GPU" not in renter.said("up")[1]
    for pid, line in one.machine.processes().items():
        if " serve " in line:
            supervise.send(pid, signal.SIGKILL)         # a run may be at work with the GPU, and have all its memory
    code, said = renter.said("up")
    assert code == 0 and "connecting over SSH" in said and "its GPU" not in said and renter.server.alive() == [one]
    assert renter.gpurun("down").returncode == 0
    renter.ended()
