"""Several processes train one head together."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainees import SHORT, log_of, save_target, save_texts, train_head, weights_of

import foredraft
from foredraft.train.heads.medusa_hydra import Options

HALF = """
import sys
from dataclasses import replace
from pathlib import Path
from foredraft.train.heads.medusa_hydra import Options
from trainees import SHORT, train_head
train_head("medusa", Path(sys.argv[1]), Path(sys.argv[2]), replace(SHORT, batch=1), recipe_options=Options(share=1.0))
"""


def torchrun(script: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (Path(foredraft.__path__[0]).parent, here, here.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_twice_the_batch(tmp_path: Path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    save_target(tmp_path / "target")
    save_texts(tmp_path / "texts.jsonl")
    (tmp_path / "half.py").write_text(HALF)
    done = torchrun(tmp_path / "half.py", tmp_path, tmp_path / "two")
    if done.returncode and "Address" in done.stderr:
        pytest.skip(f"processes cannot meet here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    train_head("medusa", tmp_path, tmp_path / "one", replace(SHORT, batch=2), recipe_options=Options(share=1.0))
    alone, together = (weights_of(tmp_path / name) for name in ("one", "two"))
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-3, atol=1e-5)
    logs = [log_of(tmp_path / name) for name in ("one", "two")]
    assert [line["tokens"] for line in logs[0]] == [line["tokens"] for line in logs[1]], "each line once"
    assert (tmp_path / "two" / "head" / "config.json").exists()
