"""benchmarks/experiments/real_model.py: the policy against the best fixed size."""

import pytest

from benchmarks.experiments import real_model
from foredraft.bench.measure.records import Run, RunFile


def test_a_drafters_sizes_and_shapes_are_one_cell():
    """Ten tokens a second are plain decoding's; a chain has the tree's policy, and a drafter without one no cell."""
    speeds = {"none": 10, "head auto": 15, "head 4": 12, "head-chain 2": 20, "slow auto": 9, "slow 4": 5, "alone 4": 30}
    runs = [
        Run(arm, "task", ("prompt",), temperature=heat, tokens=60, decoded=60, seconds=60 / speed)
        for arm, speed in speeds.items()
        for heat in (0.0, 1.0)
    ]
    points = real_model.policy_points(RunFile(runs=runs))
    assert sorted(points) == [pytest.approx(each) for each in [(1.0, 0.9)] * 2 + [(2.0, 1.5)] * 2]
