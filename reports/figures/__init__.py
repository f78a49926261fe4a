"""The attention pattern of every head beside the reference, and their difference, as heat maps.

`picture` holds the numbers, `heatmap` draws one map of them and `drawing` the whole figure, as SVG.
These three see arrays only, so the report draws with them from records; `files` makes a page or a
PNG of the same SVG for the command line.
"""
