"""Several processes train one head together."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainees import SHORT, log_of, save_target, save_texts, train_head, weights_of

from foredraft.train.heads.medusa_hydra import Options
from processes import two_processes

HALF = """
import sys
from dataclasses import replace
from pathlib import Path
from foredraft.train.heads.medusa_hydra import Options
from trainees import SHORT, train_head
train_head("medusa", Path(sys.argv[1]), Path(sys.argv[2]), replace(SHORT, batch=1), recipe_options=Options(share=1.0))
"""


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_twice_the_batch(tmp_path: Path):
    save_target(tmp_path / "target")
    save_texts(tmp_path / "texts.jsonl")
    (tmp_path / "half.py").write_text(HALF)
    two_processes(tmp_path / "half.py", tmp_path, tmp_path / "two", folder=Path(__file__).parent)
    train_head("medusa", tmp_path, tmp_path / "one", replace(SHORT, batch=2), recipe_options=Options(share=1.0))
    alone, together = (weights_of(tmp_path / name) for name in ("one", "two"))
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-3, atol=1e-5)
    logs = [log_of(tmp_path / name) for name in ("one", "two")]
    assert [line["tokens"] for line in logs[0]] == [line["tokens"] for line in logs[1]], "each line once"
    assert (tmp_path / "two" / "head" / "config.json").exists()
