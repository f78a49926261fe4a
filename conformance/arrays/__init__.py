"""Judge arrays that somebody has: no implementation is called, and nothing is declared.

`given` reads arrays of any framework and finds out what their axes and masks may mean. `files`
reads them from files. `diagnosis` judges an output and names the mistake that explains it, with the
hypotheses of `conformance.causes` and those of `ports`; `tiles` does so for long outputs, `figure`
draws it. `configuration` reads a model's configuration, `layers` judges a layer by its weights, and
`models` finds the attention of a model that differs from another one's. `noise` gives σ for tests
of one's own, and `between` compares two outputs, or two callables.
"""
