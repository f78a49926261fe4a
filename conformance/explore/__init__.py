"""Search for problems that an implementation gets wrong, and shrink them.

A search draws recipes (`recipe`, `drawing`), runs the implementation on their problems (`search`,
`trial`), and makes a failing problem smaller (`shrinking`). The problem is saved as a case file,
which the gate can run again, and as a program that reproduces the failure (`script`). `survey`
searches in every mode, and reports each class of failures once (`classes`).
"""
