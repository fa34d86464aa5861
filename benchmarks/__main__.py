"""`python -m benchmarks` runs all, `python -m benchmarks attention` one; both end with one table.

--isa avx2 (or avx512, portable) builds the kernels for that instruction set. Build the peers likewise, for example
llama.cpp with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON".
"""

import argparse
import os
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


ISAS = {"avx2": "x86-64-v3", "avx512": "x86-64-v4", "portable": "portable"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; default: all")
    parser.add_argument("--isa", choices=ISAS, help="the instruction set of the kernels; default: this processor's")
    given = parser.parse_args()
    for name in given.names:
        if name not in NAMES:
            sys.exit(f"there is no benchmark {name!r}; known: {', '.join(NAMES)}")
    if given.isa is not None:
        os.environ["CLEARHEAD_MARCH"] = ISAS[given.isa]
    from .results import FOUND, processor_name, save, table

    for name in given.names or NAMES:
        print(f"== {name}")
        import_module(f"benchmarks.{name}").main()
    if FOUND:
        print(f"\n{processor_name()}\n{table(FOUND)}\nAdded to {save(FOUND)}.")


if __name__ == "__main__":
    main()
