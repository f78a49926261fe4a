"""The attention pattern of every head beside the reference, and their difference, as heat maps.

`picture` holds the numbers, `scales` turns them into colours and words, `panel` draws one heat map
and `drawing` the whole figure, as SVG. These four see arrays only, so the report draws with them
from records. For the command line, `ask` gets the numbers from an implementation, `page` and `png`
make the other two formats out of that same SVG, and `write` puts them together.
"""
