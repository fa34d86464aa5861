"""Make a model write JSON that follows a schema, whatever it would have written otherwise.

    python examples/structured_generation.py            # an untrained model: valid JSON, random content
    python examples/structured_generation.py MODEL      # your own checkpoint

Needs the extra `grammar` (llguidance). The command does the same: clearhead generate MODEL PROMPT --json-schema FILE
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import clearhead

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "student": {"type": "boolean"},
    },
    "required": ["name", "age", "student"],
    "additionalProperties": False,
}


def write_json(model: str, prompt: str) -> dict[str, object]:
    """What the model writes after `prompt`, parsed."""
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder) / "schema.json"
        schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
        options = ["--json-schema", str(schema), "--temperature", "1", "--seed", "0", "--max-new-tokens", "120"]
        command = [sys.executable, "-m", "clearhead", "generate", model, prompt, *options]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(model: str | None = None) -> dict[str, object]:
    found = write_json(model or str(Path(clearhead.__file__).parent / "studio" / "model"), "A person: ")
    print(json.dumps(found, ensure_ascii=False))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
