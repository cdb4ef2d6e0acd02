"""Golden files: the texts of passes and listings, compared exactly."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def check_golden(name: str, text: str) -> None:
    """Compares with a golden file; with UPDATE_GOLDEN=1 in the environment, writes it first."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()
