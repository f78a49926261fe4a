"""The catalogue of cases: shape families; patterns of masks, biases and inputs; and case files."""
