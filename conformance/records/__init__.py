"""Records of runs, explorations and long problems: their formats, and reading and writing them."""
