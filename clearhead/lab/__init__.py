"""The laboratory: claims about the Transformer, each made into an experiment that runs here and says what it found.

An experiment is a file and a function of one name. It takes its sizes and a seed, and returns a `Result`: a table, the
claim, what was measured against it, and a figure. Where the claim is about a part of the package, that part runs.
"""
