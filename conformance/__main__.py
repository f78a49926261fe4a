"""The entry point of `python -m conformance`, which is the same as `mha-conformance`."""

from conformance.cli import main

raise SystemExit(main())
