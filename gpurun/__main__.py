"""`gpurun` and `python -m gpurun` begin here."""

import gc
import signal

gc.disable()   # modules make no garbage, and looking for it costs a tenth of loading them; `cli.loaded_all` turns it on again
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # while modules load, Ctrl-C just ends: Python's way is a traceback

from gpurun.cli import main   # noqa: E402

if __name__ == "__main__":
    main()
