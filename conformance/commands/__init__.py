"""The commands of `mha-conformance`.

Each module in `conformance.cli.COMMANDS` has a function `add_parser`, which defines the options of
one or more related commands and sets the functions that run them; the other modules support these.
The command modules are imported even for `--help`, so slow imports, such as those of frameworks,
are inside the functions that need them.
"""
