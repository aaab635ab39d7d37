"""Where a run takes place: its folder, its devices, the target that teaches, and the text."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import DataError, OptionError
from foredraft.model.hf import CausalLM
from foredraft.model.load import Loaded, load_model
from foredraft.train import devices
from foredraft.train.checkpoint import alone, check_resume
from foredraft.train.data.batches import Lessons, Live
from foredraft.train.data.features import Stored, fingerprint
from foredraft.train.data.tokens import TokenStore
from foredraft.train.loop import LoopOptions
from foredraft.train.precision import autocast

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is learned from, and where things are kept.

    sources: see ``sources.read_sources``.
    cache: a folder for token ids and hidden states, shared by runs on the same text; by default one in ``out``.
    store: gigabytes of hidden states that may be kept on disk, so that the target reads each text once; 0 keeps none.
    """

    sources: tuple[str, ...]
    cache: str | None = None
    store: float = 0.0


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every run begins with. ``store`` is the text as the target's tokens; ``gigabytes`` as in ``Data.store``."""

    folder: Path
    accelerator: "Accelerator"
    loaded: Loaded
    target: CausalLM
    store: TokenStore
    gigabytes: float

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, target_name: str, out: str | Path, data: Data, device: str | None, *, partial: bool = False
    ) -> Iterator["RunContext"]:
        """Take the folder for this run alone, load the target, which learns nothing by itself, and read the text. At
        the end the folder is free again, and the target as it was.

        Args:
            partial: there are steps in which some weights get no gradient.

        Raises:
            UsageError: data, a device, a folder or a target that cannot be; the sentence says why.
        """
        folder = Path(out)
        accelerator = devices.accelerator(cpu=device == "cpu", partial=partial)
        with alone(folder) if accelerator.is_main_process else contextlib.nullcontext():
            site = cls._made(target_name, folder, data, device, accelerator)
            try:
                yield site
            finally:
                site.target.close()

    @classmethod
    def _made(
        cls, target_name: str, folder: Path, data: Data, device: str | None, accelerator: "Accelerator"
    ) -> "RunContext":
        if device not in (None, accelerator.device.type):
            raise OptionError(
                f"Training would run on {accelerator.device.type}, not on {device!r}; cpu is always there."
            )
        loaded = load_model(target_name, dtype="float32", device=str(accelerator.device))
        if loaded.tokenizer is None:
            raise DataError(f"The target {target_name!r} has no tokenizer, so texts cannot be read with it.")
        target = CausalLM(loaded.model, fast=False)
        target.model.requires_grad_(False)
        store = _tokens(data, folder, loaded, target, accelerator)
        return cls(folder, accelerator, loaded, target, store, data.store)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.accelerator.is_main_process

    def check_resume(self, terms: Mapping[str, Any], folder: Path | None = None) -> None:
        """Refuse to go on where a run in this folder was begun on other terms, or on other text.

        Args:
            folder: of a run that is a part of this one.
        """
        place = self.folder if folder is None else folder
        place.mkdir(exist_ok=True)
        text = [len(self.store.ids), int(self.store.counts.sum())]
        both = {**terms, "processes": self.accelerator.num_processes, "data": text}
        check_resume(place, both, write=self.first)

    def lessons(self, taps: tuple[int, ...], loop: LoopOptions, store: TokenStore | None = None) -> Lessons:
        """Batches of the text, or of another ``store`` of the same ids, with what the target makes of them."""
        target, text = self.target, self.store if store is None else store
        source: Any = Live(target, lambda: autocast(target.device, loop.precision))
        if self.gigabytes > 0 and text.windows(loop.length):
            width = target.model.config.get_text_config().hidden_size
            shape = (text.windows(loop.length), loop.length, width)
            place = text.folder / Path(target.model.config.name_or_path or "target").name
            bound, owner = int(self.gigabytes * 1e9), fingerprint(target.model)
            source = Stored(place, source, taps, shape, bound=bound, owner=owner)
        return Lessons(text, source, taps, loop.length, target.device)


def _tokens(data: Data, folder: Path, loaded: Loaded, target: CausalLM, accelerator: "Accelerator") -> TokenStore:
    """The ids of the texts: one process makes them, the others read what it has made."""
    assert loaded.tokenizer is not None
    end = loaded.eos_token_ids[0] if loaded.eos_token_ids else None
    cache = Path(data.cache) if data.cache else folder / "cache"
    with accelerator.main_process_first():
        store = TokenStore.build(cache, list(data.sources), loaded.tokenizer, end)
    if (largest := int(store.ids.max())) >= target.vocab_size:
        raise DataError(f"The training text has the token id {largest}; the target's vocabulary ends before it.")
    return store
