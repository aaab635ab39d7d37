"""What was learned outlives the process: killed, damaged, or out of disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from online_cases import draft, generator, same, serve, target, weights

from foredraft.core.errors import DataError, OptionError
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.online.method import Online
from foredraft.engine.generator import Generator
from foredraft.files.provenance import fingerprint
from processes import disk_for, killed_after

KILLED = """
import sys
from online_cases import generator, stream
g, online = generator("draft_model", passes=1, folder=sys.argv[1])
prompts = stream(64)
for begin in range(0, 64, 4):
    g.generate(prompts[begin : begin + 4], max_new_tokens=12)
    print(begin + 4, flush=True)
    if begin + 4 == 20:
        sys.stdin.read()  # until it is killed
"""


def begun(folder: Path, name: str = "draft_model", **options: Any) -> tuple[Generator, Online]:
    return generator(name, passes=1, folder=str(folder), **options)


@pytest.mark.slow
def test_a_killed_service_goes_on_from_its_last_interval(tmp_path: Path):
    """Killed after 20 requests, of which the last 4 had not been learned from; then it is as one that was not."""
    killed_after(["4", "8", "12", "16", "20"], KILLED, tmp_path / "killed", folder=Path(__file__).parent)
    whole, undisturbed = begun(tmp_path / "whole")
    serve(whole, range(0, 16, 4))
    again, online = begun(tmp_path / "killed")
    assert online.version == undisturbed.version == 2 and online.reports == undisturbed.reports
    assert same(weights(online), weights(undisturbed))
    served = online._adapter.served.get_parameter("model.embed_tokens.weight")
    assert torch.equal(served, weights(undisturbed)["model.embed_tokens.weight"]), "and it drafts with them"
    for g in (whole, again):  # the requests since then are served again, here; moments and all go on as they were
        serve(g, range(16, 32, 4))
    assert online.version == 4 and online.reports == undisturbed.reports
    assert same(weights(online), weights(undisturbed))


def test_a_damaged_file_is_refused_and_half_a_new_one_is_ignored(tmp_path: Path):
    g, online = begun(tmp_path)
    serve(g, range(0, 16, 4))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    (tmp_path / ".online.pt.foredraft.partial").write_bytes(b"half of one")
    assert begun(tmp_path)[1].version == online.version == 2
    for damaged in (whole[: len(whole) // 2], b"", b"no version"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"Cannot read .*online.pt: delete it to start from the original draft"):
            begun(tmp_path)


def test_other_drafts_and_model_folders_are_refused(tmp_path: Path):
    g, _ = begun(tmp_path)
    serve(g, range(0, 8, 4))
    for other in ("eagle3", "medusa"):
        with pytest.raises(OptionError, match="holds a version of another draft than this one"):
            begun(tmp_path, other)
    served = target()
    with pytest.raises(OptionError, match="holds a version of another draft than this one"):
        generator(DraftModel(DraftOptions(), draft(0.3), served.vocab_size), served, folder=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptionError, match="is a model's folder, which is never changed: give online another folder"):
        begun(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="online cannot write to the folder"):
        begun(tmp_path / "file" / "folder")


def test_a_fingerprint_does_not_depend_on_how_a_net_is_served():
    plain, packed = draft(fast=False), draft(fast=True)
    assert packed.packed_layers > 0
    assert fingerprint(plain.plain_copy()) == fingerprint(packed.plain_copy())
    assert fingerprint(plain.plain_copy()) == fingerprint(plain.plain_copy().bfloat16().float())
    assert fingerprint(plain.plain_copy()) != fingerprint(draft(0.26).plain_copy())


def test_with_other_options_the_weights_go_on_and_the_moments_do_not(tmp_path: Path):
    g, online = begun(tmp_path)
    serve(g, range(0, 8, 4))
    _, other = begun(tmp_path, lr=1e-3)
    assert same(weights(other), weights(online)) and not other._trainer._optimizer.state
    _, like = begun(tmp_path)
    assert like._trainer._optimizer.state


def test_a_full_disk_ends_learning_with_a_warning_and_leaves_what_was_there(tmp_path: Path):
    g, _ = begun(tmp_path)
    serve(g, range(0, 8, 4))
    with disk_for(5000), pytest.warns(RuntimeWarning, match="has stopped learning: A version cannot be written to"):
        serve(g, range(8, 16, 4))
    serve(g, range(16, 32, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["online.pt"]
    assert begun(tmp_path)[1].version == 1
