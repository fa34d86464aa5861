"""`python -m benchmarks` runs all, `python -m benchmarks attention` one."""

import sys
from importlib import import_module

NAMES = (
    "attention",
    "sparse",
    "long_context",
    "forward",
    "tokenising",
    "time_to_loss",
    "throughput",
    "checking",
    "starting",
    "speculative",
    "looking",
    "studio",
    "mixers",
    "generation",
    "serving",
    "storms",
    "translating",
)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            sys.exit(f"there is no benchmark {name!r}; known: {', '.join(NAMES)}")
        print(f"== {name}")
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
