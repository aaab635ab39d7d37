"""Distillation of whole drafts: the loss against its definition, boosting in turn."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainees import (
    SHORT,
    assert_drafts_losslessly,
    assert_same_gradients,
    assert_same_run,
    lesson,
    stop_at,
    target,
    train_draft,
)

import tiny
from dialects import dialect, size
from foredraft.core.errors import DataError, DrafterError, OptionError
from foredraft.core.target_parts import FINAL
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.train.data.batches import HELD_OUT, LiveFeatures
from foredraft.train.data.tokens import TokenStore
from foredraft.train.drafts import boost
from foredraft.train.drafts.distil import DistilRecipe, Options, Student, Teacher
from foredraft.train.drafts.prune import PrunedShape
from foredraft.train.heads import validate


def small(**changes: Any) -> Any:
    return tiny.build("llama", **{"num_hidden_layers": 1, "hidden_size": 16, "seed": 5, **changes})


@pytest.fixture
def draft(tmp_path: Path, place: Path) -> str:
    """A small random model with the target's tokenizer."""
    folder = tmp_path / "small"
    small().save_pretrained(folder)
    for file in (place / "target").glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


# The loss.


def slow_loss(recipe: DistilRecipe, of: CausalLM, loss: str) -> Tensor:
    texts = lesson(of, (FINAL,))
    p = of.stock_logits(texts.tokens).clone()
    q = recipe.net.model(texts.tokens, use_cache=False).logits
    total, count = torch.zeros(()), 0.0
    for text in range(2):
        for row in range(texts.tokens.shape[1] - 1):
            if texts.weights[text, row]:
                a, b = p[text, row].log_softmax(-1), q[text, row].log_softmax(-1)
                mixed = (0.25 * a.exp() + 0.75 * b.exp()).log()
                said = {
                    "forward_kl": (a.exp() * (a - b)).sum(),
                    "reverse_kl": (b.exp() * (b - a)).sum(),
                    "jsd": 0.25 * (a.exp() * (a - mixed)).sum() + 0.75 * (b.exp() * (b - mixed)).sum(),
                    "hard": -b[a.argmax()],
                    "text": -b[texts.tokens[text, row + 1]],
                }
                total, count = total + said[loss], count + 1
    return total / count


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd", "hard", "text"])
def test_the_loss_and_its_gradients(loss: str):
    of = target()
    recipe = DistilRecipe(Student(small()), Teacher(of, Options(loss=loss, weight=0.25, rows=5)))
    said = recipe(lesson(of, (FINAL,)))
    assert_same_gradients(recipe.net, said["loss"], slow_loss(recipe, of, loss), 1e-4)


