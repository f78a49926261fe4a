"""The commands of `mha-conformance`.

Each module in `conformance.cli.COMMANDS` has a function `add_parser`, which defines the options of
one or more related commands and sets the functions that run them; the other modules support these.
All command modules are imported for `--help`, so a command imports what it needs only when it runs.
"""
