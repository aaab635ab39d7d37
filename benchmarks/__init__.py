"""Measurements: ``python -m benchmarks`` lists the experiments, ``python -m benchmarks NAME`` runs one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for engines.py and what it imports, which are scripts
