"""Us and the peers, in turns, in one process: `python -m benchmarks [NAME…]` prints ratios."""
