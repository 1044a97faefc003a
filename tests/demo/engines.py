"""Runs engines in processes of their own: engine_process.py. Imports nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPT, ANSWER, KNOWN = 40, 24, 18
"""Tokens: of the prompt, of the whole answer, and of the part of it that the next turn begins with."""
PAGE = 4


def engine(role: str, store: str, transfer: Path) -> dict[str, Any]:
    """What an engine in this role says at its end."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    command = [sys.executable, str(HERE / "engine_process.py"), role, store, str(transfer)]
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def answer_without_a_cache(transfer: Path) -> list[int]:
    """The whole answer, also written down for the engines that take part."""
    answer = engine("plain", "none", transfer)["answer"]
    Path(f"{transfer}.json").write_text(json.dumps(answer))
    return answer
