"""``foredraft train`` from its options to a head that drafts."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from trainees import assert_drafts_losslessly, log_of, target, weights_of

import foredraft
from foredraft.cli import main
from foredraft.cli.exit_status import Terminated
from foredraft.cli.train import Progress
from foredraft.core.errors import DrafterError, OptionError
from foredraft.files.outputs import locked
from foredraft.heads.formats import load_head
from foredraft.train.heads import validate

SHORT = ("--tokens", "128", "--length", "32", "--batch", "2", "--precision", "fp32", "--report", "1", "--device", "cpu")


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Train = Callable[..., Ended]


@pytest.fixture
def train(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs ``foredraft train`` on the tiny target with short validations."""
    for name in ("FORCE_COLOR", "FOREDRAFT_DEBUG", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    for name, value in (("_PROMPT", 8), ("_NEW", 6), ("_PROMPTS", 3)):
        monkeypatch.setattr(validate, name, value)

    def train(method: str, *more: str, data: str = str(place / "texts.jsonl")) -> Ended:
        capsys.readouterr()
        given = ["--model", str(place / "target"), "--data", data] if data else []
        status = main(["train", method, *given, *more])
        return Ended(status, *capsys.readouterr())

    return train


@pytest.mark.parametrize(
    ("method", "drafter", "more"),
    [
        ("eagle3", "eagle3", ("--vocabulary", "40", "--recipe", "steps=3", "--store", "0.01")),
        ("eagle", "eagle1", ("--recipe", "noise=0.1")),
        ("medusa", "medusa", ("--heads", "2", "--own-heads")),
        ("hydra++", "hydra", ("--heads", "2")),
        ("glide", "glide", ("--recipe", "block=3", "--store", "0.01")),
    ],
)
def test_a_head_is_trained_and_drafts(
    train: Train, place: Path, tmp_path: Path, method: str, drafter: str, more: tuple
):
    out = tmp_path / "out"
    ended = train(method, "--out", str(out), *SHORT, *more)
    assert (ended.status, ended.out) == (0, ""), ended.err
    assert f"The head is in {out / 'head'}. To use it: --drafter {drafter}:{out / 'head'}\n" in ended.err
    assert "step 2 of 2 · loss " in ended.err and "validation: loss" in ended.err and "acceptance_length" in ended.err
    assert [line["step"] for line in log_of(out)] == [1, 2, 2]
    assert_drafts_losslessly(place / "target", f"{drafter}:{out / 'head'}")


def test_a_glide_head_drafts_by_its_folder_alone_and_under_cape(train: Train, place: Path, tmp_path: Path):
    """Its tensors and its config are those that were trained; draft models have no such files."""
    assert train("glide", "--out", str(tmp_path / "out"), *SHORT, "--cold").status == 0
    head = tmp_path / "out" / "head"
    for spec, name in ((str(head), "glide"), (f"cape:{head}", "cape")):
        assert_drafts_losslessly(place / "target", Path(spec) if name == "glide" else spec)
        with foredraft.load(str(place / "target"), Path(spec) if name == "glide" else spec, device="cpu") as generator:
            assert generator.generate("abacus", max_new_tokens=2).stats.method == name
    net, kept = load_head(str(head), target()).net, weights_of(tmp_path / "out")
    for tensor, value in net.state_dict().items():
        assert torch.equal(value, kept[tensor].bfloat16().float()), tensor
    with pytest.raises(DrafterError, match="holds foredraft glide weights: use it with cape, glide, not with eagle3"):
        foredraft.load(str(place / "target"), f"eagle3:{head}", device="cpu")
    with pytest.raises(OptionError, match="draft_options apply only to a draft model"):
        foredraft.load(str(place / "target"), f"glide:{head}", device="cpu", draft_options={"revision": "v2"})


def test_a_target_is_tuned_with_its_heads(train: Train, tmp_path: Path):
    out, more = tmp_path / "out", ("--heads", "2", "--recipe", "alone=0.5")
    ended = train("medusa2", "--out", str(out), *SHORT, *more)
    assert ended.status == 0, ended.err
    head = out / "head"
    assert f"are in {head}. To use them: --model {head} --drafter medusa:{head}\n" in ended.err


def test_a_draft_is_pruned_and_drafts(train: Train, place: Path, tmp_path: Path):
    out = tmp_path / "out"
    ended = train("prune", "--out", str(out), *SHORT, "--shape", "layers=1,heads=2", "--recipe", "samples=2")
    assert (ended.status, ended.out) == (0, ""), ended.err
    assert f"The draft model is in {out / 'draft'}. To use it: --drafter draft_model:{out / 'draft'}\n" in ended.err
    assert "of 3 · loss " in ended.err and "step 2 of 2 · loss " in ended.err
    assert_drafts_losslessly(place / "target", f"draft_model:{out / 'draft'}")


def test_a_draft_with_another_tokenizer_is_trained(train: Train, tmp_path: Path):
    drafts = ("--draft", "sample-draft", "--recipe", "loss=text")
    ended = train("draft", "--out", str(tmp_path), *SHORT, *drafts)
    assert (ended.status, ended.out) == (0, ""), ended.err
    assert (
        f"The draft model is in {tmp_path / 'draft'}. To use it: --drafter universal:{tmp_path / 'draft'}\n"
        in ended.err
    )


def test_a_target_learns_to_exit_early(train: Train, tmp_path: Path):
    out = tmp_path / "out"
    ended = train("early_exit", "--out", str(out), *SHORT, "--recipe", "exit=2", "--recipe", "curriculum=gradual")
    assert (ended.status, ended.out) == (0, ""), ended.err
    use = f"--model {out / 'model'} --drafter early_exit,assistant_early_exit=2\n"
    assert f"The tuned target is in {out / 'model'}. To use it: {use}" in ended.err
    assert "target_perplexity" in ended.err
    assert_drafts_losslessly(out / "model", "early_exit,assistant_early_exit=2")


def test_drafts_are_boosted(train: Train, place: Path, tmp_path: Path):
    drafts = ("--draft", str(place / "target"), "--draft", str(place / "target"))
    ended = train("boost", "--out", str(tmp_path), *SHORT, *drafts, "--recipe", "easy=0.5")
    assert ended.status == 0, ended.err
    assert "draft 2 of 2 trains on " in ended.err
    assert f"The draft models are in {tmp_path / '1' / 'draft'} and {tmp_path / '2' / 'draft'}." in ended.err


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("eagle4", (), "Unknown recipe 'eagle4'. Did you mean eagle"),
        ("cut", (), "Unknown recipe 'cut'. Known: "),
        ("medusa", ("--draft", "sample-draft"), "The recipe medusa has no option --draft.\n"),
        ("eagle", ("--shape", "layers=2"), "The recipe eagle has no option --shape.\n"),
        ("prune", ("--shape", "layers=2", "--own-heads"), "The recipe prune has no option --own-heads.\n"),
        ("prune", (), "prune needs --shape, e.g. layers=2,hidden=256"),
        ("prune", ("--shape", "hidden=33"), "Invalid hidden=33: the model has 32"),
        ("eagle3", ("--recipe", "step=3"), "Unknown option of the recipe eagle3 'step'. Did you mean steps?"),
        ("eagle3", ("--recipe", "steps"), "'steps' is not of the form option=value"),
        ("eagle3", ("--recipe", "steps=many"), "The option steps must be a whole number, not 'many'."),
        ("eagle3", ("--recipe", "steps=0"), "steps must be 1 or more"),
        ("eagle3", ("--batch", "0"), "batch must be 1 or more"),
        ("eagle3", ("--taps", "3", "--taps", "1"), "taps must be different layers, from low to high"),
        ("eagle3", ("--length", "4"), "Samples of 4 tokens are too short for 5 steps"),
        ("eagle3", ("--length", "4000"), "too few for 17 windows of 4000"),
        ("medusa", ("--heads", "0"), "heads must be 1 or more, not 0."),
        ("medusa", ("--device", "cuda:9"), "Training would run on "),
        ("medusa", ("--learning-rate", "1"), "--learning-rate"),
        ("medusa", ("--start", "nowhere"), "nowhere"),
        ("medusa2", ("--store", "1"), "trains the target too"),
        ("early_exit", ("--draft", "sample"), "early_exit trains a copy of the target: remove --draft."),
        ("early_exit", ("--shape", "layers=2"), "early_exit has no --shape, which is for prune."),
        ("early_exit", ("--recipe", "exit=9"), "The target has 3 layers, so exit must be 3 or less, not 9."),
        ("draft", ("--draft", "./nowhere"), "There is no model folder './nowhere'"),
        ("boost", ("--draft", "TARGET", "--draft", "sample"), "has another tokenizer than the target"),
    ],
)
def test_one_sentence_for_what_cannot_be(
    train: Train, place: Path, tmp_path: Path, method: str, more: tuple, said: str
):
    more = tuple(str(place / "target") if word == "TARGET" else word for word in more)
    ended = train(method, "--out", str(tmp_path / "out"), *SHORT, *more)
    assert (ended.status, ended.out) == (2, "") and ended.err.count("\n") == 1
    assert ended.err.startswith("foredraft: ") and said in ended.err


