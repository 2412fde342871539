"""`gpurun` and `python -m gpurun` begin here."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # while modules load, Ctrl-C just ends: Python's way is a traceback

from gpurun.cli import main   # noqa: E402

if __name__ == "__main__":
    main()
