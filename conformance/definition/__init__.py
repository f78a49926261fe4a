"""The definition: problems, the reference answer with its noise, and how answers are compared."""
