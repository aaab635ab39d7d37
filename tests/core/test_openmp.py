"""Advice for machines that several programs share."""

import logging

import pytest

import foredraft
import tiny
from foredraft.core.openmp import crowded


@pytest.mark.parametrize(
    ("busy", "cores", "advice"),
    [
        (0.4, 2, None),
        (1.0, 2, "OMP_NUM_THREADS=1"),
        (7.0, 2, "2.0 of 2 cores"),
        (5.0, 8, "OMP_NUM_THREADS=3"),
        (9.0, 1, None),
    ],
)
def test_the_advice_is_for_machines_with_busy_cores(
    busy: float, cores: int, advice: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (busy, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    foredraft.load(tiny.build(), None).close()
    assert [advice in record.getMessage() for record in caplog.records] == ([] if advice is None else [True])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert crowded() is None