def test_data_that_is_not_there(train: Train, tmp_path: Path):
    out = ("--out", str(tmp_path / "out"))
    assert "No training data: give --data FILE" in train("medusa", *out, data="").err
    assert "Training data not found: 'nowhere.jsonl'" in train("medusa", *out, *SHORT, data="nowhere.jsonl").err
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"ids": [5, 96]}\n')
    assert "has the token id 96, beyond the target's vocabulary" in train("medusa", *out, *SHORT, data=str(odd)).err


def test_another_learning_rate_is_refused_where_a_run_was_begun(train: Train, tmp_path: Path):
    out = ("--out", str(tmp_path / "out"), *SHORT)
    assert train("medusa", *out).status == 0
    ended = train("medusa", *out, "--lr", "0.5")
    assert ended.status == 2 and "started with another lr; use the same options to resume it" in ended.err


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, by: type[BaseException] = KeyboardInterrupt) -> None:
    """Interrupt a run when this step is reported; 0: before the first."""
    report = Progress.report

    def interrupt(progress: Progress, line: dict[str, Any]) -> None:
        report(progress, line)
        if line.get("step") == step:
            raise by

    monkeypatch.setattr(Progress, "report", interrupt)
    if not step:
        monkeypatch.setattr("foredraft.train.loop._step", lambda *given: (_ for _ in ()).throw(by))


