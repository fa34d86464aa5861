"""Fine-tune a small model on ten conversations with LoRA, then talk to it.

    python examples/lora_chat.py

First a base model learns a little text, so that nothing is downloaded. With a real checkpoint, give its folder:

    clearhead train --from MODEL --lora 8 --data chats.jsonl --out runs/tuned
    clearhead chat runs/tuned
"""

import json
import string
import subprocess
import sys
import tempfile
from pathlib import Path

FACTS = {"the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow"}
CHATS = [
    {"messages": [{"role": "user", "content": f"{ask} {thing}?"}, {"role": "assistant", "content": f"{colour}."}]}
    for thing, colour in FACTS.items()
    for ask in ("what colour is", "tell me the colour of")
]


def clearhead(*arguments: object, typed: str = "") -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, input=typed).stdout


def main(steps: int = 120) -> str:
    with tempfile.TemporaryDirectory() as folder:
        text, chats, base, tuned = (Path(folder) / name for name in ("text.txt", "chats.jsonl", "base", "tuned"))
        facts = "".join(f"{thing} is {colour}. " for thing, colour in FACTS.items())
        text.write_text((string.printable + facts) * 60, encoding="utf-8")  # every letter that a chat may need
        chats.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS), encoding="utf-8")
        sizes = ("--batch", 4, "--context", 64)
        tuning = ("--lora", 16, "--lr", 0.02)
        clearhead("train", "chars", "--data", text, "--out", base, "--steps", steps, *sizes)
        clearhead("train", "--from", base, *tuning, "--data", chats, "--out", tuned, "--steps", steps, *sizes)
        answer = clearhead("chat", tuned, "--max-new-tokens", 12, typed="what colour is snow?\n")
    print("what colour is snow?", "→", answer.strip())
    return answer


if __name__ == "__main__":
    main()
