"""Code that loops, dies, does not parse or cannot import: the report says so, and other parts are still checked."""

import pytest

from clearhead.checker.check import check_file

GOOD = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""


def checked(tmp_path, text: str, seconds: float = 10.0):
    path = tmp_path / "learner.py"
    path.write_text(text, encoding="utf-8")
    return check_file(str(path), seconds=seconds)


def by_name(report, name: str):
    return next(part for part in report.parts if part.name == name)


@pytest.mark.parametrize(
    ("body", "key", "detail"),
    [
        ("while True: pass", "timeout", "shapes"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crash", "SIGILL"),
        ("import os; os._exit(3)", "ended-process", "3"),
        ("import os; os._exit(0)", "ended-process", "0"),
        ("import sys; sys.exit(0)", "ended-process", ""),
        ("import os; os.fork() and os._exit(0)", "ended-process", ""),
        ("np.zeros(1 << 40)", "memory", ""),
        ("raise ValueError('no')", "cannot-run", "ValueError: no"),
        ("raise NotImplementedError", "not-written", ""),
        ("pass", "not-written", ""),
        ("import labml; labml.x", "cannot-run", "labml"),
    ],
)
def test_a_part_that_fails_is_not_checked(tmp_path, body: str, key: str, detail: str) -> None:
    text = GOOD + f"def attention(q, k, v):\n    {body}\n"
    report = checked(tmp_path, text, seconds=3.0)
    assert by_name(report, "softmax").passes()
    bad = by_name(report, "attention")
    assert [d.key for d in bad.diagnostics][-1:] == [key] or key == "memory"
    assert detail in str(bad.diagnostics[-1].values)
    assert bad.verdict == report.verdict == "unchecked"
    assert report.exit_code() == 3


def test_a_forgotten_return_is_named(tmp_path) -> None:
    report = checked(tmp_path, "def softmax(x):\n    y = x * 2\n")
    assert [d.key for d in report.diagnostics] == ["no-return"]
    assert report.exit_code() == 1


WRITES = "import os\nfor fd in range(3, 60):\n    try: os.write(fd, {})\n    except OSError: pass\nos._exit(0)"
FORGERIES = (WRITES.format("b'{\"complete\": true}\\n'"), WRITES.format("b'rubbish\\n\\xff{'"))


@pytest.mark.parametrize("code", FORGERIES)
def test_messages_without_the_token_do_not_count(tmp_path, code: str) -> None:
    body = "".join(f"    {line}\n" for line in code.splitlines())
    report = checked(tmp_path, f"def softmax(x):\n{body}")
    assert [d.key for d in report.diagnostics] == ["ended-process"]


def test_network_and_writes_are_blocked(tmp_path) -> None:
    """Where the kernel offers it; the report says whether it does."""
    target = tmp_path / "written.txt"
    text = f"""
import socket
import numpy as np
def softmax(x):
    try:
        open({str(target)!r}, "w").write("x")
    except OSError:
        pass
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError as error:
        if error.errno != 101:
            raise ValueError(error)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""
    report = checked(tmp_path, text)
    assert report.confined is not None
    assert target.exists() != report.confined["writes"]
    if report.confined["network"]:
        assert report.ok


def test_a_syntax_error_is_shown_with_its_line(tmp_path) -> None:
    report = checked(tmp_path, "import numpy as np\ndef softmax(x:\n    return x\n")
    assert report.syntax is not None
    assert report.syntax["line"] == 2
    assert not report.ok
    assert "syntax error in line 2" in str(report)


def test_an_import_that_fails_and_a_line_that_fails(tmp_path) -> None:
    report = checked(tmp_path, "import no_such_module\n" + GOOD + "y = softmax(undefined)\n")
    assert [(p["line"], p["is_import"]) for p in report.problems] == [(1, True), (7, False)]
    assert by_name(report, "softmax").passes()


def test_loops_and_training_at_the_top_level_are_not_run(tmp_path) -> None:
    report = checked(tmp_path, GOOD + "while True:\n    pass\n", seconds=5.0)
    assert report.ok


def test_a_crash_keeps_earlier_diagnostics(tmp_path) -> None:
    text = """
import os, numpy as np
calls = []
def softmax(x):
    calls.append(0)
    if len(calls) > 25:
        os.abort()
    e = np.exp(x - x.max())
    return e / e.sum()
"""
    keys = [f.key for f in checked(tmp_path, text).diagnostics]
    assert "crash" in keys or "softmax-everything" in keys


def test_a_numpy_file_does_not_load_torch(tmp_path) -> None:
    import subprocess
    import sys

    (tmp_path / "learner.py").write_text(GOOD + "import sys\nassert 'torch' not in sys.modules\n")
    code = "import sys, clearhead; print(clearhead.check(sys.argv[1]).ok, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "learner.py")], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_nothing_to_check(tmp_path) -> None:
    report = checked(tmp_path, "x = 1\n")
    assert [f.key for f in report.diagnostics] == ["nothing-found"]
    assert not report.ok
