"""`python -m conformance` is `mha-conformance`."""

from conformance.cli import main

raise SystemExit(main())
