from pathlib import Path

import pytest
from trainees import save_target, save_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and texts, where the runs of a module are made."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target")
    save_texts(folder / "texts.jsonl")
    return folder
