"""A stock causal LM behind one forward: any rows, any tree, any lengths."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.tree import TokenTree
from foredraft.model.attention import AttentionSwap, Watch
from foredraft.model.cache import SlotCache, SlotView
from foredraft.model.linear import PackedWeights, plain_copy
from foredraft.model.masks import Layout, StepIn, address
from foredraft.model.slot_lm import SlotLM
from foredraft.model.support import check_supported, context_of, layout_of
from foredraft.model.taps import Taps, body

ODD = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError)
"""What a model raises that is not made for what it is asked to do."""


@final
class CausalLM(SlotLM):
    """Runs a transformers model over slots. What it installs on the model, ``close`` takes off again.

    Args:
        model: a decoder-only causal LM; it is put into evaluation mode.
        fast: on a CPU, pack the weights of float32 linear layers (see ``linear``).
        verify: run the model once in both ways and refuse it if they differ (see ``probe``).

    Raises:
        ModelError: a model whose drafts could not be verified or rolled back, with the reason.
    """

    def __init__(self, model: PreTrainedModel, *, fast: bool = True, verify: bool = True) -> None:
        check_supported(model)
        config = model.config.get_text_config()
        self._trained = [module for module in model.modules() if module.training]
        self.model = model.eval()
        self.name = model.__class__.__name__
        self.layers: int = config.num_hidden_layers
        self.max_length: int = context_of(model)
        self.layout: Layout = layout_of(model)
        self.weight_bytes: int = _weight_bytes(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._taps = Taps(model, ())
        self._attention = AttentionSwap(model)
        self._packed: PackedWeights | None = None
        try:
            self.vocab_size: int = self._probe(self._expected() if verify else None)
        except BaseException:
            self.close()
            raise
        if fast and self.device.type == "cpu":
            self._packed = PackedWeights(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def packed_layers(self) -> int:
        """How many linear layers run on packed weights."""
        return len(self._packed) if self._packed is not None else 0

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, hand out these hidden states too: after so many layers (0: the embedding), or ``FINAL``.

        Whoever shares the target keeps what it asked for.
        """
        wanted = {*self._taps.layers, *layers}
        self._taps.undo()
        self._taps = Taps(self.model, wanted)

    def untapped(self, rows: int) -> dict[int, Float[Tensor, "B T H"]]:
        size = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(rows, 0, size, dtype=self.dtype, device=self.device)
        return dict.fromkeys(self._taps.layers, empty)

    def new_cache(self) -> SlotCache:
        return SlotCache(self.layers)

    def attach(self) -> None:
        """Take up the model again after ``detach``."""
        self._attention.do()

    def detach(self) -> None:
        """Let the model run by itself for a while, with its own attention. Packed layers stay; they do not matter."""
        self._attention.undo()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """As between ``detach`` and ``attach``."""
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def plain_copy(self) -> PreTrainedModel:
        """A copy of the model alone, with its own attention and nothing packed, in float32: what can be trained."""
        copied = plain_copy(self.model)
        assert isinstance(copied, PreTrainedModel)
        self._attention.off(copied)
        return copied

    def close(self) -> None:
        """Leave the model as it was found."""
        self._taps.undo()
        if self._packed is not None:
            self._packed.undo()
        self._attention.undo()
        for module in self._trained:
            module.training = True

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], reach: int, *, start: int = 0
    ) -> StepIn:
        return address(
            tree, bases, rows, reach, self.layout, dtype=self.dtype, max_position=self.max_length, start=start
        )

    @torch.inference_mode()
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        return self.run(step, SlotView.of(cache, step), keep)

    @torch.inference_mode()
    def run(
        self, step: StepIn, view: Cache, keep: Int[Tensor, "M"] | None = None, watch: Watch | None = None
    ) -> StepOut:
        """``forward`` over a view of the caller's making; with a watch, on what it says that queries attend to."""
        masks = step.masks if self.layout.by_type else next(iter(step.masks.values()))
        wanted: dict[str, Any] = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        if watch is not None:
            wanted["watch"] = watch
        output = self.model(
            input_ids=step.tokens,
            position_ids=step.positions,
            attention_mask=masks,
            past_key_values=view,
            use_cache=True,
            **wanted,
        )
        logits = output.logits
        if keep is not None and not self._keeps_logits:
            logits = logits[:, keep]
        return StepOut(logits, self._taps.take())

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"], layers: Sequence[int]) -> dict[int, Float[Tensor, "B T H"]]:
        """Hidden states of whole texts, without a cache: what heads are trained on. Logits are not computed."""
        taps = Taps(self.model, layers)
        self._attention.undo()
        try:
            body(self.model)(input_ids=tokens, use_cache=False)
            return taps.take()
        finally:
            self._attention.do()
            taps.undo()

    @torch.inference_mode()
    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """What the model computes by itself: its own attention and masks, no cache of ours. Slow; for comparison."""
        self._attention.undo()
        try:
            return self.model(input_ids=tokens, use_cache=False).logits
        finally:
            self._attention.do()

    def _expected(self) -> Float[Tensor, "2 V"]:
        """Logits after the path 1, 2, 3, 4 and after its sibling 1, 2, 5, as the model alone computes them."""
        ids = self._probe_tokens()
        long, short = ids[:4], torch.cat([ids[:2], ids[4:]])
        try:
            return torch.stack([self.stock_logits(path[None])[0, -1] for path in (long, short)])
        except ODD as error:
            raise ModelError(f"{self.name} cannot run by itself: {brief(error)}.") from error

    @torch.inference_mode()
    def _probe(self, expected: Tensor | None) -> int:
        """Run a tree over slots, compare with the stock forward, and return the width of the logits.

        This refuses any architecture whose result depends on something else than tokens, positions and masks
        (a state, a bias made from the length of the cache), without a list of names.
        """
        ids = self._probe_tokens()
        cache = self.new_cache()
        cache.reserve(1, 16)
        base = torch.zeros(1, dtype=torch.long, device=self.device)
        # other children of the root stand first, so that slots and positions are far apart
        parents = torch.tensor([[-1, *[0] * 9, 9, 0]], device=self.device)
        tokens = torch.cat([ids[1:2], ids[:1].expand(8), ids[2:]])
        tree = TokenTree(tokens[None], parents, depth=2)
        try:
            self.forward(self.address(TokenTree.chain(ids[None, :1]), base, (0,), 1), cache)
            logits = self.forward(self.address(tree, base + 1, (0,), 13), cache).logits[0]
        except ODD as error:
            raise ModelError(f"{self.name} cannot run over foredraft's slot cache: {brief(error)}.") from error
        if expected is not None:
            found, wanted = logits[[10, 11]].float(), expected.float()
            error = (found - wanted).square().mean().sqrt() / wanted.std().clamp(min=1e-6)
            if not error <= (0.1 if self.dtype.itemsize < 4 else 1e-2):  # NaN counts as different
                raise ModelError(
                    f"{self.name} gives other logits for a tree of drafts than for its paths alone (off by "
                    f"{error:.0%} of their spread), so its drafts cannot be verified; its attention or state does "
                    "not follow masks and positions."
                )
        return logits.shape[-1]

    def _probe_tokens(self) -> Int[Tensor, "5"]:
        return torch.arange(1, 6, device=self.device) % self.model.config.get_text_config().vocab_size


def brief(error: BaseException) -> str:
    """The first line of what a model has to say about itself."""
    return (str(error).strip() or error.__class__.__name__).splitlines()[0].rstrip(".")


def _weight_bytes(model: PreTrainedModel) -> int:
    """What a forward reads of the weights: all but an input embedding that is not the output layer too.

    An upper bound for mixtures of experts, of which a forward reads some.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    apart = output is None or embedding.weight is not output.weight
    return sum(each.nbytes for each in model.parameters() if not (apart and each is embedding.weight))
