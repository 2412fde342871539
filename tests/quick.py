"""gpurun as a user runs it, with less patience: what waits for a provider in seconds waits here in hundredths. Only times are set, and what is
given up in the end has as long as a busy machine takes; a test whose matter is a time gives its own as NAME=VALUE in $GPURUN_TEST_PACE."""

from __future__ import annotations

import os
import sys

from gpurun import fleet, provider_vastai, vast_api

fleet.PACE = fleet.Pace(look_s=0.1, ending_s=0.1, create_s=0.02, offer_s=0.05, failed_s=0.05, later_s=0.5, again_s=(0.1, 0.2, 0.3), patience_s=40.0,
                         room_s=1.0, in_flight_s=30.0, tell_s=5.0)
provider_vastai.TIMES.update(settle_s=1.5, confirm_s=0.4, again_s=0.5, doubt_s=1.5)
provider_vastai.SSH_S, provider_vastai.WAY_S, provider_vastai.PAUSE_S, provider_vastai.ASK_S, provider_vastai.OFFERS_S = 30.0, 3.0, 0.1, 0.5, 1.0
vast_api.PAGE_S = 0.0
vast_api.BACKOFF_S.update({name: tuple(seconds / 30 for seconds in values) for name, values in vast_api.BACKOFF_S.items()})
for pair in os.environ.get("GPURUN_TEST_PACE", "").split():
    name, _, value = pair.partition("=")
    if name in fleet.Pace._fields:
        fleet.PACE = fleet.PACE._replace(**{name: float(value)})
    elif name in provider_vastai.TIMES:
        provider_vastai.TIMES[name] = float(value)
    elif name.upper() in ("SSH_S", "WAY_S", "ASK_S"):
        setattr(provider_vastai, name.upper(), float(value))
    elif name == "timeout_s":
        vast_api.TIMEOUT_S = float(value)
    elif name == "asking":                # of how long a question to the provider is asked again, that part
        ask = vast_api.Api._ask
        vast_api.Api._ask = lambda self, what, call, patience_s, fine=(), *, _part=float(value): ask(self, what, call, patience_s * _part, fine)
    else:
        raise SystemExit(f"tests/quick.py knows no time {name}")

if __name__ == "__main__":
    from gpurun.cli import main

    sys.argv[0] = "gpurun"
    main()
