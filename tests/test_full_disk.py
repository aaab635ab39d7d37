"""A disk that is full while a folder is written: one sentence, and nothing half done is left."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

import foredraft
import random_heads
import tiny
from foredraft.bench.measure.records import OutputRecord, Run
from foredraft.bench.measure.spec_bench import write_answers
from foredraft.core.errors import OptionError, UsageError
from foredraft.files.write import atomic_folder, partial_name
from foredraft.heads.formats import save_head
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.train.heads.export import save_model
from native import needs_compiler
from processes import disk_for

Write = Callable[[Path], object]
ARMS = {"short": 10, "long": 2000}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=96, head_dim=16)


def writer(kind: str, source: Path) -> Write:
    if kind == "quantised model":
        return lambda folder: foredraft.quantize(source, folder)
    if kind == "draft model":
        loaded = load_model(str(source))
        return lambda folder: save_model(loaded.model, folder, loaded, {"recipe": "distil"})
    if kind == "answers":
        runs = [
            Run(arm, "t", ("1",), tokens=1, outputs=(OutputRecord("1", 1, 1, "x", (5,), size * "a"),))
            for arm, size in ARMS.items()
        ]
        return lambda folder: write_answers(runs, folder)
    lm = CausalLM(tiny.build("llama"), verify=False)
    make, to = (random_heads.medusa, "medusa") if kind == "pickled head" else (random_heads.eagle3, "foredraft")
    config = lm.model.config.to_dict()
    return functools.partial(save_head, make(lm), to=to, target_name="my/target", target_config=config, provenance={})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "kind", [pytest.param("quantised model", marks=needs_compiler), "draft model", "answers", "head", "pickled head"]
)
def test_nothing_half_done_is_left(kind: str, source: Path, tmp_path: Path):
    """Each file is the first one that finds no room, in a new folder and in one that has been written before."""
    write = writer(kind, source)
    write(tmp_path / "whole")
    wanted = contents(tmp_path)
    for size in sorted({len(content) for content in wanted.values()}):
        for name in ("whole", "new/folder"):
            with disk_for(size - 1), pytest.raises(UsageError, match=name) as caught:
                write(tmp_path / name)
            assert str(caught.value).count("\n") == 0 and ".partial" not in str(caught.value)
            assert contents(tmp_path) == wanted and not (tmp_path / "new").exists()


def test_a_folder_that_is_left_by_an_interrupt(tmp_path: Path):
    (tmp_path / "folder" / "texts").mkdir(parents=True)
    (tmp_path / "folder" / "texts" / "a").write_text("old")
    for name in ("folder", "new"):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / name) as partial:
            (partial / "texts").mkdir()
            raise KeyboardInterrupt
    assert contents(tmp_path) == {"folder/texts/a": b"old"} and not list(tmp_path.rglob("*partial*"))


def test_a_folder_takes_the_files_in_place_of_its_own_and_keeps_others(tmp_path: Path):
    old = tmp_path / "folder"
    for name in ("texts", "kept", "stale", partial_name("folder")):  # the last one of a process that was killed
        (old / name).mkdir(parents=True)
    for name in ("texts/a", "kept/b", "stale/c", "config.json", "readme", f"{partial_name('folder')}/half"):
        (old / name).write_text("old")
    with atomic_folder(old, owned={"texts", "stale", "config.json", "../readme"}) as partial:
        (partial / "texts").mkdir()
        for name in ("texts/c", "config.json"):
            (partial / name).write_text("new")
    assert contents(old) == {"texts/c": b"new", "config.json": b"new", "kept/b": b"old", "readme": b"old"}


def test_no_file_is_replaced_that_is_not_owned(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("old")
    with pytest.raises(OptionError, match="b was not written by this command"), atomic_folder(tmp_path, {"a"}) as part:
        for name in ("a", "b"):
            (part / name).write_text("new")
    assert contents(tmp_path) == {"a": b"old", "b": b"old"}


def test_the_config_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is killed while it replaces files leaves no config that promises files which are not there."""
    moved: list[str] = []
    replace = Path.replace

    def recorded(self: Path, target: Path) -> Path:
        moved.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", recorded)
    with atomic_folder(tmp_path) as partial:
        for name in ("config.json", "a", "z"):
            (partial / name).touch()
    assert moved == ["a", "z", "config.json"]
