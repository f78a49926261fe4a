"""The commands of `mha-conformance`, one module each.

Each module has a function `add_parser`, which defines the command's options and sets the function
that runs it. All modules are imported for `--help`, so a command imports what it needs only when it
runs.
"""
