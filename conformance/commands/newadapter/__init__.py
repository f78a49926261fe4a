"""`mha-conformance new-adapter`: a commented adapter, its test and a build, to begin with.

What is written runs as it is: an attention that conforms, to be replaced by one's own.
"""
