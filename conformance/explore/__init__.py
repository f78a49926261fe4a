"""Search for problems that an implementation answers wrongly, and make the smallest of them.

A search draws recipes (`recipe`, `search`), puts them to the implementation (`trial`), and makes a
failing problem smaller (`shrinking`). It is kept as a case file, which the gate can run again, and
as a program that shows the failure without this suite (`script`).
"""
