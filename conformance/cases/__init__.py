"""The case catalogue: shape families, patterns of masks and biases, regimes, and the cases."""
