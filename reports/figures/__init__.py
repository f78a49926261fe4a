"""The attention pattern of every head beside the reference, and their difference, as heat maps.

`picture` holds the numbers, `heatmap` draws one map of them, and `drawing` draws the whole figure
as SVG, and makes a page or a PNG of it. All of it sees arrays only, so a report draws from records.
"""
