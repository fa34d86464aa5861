"""Is my attention right, and if not, what is wrong with it?

    report = clearhead.check("my_attention.py")
    print(report)

`find` says what a file defines, `parts/` hold one check per part with its bank of known mistakes, `sandbox` runs the
learner's code, `messages/` say what was found.
"""
