"""A stock causal LM behind one forward: any rows, any tree, any lengths."""

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.tree import TokenTree
from foredraft.model.attention import AttentionObserver, AttentionSwap, NoCudnn
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache, SlotView
from foredraft.model.cpu_linear import PackedWeights, any_weight, plain_copy
from foredraft.model.masks import Layout, StepIn, address
from foredraft.model.memory import weight_bytes
from foredraft.model.support import check_supported, context_of, layout_of
from foredraft.model.taps import Taps, body

ODD = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError)
"""What a model raises that is not made for what it is asked to do."""


@final
class CausalLM(TargetModel):
    """Runs a transformers model over slots.

    Attention and taps are on the model during a forward only, so between two the model is itself: it can run, be
    copied, saved and trained. Packed layers and the evaluation mode stay until ``close``.

    ``weight_bytes`` is what a forward reads of the weights, ``token_bytes`` what a token takes in the cache.

    Args:
        model: a decoder-only causal LM; it is put into evaluation mode.
        fast: on a CPU, pack the weights of float32 linear layers (see ``linear``).
        verify: run the model once in both ways and refuse it if they differ (see ``probe``).
        owned: nobody else holds the model, so packed layers may give up their plain weights.

    Raises:
        ModelError: a model whose drafts could not be verified or rolled back, with the reason.
    """

    def __init__(self, model: PreTrainedModel, *, fast: bool = True, verify: bool = True, owned: bool = False) -> None:
        check_supported(model)
        config = model.config.get_text_config()
        self._trained = [module for module in model.modules() if module.training]
        self.model = model
        self.closed = False
        self.name = model.__class__.__name__
        self.layers: int = config.num_hidden_layers
        self.first_token: int = _first_token(config)
        self.max_length: int = context_of(model)
        self.layout: Layout = layout_of(model)
        self.weight_bytes: int = weight_bytes(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._taps = Taps(model, ())
        weight = any_weight(model)
        self._place = (weight.device, weight.dtype)
        self._attention = AttentionSwap(model)
        self._kernels = NoCudnn(weight.device)
        self._running = threading.RLock()
        self._holders = 1
        self._owned = owned
        self._packed: PackedWeights | None = None
        try:
            model.eval()
            self.vocab_size: int = self._probe(self._expected() if verify else None)
            if fast:
                self.pack()
            vars(model)[_HELD] = _Held(self)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        return self._place[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._place[1]

    @property
    def packed_layers(self) -> int:
        """How many linear layers run on packed weights."""
        return len(self._packed) if self._packed is not None else 0

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, hand out these hidden states too: after so many layers (0: the embedding), or ``FINAL``.

        Whoever shares the target keeps what it asked for.
        """
        self._taps = Taps(self.model, {*self._taps.layers, *layers})

    def empty_hidden(self, rows: int) -> dict[int, Float[Tensor, "B T H"]]:
        size = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(rows, 0, size, dtype=self.dtype, device=self.device)
        return dict.fromkeys(self._taps.layers, empty)

    def new_cache(self) -> SlotCache:
        return SlotCache(self.layers)

    def pack(self) -> None:
        """Run linear layers on packed weights from now on, if the model is on a CPU."""
        if self.device.type == "cpu" and (self._packed is None or not self._packed.whole):
            with self._running:
                if self._packed is not None:
                    self._packed.undo()
                self._packed = PackedWeights(self.model, keep=not self._owned)

    def check_ready(self) -> None:
        """See whether somebody has changed the model since, in a way that generating cannot go along with.

        A model that was converted and converted back is packed again, if it was.

        Raises:
            ModelError: it was closed, moved, converted or put into training mode.
        """
        if self.closed:
            raise ModelError(f"This {self.name} was released or closed: make a new generator with foredraft.load.")
        now = any_weight(self.model)
        if (now.device, now.dtype) != self._place:
            raise ModelError(
                f"This {self.name} was on {self.device} in {self.dtype} and is on {now.device} in {now.dtype}: call "
                "close() on its generator and load it again."
            )
        if self.model.training:
            raise ModelError(f"This {self.name} is in training mode: call its eval() before generating.")
        if self._packed is not None:
            self.pack()

    def retain(self) -> None:
        """One more holds this; see ``let_go``."""
        self._holders += 1

    def let_go(self) -> None:
        """One less holds this, whoever made it being the first; the last one closes it."""
        self._holders -= 1
        if self._holders <= 0 and not self.closed:
            self.close()

    def plain_copy(self) -> PreTrainedModel:
        """A copy of the model alone, with its own attention and nothing packed, in float32: what can be trained."""
        copied = plain_copy(self.model)
        assert isinstance(copied, PreTrainedModel)
        return copied

    def close(self) -> None:
        """Leave the model as it was found, when nobody runs it. An interruption is raised when that is done."""
        self.closed = True
        with self._running:
            try:
                self._take_off()
            except BaseException:
                self._take_off()
                raise

    def reset_hooks(self) -> None:
        """Between two forwards: take off the attention and the taps that an interruption may have left."""
        with self._running:
            self._taps.off()
            self._kernels.off()
            self._attention.off()

    def _take_off(self) -> None:
        self.reset_hooks()
        if self._packed is not None:
            self._packed.undo()
        if held_by(self.model) is self:
            del vars(self.model)[_HELD]
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
        self, step: StepIn, view: Cache, keep: Int[Tensor, "M"] | None = None, watch: AttentionObserver | None = None
    ) -> StepOut:
        """``forward`` over a view of the caller's making; with a watch, on what it says that queries attend to."""
        masks = step.masks if self.layout.by_type else next(iter(step.masks.values()))
        wanted: dict[str, Any] = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        if watch is not None:
            wanted["watch"] = watch
        with self._running:
            try:
                with self._attention, self._kernels, self._taps as taps:
                    output = self.model(
                        input_ids=step.tokens,
                        position_ids=step.positions,
                        attention_mask=masks,
                        past_key_values=view,
                        use_cache=True,
                        **wanted,
                    )
                    hidden = taps.take()
            except BaseException as error:
                self.reset_hooks()
                if isinstance(error, ODD):
                    self.check_ready()  # a model that was moved or converted in the meantime says so in torch's words
                raise
        logits = output.logits
        if keep is not None and not self._keeps_logits:
            logits = logits[:, keep]
        return StepOut(logits, hidden)

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"], layers: Sequence[int]) -> dict[int, Float[Tensor, "B T H"]]:
        """Hidden states of whole texts, without a cache: what heads are trained on. Logits are not computed."""
        taps = Taps(self.model, layers)
        with self._running:
            try:
                with taps:
                    body(self.model)(input_ids=tokens, use_cache=False)
                    return taps.take()
            except BaseException:
                taps.off()
                raise

    @torch.inference_mode()
    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """What the model computes by itself: its own attention and masks, no cache of ours. Slow; for comparison."""
        with self._running:
            return self.model(input_ids=tokens, use_cache=False).logits

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
        self.token_bytes: int = cache.nbytes // (cache.rows * cache.slots)
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


def _first_token(config: Any) -> int:
    """The model's BOS token, else its first EOS token, else token 0."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    named = (token for token in (config.bos_token_id, *ends) if token is not None)
    return next((token for token in named if 0 <= token < config.vocab_size), 0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode for a while."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


_HELD = "_foredraft"


class _Held:
    """On a model: which ``CausalLM`` runs it. That may end at any time, and copies and pickles of the model have None
    here."""

    def __init__(self, by: CausalLM) -> None:
        self.by = weakref.ref(by)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def held_by(model: PreTrainedModel) -> CausalLM | None:
    """Who runs this model over slots already."""
    held = vars(model).get(_HELD)
    return held.by() if isinstance(held, _Held) else None


def hold(model: PreTrainedModel, *, fast: bool, owned: bool = False) -> CausalLM:
    """Whoever runs this model already, or a new ``CausalLM``; the caller lets it go in the end."""
    found = held_by(model)
    if found is not None and found.ready:
        found.retain()
        if fast:
            found.pack()
        return found
    if found is not None:  # the generators before can do no more, so this one takes over
        found.close()
    return CausalLM(model, fast=fast, owned=owned)


def release(model: object) -> None:
    """Take foredraft off a model, whoever holds it: generators and ``speculative`` objects, which are of no use
    afterwards. A model that nobody holds is left as it is.

    Raises:
        ModelError: this is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError("release takes the transformers model that a generator was made with.")
    found = held_by(model)
    if found is not None:
        found.close()
