"""Experiments that test claims about Transformers.

Each experiment is one file with one function of the same name. It takes sizes and a seed, and returns a `Result`: a
table, the claim, what was measured, and a figure. Experiments run the package's own modules.
"""
