"""Join records into one report, and write it as JSON, Markdown and HTML.

A report is made from records, and optionally a baseline, so it can be rendered years later without
any framework. `load` reads records and rejects those that do not belong together; `writing.build`
assembles a `Report` (see `model`) with the help of `tables`, `cards`, `accuracy` and `trend`;
`page` renders it as Markdown and HTML. `wording` holds the words that all pages share. The other
modules use records too: `changes`, `gate`, `ci`, `figures` and `publishing`.
"""
