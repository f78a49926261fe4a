"""Commands of `mha-conformance`, a module each.

Each module has `add_parser`, which says how the command is called, and an action that it sets as
the parser's default. All of them are imported for `--help`, so what a command needs it imports when
it runs.
"""
