"""Search for problems that an implementation answers wrongly, and make the smallest of them.

A search draws recipes (`recipe`, `search`), puts them to the implementation (`trial`), and
makes a failure smaller, array by array (`shrinking`). What it found is kept as a case that the gate
can run again (`casefile`), and as a program that shows it without this suite (`script`).
"""