@pytest.mark.parametrize(("by", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_run_that_goes_on_says_so(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: type[BaseException], status: int
):
    out = ("--out", str(tmp_path / "out"), *SHORT)
    with monkeypatch.context() as patch:
        interrupted_at(patch, 1, by)
        ended = train("medusa", *out)
    said = "foredraft: Interrupted after step 1 of 2; the same command continues from there.\n"
    assert ended.status == status and ended.err.endswith(said)
    ended = train("medusa", *out, "--validate", "1", "--checkpoint", "7")
    assert ended.status == 0 and ended.err.startswith("resumed after step 1 of 2 and 0:00:0"), ended.err
    assert train("medusa", *out).err.startswith("all 2 steps were already done\n")


def test_sigterm_while_libraries_are_imported_is_not_silent(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("foredraft.cli.train._options", lambda *given: (_ for _ in ()).throw(Terminated))
    ended = train("medusa", "--out", str(tmp_path), *SHORT)
    assert ended.status == 143 and ended.err.splitlines()[-1] == "foredraft: Interrupted before the run began."


def test_an_interrupted_run_that_has_kept_nothing_says_so(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused() -> str:
        with monkeypatch.context() as patch:
            interrupted_at(patch, 0)
            ended = train("medusa", "--out", str(tmp_path), *SHORT)
        assert ended.status == 130
        return ended.err.splitlines()[-1]

    nothing = "foredraft: Interrupted before anything was saved; the same command starts over."
    assert refused() == nothing and not list(tmp_path.glob("*.pt"))
    with monkeypatch.context() as patch:
        interrupted_at(patch, 1)
        train("medusa", "--out", str(tmp_path), *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.train.heads.run._new_net", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        ended = train("medusa", "--out", str(tmp_path), *SHORT)
    assert ended.err.splitlines()[-1] == "foredraft: Interrupted; the same command continues from the last checkpoint."


def test_a_folder_in_use_and_one_that_cannot_be(train: Train, tmp_path: Path):
    with locked(tmp_path, ".lock"):
        ended = train("medusa", "--out", str(tmp_path), *SHORT)
    sentence = f"Another run uses {tmp_path}: wait until it ends, or use another folder."
    assert ended == (2, "", f"foredraft: {sentence}\n")
    (tmp_path / "file").touch()
    ended = train("medusa", "--out", str(tmp_path / "file"), *SHORT)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"Cannot write to the folder {tmp_path}" in ended.err


def test_help_shows_what_belongs_together(train: Train, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("─ Data ─", "─ Head ─", "─ Training ─", "--vocabulary", "--warmup", "eagle3"):
        assert part in shown


def test_without_accelerate(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    ended = train("medusa", "--out", str(tmp_path / "out"), *SHORT)
    assert ended.status == 2
    assert ended.err == "foredraft: Training needs the package accelerate: pip install 'foredraft[train]'.\n"
    assert main(["train", "--help"]) == 0
