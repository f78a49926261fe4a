"""Run the command line `mha-conformance` as `python -m conformance`."""

from conformance.cli import main

raise SystemExit(main())
