"""The definition of attention: problems, the reference answer with its noise, and comparison."""