class Searches(TorchDispatchMode):
    """Counts searches for likeliest tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.startswith(("max", "argmax"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jsd", "text"])
def test_the_backward_pass_recomputes_no_likeliest_tokens(loss: str):
    """They are for the metric alone."""
    recipe = DistilRecipe(Student(small()), Teacher(target(), Options(loss=loss)))
    with Searches() as searches:
        recipe(lesson(target(), recipe.taps))["loss"].backward()
    assert searches.count == (1 if loss == "text" else 2)
    assert all(weight.grad is not None for weight in recipe.net.parameters())


def test_a_draft_that_is_the_target_has_nothing_to_learn():
    of = target()
    recipe = DistilRecipe(Student(tiny.build("llama", num_hidden_layers=3)), Teacher(of, Options()))
    said = recipe(lesson(of, (FINAL,)))
    assert said["loss"].abs() < 1e-6 and said["agreement"] == 1.0
    assert recipe.agrees(lesson(of, (FINAL,))).all()


def test_vocabularies_that_are_padded_to_other_sizes():
    """The target itself, with 32 more ids that are loud: what the target does not have is not looked at."""
    of = target()
    wide = Student(tiny.build("llama", num_hidden_layers=3, vocab_size=tiny.VOCAB + 32))
    padded = wide.model.state_dict()
    for name, weight in of.model.state_dict().items():
        padded[name][: len(weight)] = weight
    padded["lm_head.weight"][tiny.VOCAB :] *= 100.0
    wide.model.load_state_dict(padded)
    recipe, texts = DistilRecipe(wide, Teacher(of, Options())), lesson(of, (FINAL,))
    loud = wide.model(texts.tokens).logits.argmax(-1) >= tiny.VOCAB
    assert loud.all()
    assert recipe(texts)["loss"].abs() < 1e-6 and recipe.agrees(texts).all()


def test_options_out_of_range():
    for wrong in ({"loss": "mse"}, {"weight": 1.0}, {"rows": 0}):
        with pytest.raises(OptionError):
            Options(**wrong)
    with pytest.raises(OptionError, match="easy must be 1 or less, not 2.0"):
        boost.Options(easy=2.0)


# Runs.

LONG = replace(SHORT, tokens=120 * 64, lr=1e-2, validate=40, checkpoint=60, report=20)


def test_distillation_raises_acceptance(place: Path, tmp_path: Path, draft: str):
    """The target is one that has learned the texts: it is not as random as its weights were."""
    (tmp_path / "target").symlink_to(place / "target")
    (tmp_path / "texts.jsonl").symlink_to(place / "texts.jsonl")
    knows = Options(loss="text")
    learned = train_draft(
        "draft", tmp_path, tmp_path / "one", LONG, drafts=(str(place / "target"),), recipe_options=knows
    )[0]
    (tmp_path / "target").unlink()
    (tmp_path / "target").symlink_to(learned)
    found = []
    for name, loop in (("before", replace(LONG, tokens=64, lr=1e-9)), ("after", LONG)):
        made = train_draft("draft", tmp_path, tmp_path / name, loop, drafts=(draft,))
        assert made == [tmp_path / name / "draft"] and load_model(str(made[0]), device="cpu").tokenizer is not None
        found.append(json.loads((made[0] / "provenance.json").read_text())["validation"])
    before, after = found
    assert after["acceptance_length"] > before["acceptance_length"] + 0.5
    assert after["loss"] < 0.5 * before["loss"] and after["agreement"] > before["agreement"] + 0.3


def test_a_killed_run_ends_where_it_would_have_ended(place: Path, tmp_path: Path, draft: str):
    given: dict[str, Any] = {"drafts": (draft,), "recipe_options": Options(loss="jsd"), "store": 0.5}
    train_draft("draft", place, tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        train_draft("draft", place, tmp_path / "cut", report=stop_at(5), **given)
    train_draft("draft", place, tmp_path / "cut", **given)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    with pytest.raises(OptionError, match="started with another loss;"):
        train_draft("draft", place, tmp_path / "cut", drafts=(draft,))


def test_a_draft_with_another_tokenizer_learns_the_targets_answers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In its own tokens and without the target, with which its acceptance is measured."""
    (tmp_path / "target").symlink_to(place / "target")
    texts = [json.loads(line)["text"] for line in (place / "texts.jsonl").read_text().splitlines()]
    answers = [{"ids": tiny.tokenizer()(text)["input_ids"], "prompt_length": 4} for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    small(vocab_size=size("digits")).save_pretrained(tmp_path / "other")
    dialect("digits").inner.save_pretrained(tmp_path / "other")
    given: dict[str, Any] = {"drafts": (str(tmp_path / "other"),)}
    with pytest.raises(
        DrafterError, match="other' has another tokenizer .* by foredraft train draft with --recipe loss="
    ):
        train_draft("draft", tmp_path, tmp_path / "laws", SHORT, **given)

    prompts, measure = [], validate.acceptance_length

    def measured(target: Any, drafter: Any, given: Any, *more: Any) -> float:
        prompts.extend(given)
        return measure(target, drafter, given, *more)

    monkeypatch.setattr(validate, "acceptance_length", measured)
    monkeypatch.setattr(LiveFeatures, "read", None)
    given["recipe_options"] = Options(loss="text")
    (made,) = train_draft("draft", tmp_path, tmp_path / "out", LONG, **given)
    kept, tokenizer = json.loads((made / "provenance.json").read_text()), load_model(str(made), device="cpu").tokenizer
    assert kept["drafter"] == "universal" and kept["validation"]["agreement"] > 0.5
    assert tokenizer is not None and tokenizer.first_difference(dialect("digits")) is None
    joined = "".join(texts)
    assert prompts and all(tiny.tokenizer().decode(prompt) in joined for prompt in prompts)
    assert_drafts_losslessly(place / "target", f"universal:{made}")
    with pytest.raises(KeyboardInterrupt):
        train_draft("draft", tmp_path, tmp_path / "cut", LONG, report=stop_at(80), **given)
    train_draft("draft", tmp_path, tmp_path / "cut", LONG, **given)
    assert_same_run(tmp_path / "cut", tmp_path / "out")


@pytest.mark.slow
def test_boosted_drafts_learn_what_those_before_them_miss(place: Path, tmp_path: Path, draft: str):
    given: dict[str, Any] = {"drafts": (draft, draft, draft), "recipe_options": boost.Options(easy=0.25)}
    lines: list[dict[str, Any]] = []
    folders = train_draft("boost", place, tmp_path / "whole", LONG, report=lines.append, **given)
    assert folders == [tmp_path / "whole" / number / "draft" for number in ("1", "2", "3")]
    counts = [np.load(next((tmp_path / "whole" / number).glob("missed-*"))) for number in ("1", "2")]
    assert set(np.unique(counts[0])) <= {0.0, 0.25, 1.0} and 0.05 < (counts[0] == 0.25).mean() < 1
    assert ((counts[1] == 0.25) >= (counts[0] == 0.25)).all() and (counts[1] == 0.25).sum() > (counts[0] == 0.25).sum()
    said = [line["note"] for line in lines if "note" in line]
    assert said[0] == "draft 1 of 3 trains on 100% of the data" and len(said) == 3
    with pytest.raises(KeyboardInterrupt):
        train_draft("boost", place, tmp_path / "cut", LONG, report=stop_at(80, 2), **given)
    train_draft("boost", place, tmp_path / "cut", LONG, **given)
    for number in ("1", "2", "3"):
        assert_same_run(tmp_path / "cut" / number, tmp_path / "whole" / number)


def windows_of_a_run(place: Path, folder: Path, draft: str) -> np.ndarray:
    """Whether a draft that is distilled with ``SHORT`` reads each window, or holds it out."""
    read, numbers = TokenStore.window, set[int]()

    def noted(store: TokenStore, number: int, length: int) -> Any:
        numbers.add(number)
        return read(store, number, length)

    with patch.object(TokenStore, "window", noted):
        train_draft("draft", place, folder, SHORT, drafts=(draft,))
    windows = len(np.load(next((folder / "cache").glob("tokens-*")) / "ids.npy")) // SHORT.length
    held_out = torch.randperm(windows, generator=torch.Generator().manual_seed(1234))[:HELD_OUT]
    return np.isin(np.arange(windows), [*numbers, *held_out.tolist()])


def test_what_counts_is_what_the_draft_gets_wrong(place: Path, tmp_path: Path, draft: str):
    """Token by token, against both models alone, in the windows that the next draft reads."""
    read = windows_of_a_run(place, tmp_path / "alone", draft)
    folders = train_draft("boost", place, tmp_path, SHORT, drafts=(draft, draft))
    counts = np.load(next((tmp_path / "1").glob("missed-*")))
    ids = torch.from_numpy(np.load(next((tmp_path / "cache").glob("tokens-*")) / "ids.npy").astype(np.int64))
    whole = np.load(next((tmp_path / "cache").glob("tokens-*")) / "counts.npy")
    net = load_model(str(place / "target"), device="cpu").model
    student = small()
    weights = torch.load(tmp_path / "1" / "checkpoint.pt", weights_only=True)["net"]
    student.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    student.bfloat16().float()
    with torch.no_grad():
        for window in np.flatnonzero(read):
            text = ids[None, 32 * window : 32 * window + 32]
            same = net(text).logits[0, :-1].argmax(-1) == student(text).logits[0, :-1].argmax(-1)
            place_of = slice(32 * window + 1, 32 * window + 32)
            assert counts[place_of].tolist() == (whole[place_of] * ~same.numpy()).tolist()
    asked = (np.arange(len(ids)) % 32 > 0) & np.pad(read.repeat(32), (0, len(ids) % 32))
    assert 0 < read.sum() < len(read) and not counts[~asked].any(), "no row of a window that is read foretells these"
    said = json.loads((tmp_path / "2" / "draft" / "provenance.json").read_text())["learns"]
    assert said == pytest.approx(counts[asked].sum() / whole[asked].sum(), abs=1e-4)
    assert len(folders) == 2 and counts.sum() < whole.sum()


def test_what_counts_is_found_in_parts(place: Path, tmp_path: Path, draft: str, monkeypatch: pytest.MonkeyPatch):
    """A run that is interrupted between two drafts continues there, and no window is read twice."""
    given: dict[str, Any] = {"drafts": (draft, draft)}
    train_draft("boost", place, tmp_path / "whole", SHORT, **given)
    agrees, calls = DistilRecipe.agrees, []

    def counted(recipe: DistilRecipe, batch: Any) -> Any:
        calls.append(batch.tokens.tolist())
        if len(calls) in (4, 9):
            raise KeyboardInterrupt
        return agrees(recipe, batch)

    monkeypatch.setattr(DistilRecipe, "agrees", counted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_draft("boost", place, tmp_path / "cut", SHORT, **given)
        assert list((tmp_path / "cut" / "1").glob("missed-*.pt"))
    train_draft("boost", place, tmp_path / "cut", SHORT, **given)
    assert calls[3] == calls[4] and calls[8] == calls[9] and calls[4] not in calls[:3]
    counts = [np.load(next((tmp_path / name / "1").glob("missed-*"))) for name in ("whole", "cut")]
    assert np.array_equal(*counts)
    assert_same_run(tmp_path / "cut" / "2", tmp_path / "whole" / "2")


def test_a_draft_that_agrees_everywhere_leaves_nothing_to_the_next(place: Path, tmp_path: Path, draft: str):
    """The target itself, hardly moved, and rounded as drafts are saved: so is the target here."""
    (tmp_path / "texts.jsonl").symlink_to(place / "texts.jsonl")
    shutil.copytree(place / "target", tmp_path / "target")
    load_model(str(place / "target"), device="cpu").model.bfloat16().float().save_pretrained(tmp_path / "target")
    given = {"drafts": (str(tmp_path / "target"), draft), "recipe_options": boost.Options()}
    with pytest.raises(DataError, match="already match the target"):
        train_draft("boost", tmp_path, tmp_path / "out", replace(SHORT, tokens=64, lr=1e-9), **given)


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("draft", {}, "draft trains a model: give the initial model with --draft MODEL."),
        ("draft", {"drafts": ("a", "b")}, "draft takes one --draft, not 2; boost takes several."),
        ("draft", {"drafts": ("a",), "shape": PrunedShape(layers=1)}, "draft has no --shape, which is for prune."),
        ("prune", {}, "prune needs --shape, e.g. layers=2,hidden=256."),
        ("boost", {"drafts": ("a",)}, "boost trains 2 or more models: give the initial model with --draft MODEL."),
    ],
)
def test_what_is_missing_has_a_sentence(method: str, given: dict[str, Any], sentence: str, place: Path, tmp_path: Path):
    with pytest.raises(OptionError, match=sentence):
        train_draft(method, place, tmp_path, **given)
