"""More habits, each a function of `Run`: its models and results are compared with the unsharded run's.

Apart from `run.make`, a habit is code without any sharding. `tests/test_habits.py` runs them on several meshes.
"""

from tests.habits.equal import EQUAL
from tests.habits.mended import MENDED
from tests.habits.refused import REFUSED
from tests.habits.run import Run, difference

__all__ = ["EQUAL", "MENDED", "REFUSED", "Run", "difference"]
