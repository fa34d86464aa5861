"""Files to token shards, against the batch encoding of `tokenizers` alone; and the memory it takes as text grows."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from clearhead.configs.data import BytePairConfig
from clearhead.data import build, documents, standard_library
from clearhead.tokenize import Tokenizer, make

from .turns import take_turns

SIZE = 50_000_000  # bytes of text


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(BytePairConfig(vocabulary=8192), standard_library().texts()).save(folder)
        speed(folder)
        for size in (10_000_000, SIZE):
            command = [sys.executable, "-m", "benchmarks.tokenising", str(folder), str(size)]
            peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            print(f"peak memory of a process that shards {size / 1e6:.0f} MB: {peak} MB")


def speed(folder: Path) -> None:
    paths = sources(SIZE)
    texts = [path.read_bytes().decode() for path in paths]
    size = sum(len(text.encode()) for text in texts)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True  # a text is only text for both
    counts: dict[str, int] = {}
    work: dict[str, list[float]] = {"tokenizers.encode_batch": [], "clearhead, files to shards": []}

    def alone() -> int:
        return sum(map(len, theirs.encode_batch(texts)))

    def ours() -> int:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        shards = build(documents(paths), Tokenizer.load(folder), folder / "shards")
        return len(shards) - shards.documents  # without the end of each document

    def watched(name: str, run: Callable[[], int]) -> Callable[[], None]:
        def watch() -> None:
            start = time.process_time()
            counts[name] = run()
            work[name].append(time.process_time() - start)

        return watch

    seconds = take_turns({name: watched(name, run) for name, run in zip(work, (alone, ours), strict=True)}, rounds=5)
    assert len(set(counts.values())) == 1, counts
    print(f"{size / 1e6:.1f} MB in {len(paths):,} files, {counts.popitem()[1]:,} tokens")
    for name, taken in seconds.items():
        share = seconds["tokenizers.encode_batch"] / taken
        core_seconds = statistics.median(work[name])
        print(f"  {name:<28} {size / taken / 1e6:6.2f} MB/s {share:7.1%}   {core_seconds:6.1f} core seconds")


def sources(size: int) -> list[Path]:
    """Python files of the installed packages, up to a size."""
    found, total = [], 0
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        data = path.read_bytes()
        if total >= size:
            break
        if data and b"\0" not in data and decodes(data):
            found.append(path)
            total += len(data)
    return found


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return not data.startswith(b"\xef\xbb\xbf")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        place = Path(sys.argv[1])
        build(documents(sources(int(sys.argv[2]))), Tokenizer.load(place), place / sys.argv[2])
        status = Path("/proc/self/status").read_text()
        print(next(int(line.split()[1]) // 1000 for line in status.splitlines() if line.startswith("VmHWM")))
