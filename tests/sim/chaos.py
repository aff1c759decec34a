"""New random histories of the Raft layer for ten minutes; `make chaos SIM=1` runs this.

MINUTES is for how long, SEED where to begin (the seconds of now, otherwise). Prints the seed of
every history that breaks a promise, as `tests.sim.history.play(seed)` plays it again, and in the
end how many there were. Ends with 1 if any did.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from tests.sim.history import play


def main() -> int:
    logging.disable(logging.CRITICAL)
    minutes = float(os.environ.get("MINUTES", "10"))
    first = seed = int(os.environ.get("SEED", time.time_ns() // 10**9))
    print(f"histories from seed {first} on, for {minutes:g} minutes", flush=True)
    began, began_cpu = time.monotonic(), time.process_time()
    events = faults = leaders = acked = broken = 0
    while time.monotonic() - began < 60 * minutes:
        outcome = play(seed)
        if outcome.violations:
            broken += 1
            print(f"seed {seed}: {outcome.violations[0]}", flush=True)
        events += outcome.events
        faults += outcome.faults
        leaders += outcome.leaders
        acked += outcome.acked
        seed += 1
    count = seed - first
    per_minute = 60 * count / (time.process_time() - began_cpu)
    print(
        f"{count} histories, {broken} violations; {events} events, {faults} faults,"
        f" {leaders} leaders, {acked} proposals acknowledged;"
        f" {per_minute:.0f} histories per minute of one core"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
