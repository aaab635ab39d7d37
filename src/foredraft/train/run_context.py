"""Run context: folder, devices, target and training data."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import DataError, OptionError
from foredraft.files.outputs import locked
from foredraft.files.provenance import fingerprint
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import Loaded, load_model
from foredraft.model.text.vocab_mapping import VocabMapping
from foredraft.train import devices
from foredraft.train.checkpoint import check_resume
from foredraft.train.data.batches import LiveFeatures, TrainBatches
from foredraft.train.data.features import StoredFeatures
from foredraft.train.data.sources import AnsweredBy
from foredraft.train.data.tokens import TokenStore
from foredraft.train.devices import autocast
from foredraft.train.options import LoopOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Training data and its caches.

    sources: see ``sources.read_sources``.
    cache: folder for token ids and hidden states, shared by runs on the same data; by default one in ``out``.
    store: gigabytes of hidden states to store on disk, so that the target reads each window once; 0 stores none.
    """

    sources: tuple[str, ...]
    cache: str | None = None
    store: float = 0.0


@dataclass(frozen=True, slots=True)
class RunContext:
    """Shared state of a run. ``loaded``: the model whose tokens ``store`` has: the target, see ``in_tokens_of``.
    ``by``: the target, as answers name it."""

    folder: Path
    accelerator: "Accelerator"
    loaded: Loaded
    target: CausalLM
    store: TokenStore
    data: Data
    by: AnsweredBy

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, target_name: str, out: str | Path, data: Data, device: str | None, *, partial: bool = False
    ) -> Iterator["RunContext"]:
        """Lock the folder, load the frozen target, and tokenize the data; afterwards release the folder and restore
        the target.

        Args:
            partial: some weights get no gradient in some steps.

        Raises:
            UsageError: invalid data, device, folder or target.
        """
        folder = Path(out)
        accelerator = devices.accelerator(cpu=device == "cpu", partial=partial)
        with locked(folder, ".lock") if accelerator.is_main_process else contextlib.nullcontext():
            context = cls._of(target_name, folder, data, device, accelerator)
            try:
                yield context
            finally:
                context.target.release()

    @classmethod
    def _of(
        cls, target_name: str, folder: Path, data: Data, device: str | None, accelerator: "Accelerator"
    ) -> "RunContext":
        if device not in (None, accelerator.device.type):
            raise OptionError(
                f"Training would run on {accelerator.device.type}, not on {device!r}: drop --device, or use cpu."
            )
        loaded = load_model(target_name, dtype="float32", device=str(accelerator.device))
        if loaded.tokenizer is None:
            raise DataError(f"The target {target_name!r} has no tokenizer, which training needs.")
        target = CausalLM(loaded.model, fast=False)
        target.module.requires_grad_(False)
        by = AnsweredBy.of(target, loaded.tokenizer)
        store = _tokens(data, folder, loaded, accelerator, by)
        if (largest := int(store.ids.max())) >= target.vocab_size:
            raise DataError(f"The training data has the token id {largest}, beyond the target's vocabulary.")
        return cls(folder, accelerator, loaded, target, store, data, by)

    def in_tokens_of(self, draft: Loaded, mapping: VocabMapping) -> "RunContext":
        """The same run with the data in the tokens of a draft with another tokenizer."""
        store = _tokens(self.data, self.folder, draft, self.accelerator, self.by, mapping)
        return replace(self, loaded=draft, store=store)

    @property
    def first(self) -> bool:
        """True in the process that writes files."""
        return self.accelerator.is_main_process

    def check_resume(self, terms: Mapping[str, Any], folder: Path | None = None) -> None:
        """Refuse to resume a run with other settings or other data.

        Args:
            folder: folder of a sub-run; by default the run's own.
        """
        place = self.folder if folder is None else folder
        place.mkdir(exist_ok=True)
        text = [len(self.store.ids), int(self.store.counts.sum())]
        check_resume(place, {**terms, "data": text}, write=self.first)

    def batches(self, taps: tuple[int, ...], loop: LoopOptions, store: TokenStore | None = None) -> TrainBatches:
        """Batches with the target's hidden states, from the data or from another ``store`` of the same ids."""
        target, text = self.target, self.store if store is None else store
        source: Any = LiveFeatures(target, lambda: autocast(target.device, loop.precision))
        if self.data.store > 0 and taps and text.windows(loop.length):
            width = target.parts().hidden_size
            shape = (text.windows(loop.length), loop.length, width)
            name = f"{Path(target.origin or 'target').name}-{fingerprint(target.module)}{devices.machine()}"
            source = StoredFeatures(text.folder / name, source, taps, shape, bound=int(self.data.store * 1e9))
        return TrainBatches(text, source, taps, loop.length, target.device)


def _tokens(
    data: Data,
    folder: Path,
    loaded: Loaded,
    accelerator: "Accelerator",
    by: AnsweredBy,
    mapping: VocabMapping | None = None,
) -> TokenStore:
    """Tokenize the data in one process; the others read the result."""
    assert loaded.tokenizer is not None
    end = loaded.eos_token_ids[0] if loaded.eos_token_ids else None
    cache = Path(data.cache) if data.cache else folder / "cache"
    with accelerator.main_process_first():
        return TokenStore.build(cache, list(data.sources), loaded.tokenizer, end, mapping, by)
