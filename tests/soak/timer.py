"""Says how late the machine itself is: sleeps a tenth of a second again and again, prints each lateness.

Started beside a soak as a process of its own; ended by it.
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
