"""Texts as ids on disk: what counts in the loss, windows, and a store that is whole or absent."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainees import tokenizer

from dialects import dialect, size
from foredraft.core.errors import DataError
from foredraft.engine.prefix_cache import common_prefix
from foredraft.model.loading.load import load_model
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.model.text.vocab_mapping import VocabMapping
from foredraft.train.data import tokens as module
from foredraft.train.data.batches import HELD_OUT, TrainBatches
from foredraft.train.data.sources import AnsweredBy, Sample
from foredraft.train.data.tokens import TokenStore, encoded
from foredraft.train.options import LoopOptions

END = 95
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "assistant? hello"},
    {"role": "assistant", "content": "yes, hello"},
]


@pytest.fixture(scope="module")
def speaker() -> Tokenizer:
    return Tokenizer(tokenizer())


def counted(speaker: Tokenizer, ids: list[int], counts: list[int]) -> list[str]:
    """The pieces of the text that count."""
    text = "".join(speaker.decode([token]) if count else "\n" for token, count in zip(ids, counts, strict=True))
    return [piece for piece in text.split("\n") if piece]


def test_of_a_chat_the_assistants_turns_count_with_their_ends(speaker: Tokenizer):
    [(ids, counts)] = encoded([Sample("", messages=TURNS)], speaker, END)
    assert "<user>assistant? hello~<assistant>yes, hello~" in speaker.decode(ids)
    assert counted(speaker, ids, counts) == ["hello~", "yes, hello~"]


def test_the_bundled_template(speaker: Tokenizer):
    """The same with the tokenizer of the bundled model, whose tokens are many letters long."""
    bundled = load_model("sample", device="cpu").tokenizer
    assert bundled is not None
    [(ids, counts)] = encoded([Sample("", messages=TURNS)], bundled, None)
    said = [token for token, count in zip(ids, counts, strict=True) if count]
    assert bundled.inner.decode(said) == "hello<|end|>\nyes, hello<|end|>\n"


def test_of_a_text_all_counts_and_of_an_answer_what_is_not_prompt(speaker: Tokenizer):
    samples = [
        Sample("", text="ab"),
        Sample("", ids=[5, 6, 7], prompt_length=2),
        Sample("", text=""),
        Sample("", messages=TURNS[1:3]),
        Sample("", text="c"),
    ]
    made = list(encoded(samples, speaker, END))
    assert made[:3] == [([65, 66, END], [1, 1, 1]), ([5, 6, 7], [0, 0, 1]), ([END], [1])]
    assert counted(speaker, *made[3]) == ["hello~"] and made[4] == ([67, END], [1, 1])
    assert list(encoded([Sample("", text="ab")], speaker, None)) == [([65, 66], [1, 1])]


def test_answers_are_read_as_a_draft_with_another_tokenizer_reads_them():
    """Special tokens that the draft lacks are dropped, but the answer's end is its own; a token over the border between
    prompt and answer counts."""
    target, draft = dialect("bytes"), dialect("digits")
    mapping = VocabMapping(target, draft, size("bytes"), size("digits"))
    user, end = (target.inner.get_vocab()[name] for name in ("<|user|>", "<|end|>"))
    prompt, answer = [user, *target.inner("The quick bro")["input_ids"]], target.inner("wn fox: 1234")["input_ids"]
    whole, shared = draft.inner("The quick brown fox: 1234")["input_ids"], draft.inner.get_vocab()["<|end|>"]
    before = common_prefix(draft.inner("The quick bro")["input_ids"], whole)
    samples = [Sample("", ids=[*prompt, *answer, *ended], prompt_length=len(prompt)) for ended in ([], [end], [user])]
    open_, kept, replaced = encoded(samples, draft, END, mapping)
    counts = [0] * before + [1] * (len(whole) - before)
    assert open_ == (whole, counts) and 0 < before < len(whole)
    assert kept == ([*whole, shared], [*counts, 1]) and replaced == ([*whole, END], [*counts, 1])
    assert list(encoded([Sample("", text="ab")], draft, END, mapping)) == list(
        encoded([Sample("", text="ab")], draft, END)
    )


def test_many_texts_come_in_their_order(speaker: Tokenizer):
    texts = [Sample("", text=chr(65 + number % 26)) for number in range(600)]
    assert [ids[0] for ids, _ in encoded(texts, speaker, None)] == [33 + number % 26 for number in range(600)]


def test_a_template_that_refuses_is_a_sentence(speaker: Tokenizer):
    strict = tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="a.jsonl:7: the chat template rejects this chat: roles must alternate"):
        list(encoded([Sample("a.jsonl:7", messages=TURNS)], Tokenizer(strict), None))
    strict.chat_template = None
    with pytest.raises(DataError, match="a.jsonl:7: .*no chat template"):
        list(encoded([Sample("a.jsonl:7", messages=TURNS)], Tokenizer(strict), None))


# On disk.


def build(folder: Path, source: Path, speaker: Tokenizer, end: int | None = END) -> TokenStore:
    return TokenStore.build(folder / "cache", [str(source)], speaker, end)


def texts(path: Path, *given: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    return path


def test_a_store_is_made_once_and_anew_when_the_text_changes(
    tmp_path: Path, speaker: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    source = texts(tmp_path / "a.jsonl", "ab", "c")
    store = build(tmp_path, source, speaker)
    assert store.ids.tolist() == [65, 66, END, 67, END] and store.counts.tolist() == [1] * 5
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_sources", None)
        assert build(tmp_path, source, speaker).ids.tolist() == store.ids.tolist()
    assert build(tmp_path, source, speaker, None).ids.tolist() == [65, 66, 67]
    texts(source, "ab", "d")
    os.utime(source, ns=(time.time_ns(), time.time_ns() + 10**9))
    assert build(tmp_path, source, speaker).ids.tolist() == [65, 66, END, 68, END]
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_store_is_of_the_answers_tokens(tmp_path: Path):
    (answers := tmp_path / "a.jsonl").write_text('{"ids": [60, 61, 62], "prompt_length": 1}\n')
    draft, stores = dialect("digits"), []
    for name in ("bytes", "lower", "bytes"):
        mapping = VocabMapping(dialect(name), draft, size(name), size("digits"))
        stores.append(TokenStore.build(tmp_path / "cache", [str(answers)], draft, None, mapping))
        assert stores[-1].ids.tolist() == mapping.to_draft([60, 61, 62])
    plain = TokenStore.build(tmp_path / "cache", [str(answers)], draft, None)
    assert plain.ids.tolist() == [60, 61, 62] and stores[0].folder == stores[2].folder
    assert len({store.folder for store in (*stores, plain)}) == 3


def test_a_store_holds_no_answers_of_another_model(tmp_path: Path, speaker: Tokenizer):
    """Nor those in other tokens; answers of unknown origin, and all texts, are taken."""
    mine, other = AnsweredBy("aa", "tt"), AnsweredBy("bb", "tt")
    rows = [
        {"ids": [60, 61, 62], "prompt_length": 1, **mine.known},
        {"ids": [63, 64], "prompt_length": 1},
        {"text": "ab"},
    ]
    (answers := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def build(by: AnsweredBy) -> TokenStore:
        return TokenStore.build(tmp_path / "cache", [str(answers)], speaker, None, None, by)

    assert build(mine).ids.tolist() == [60, 61, 62, 63, 64, 65, 66]
    with pytest.raises(DataError, match=r"a.jsonl:1: this answer is of another model \(aa\) than the target's \(bb\)"):
        build(other)
    with pytest.raises(DataError, match=r"another tokenizer \(tt\) than .* \(uu\).* take the field tokenizer out"):
        build(AnsweredBy("aa", "uu"))
    assert build(AnsweredBy(None, None)).ids.tolist() == build(mine).ids.tolist(), "a target of unknown contents"
    answers.write_text('{"ids": [1], "model": 7}\n')
    with pytest.raises(DataError, match="model and tokenizer of an answer must be strings"):
        build(mine)


def test_a_store_is_whole_or_absent(tmp_path: Path, speaker: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    source = texts(tmp_path / "a.jsonl", "ab")
    save = np.save

    def full(path: Path, array: Any) -> None:
        if path.name == "counts.npy":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(path, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(DataError, match="Cannot write the tokenized data to .*No space left"):
            build(tmp_path, source, speaker)
    assert list((tmp_path / "cache").iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, to: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, source, speaker)
    assert build(tmp_path, source, speaker).ids.tolist() == [65, 66, END]
    source.write_text('{"text": "ab"}\n{"oops": 1}\n')
    with pytest.raises(DataError, match="a.jsonl:2: no field text"):
        build(tmp_path, source, speaker)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_two_who_build_at_once(tmp_path: Path, speaker: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """The other is ready first: what it has made is taken."""
    source, write = texts(tmp_path / "a.jsonl", "ab"), module._write

    def slower(folder: Path, documents: Any) -> None:
        monkeypatch.setattr(module, "_write", write)
        build(tmp_path, source, speaker)
        folder.mkdir(exist_ok=True)
        write(folder, documents)

    monkeypatch.setattr(module, "_write", slower)
    assert build(tmp_path, source, speaker).ids.tolist() == [65, 66, END]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_nothing_to_learn_from(tmp_path: Path, speaker: Tokenizer):
    for name, content in (("a.jsonl", ""), ("b.jsonl", '{"ids": [1, 2], "prompt_length": 2}\n')):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=f"No token in .*{name} counts in the loss"):
            build(tmp_path, tmp_path / name, speaker)


# Windows.


def counting(length: int) -> TokenStore:
    return TokenStore(np.arange(length, dtype=np.int32), (np.arange(length) % 3 == 0).astype(np.uint8), Path())


def test_a_window_says_what_the_token_after_each_counts():
    store = counting(12)
    ids, weights = store.window(1, 4)
    assert store.windows(4) == 3 and ids.tolist() == [4, 5, 6, 7]
    assert weights.tolist() == [0.0, 1.0, 0.0, 0.0]  # of 5, 6, 7, 8
    ids, weights = store.window(2, 4)
    assert ids.tolist() == [8, 9, 10, 11] and weights.tolist()[:3] == [1.0, 0.0, 0.0]  # of 9, 10, 11


class Nothing:
    """A target that says nothing."""

    def read(self, windows: list[int], tokens: torch.Tensor, taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
        return {}


def test_each_pass_reads_each_text_once_in_an_order_of_its_own_but_what_is_held_out():
    lessons = TrainBatches(counting(4 * 30), Nothing(), (), 4, "cpu")
    options = LoopOptions(length=4, batch=7, seed=3)

    def read(number: int, share: tuple[int, int] = (0, 1)) -> list[int]:
        return (lessons.batch(number, options, share).tokens[:, 0] // 4).tolist()

    held_out = {int(lesson.tokens[0, 0]) // 4 for lesson in lessons.held_out(HELD_OUT)}
    first, second = read(0) + read(1), read(2) + read(3)
    assert len(held_out) == HELD_OUT
    assert sorted(first) == sorted(second) == sorted(set(range(30)) - held_out) and first != second
    assert read(0) == first[:7], "a batch is the same whatever was read before it"
    halves = [read(0, (0, 2)), read(0, (1, 2))]
    assert halves == [first[:7], first[7:]], "processes share the texts"
    seeds = {lessons.batch(number, options, (index, 2)).seed for number in range(3) for index in range(2)}
    assert len(seeds) == 6


def test_too_few_texts():
    with pytest.raises(DataError, match="The data has 67 tokens, too few for 17 windows of 4"):
        TrainBatches(counting(67), Nothing(), (), 4, "cpu")
