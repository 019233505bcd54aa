"""Measures the scheduling delay of the machine: sleeps for a tenth of a second repeatedly, and prints each
delay.

A process of its own beside a soak test, which ends it.
"""

import sys
import time

PERIOD_SECONDS = 0.1

if __name__ == "__main__":
    while True:
        due = time.monotonic() + PERIOD_SECONDS
        time.sleep(PERIOD_SECONDS)
        sys.stdout.write(f"{time.monotonic() - due:.4f}\n")
        sys.stdout.flush()
