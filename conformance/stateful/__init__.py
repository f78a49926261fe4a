"""Check layers that keep a state, such as the keys and values of the tokens that they were fed.

No definition of the layer is needed: the same text by another way must give the same outputs. The
ways are in `ways`, and the experiments that tell the cause of a difference in `causes`.
"""
