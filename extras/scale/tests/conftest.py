"""The modules that tests share, and the rule of all tests: no warnings of a library that logs."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
torch.set_num_threads(1)
