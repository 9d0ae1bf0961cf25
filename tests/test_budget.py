"""`.ci/lines`, which fails where the code exceeds its budget."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = '''"""A module."""

def add(a, b):
    """Add.

    Returns: the sum."""
    # the sum
    return a + b
'''


@pytest.mark.parametrize(("tokens", "status"), [(6.0, 0), (5.9, 1)])
def test_lines_and_tokens_are_compared_with_the_limits(tmp_path: Path, tokens: float, status: int) -> None:
    for name, text in {
        "src/a.py": CODE,  # def add ( a , b ) : and return a + b are 8 and 4 tokens
        "stages/b.py": "",
        "tests/c.py": "1\n",
        "Makefile": "help:\n",
        ".ci/budget.toml": f'[src_and_stages]\nwhat = "code"\nmax = 8\n[tokens_per_line]\nwhat = "tokens"\nmax = {tokens}\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = subprocess.run([sys.executable, ROOT / ".ci/lines", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == status
    code, mean = done.stdout.splitlines()
    assert code.split()[1] == "8" and "outside" not in code
    assert mean.split()[1] == "6" and ("outside" in mean) == bool(status)
