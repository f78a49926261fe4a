"""Settings for the suite's own tests."""

import os

# Arrays are tiny: more threads only wait for each other, the more so under xdist.
os.environ.setdefault("OMP_NUM_THREADS", "1")
