"""Check a learner's implementation of a part of a Transformer, and name its mistakes.

    report = clearhead.check("my_attention.py")
    print(report)

`discover.py` finds the parts that a file defines. `run.py` runs the check of each part; the checks and their known
mistakes are in `parts/`. `sandbox.py` runs the learner's code in a child process. `messages/` holds all texts.
"""
