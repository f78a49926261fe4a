"""From one convention to another: masks and weights."""
