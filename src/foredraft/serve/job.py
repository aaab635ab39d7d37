"""What a request asks the engine for."""

from dataclasses import dataclass

from foredraft.core.sampling.params import SamplingParams
from foredraft.model.text.grammar import CompiledGrammar


@dataclass(frozen=True, slots=True)
class Job:
    """``count`` outputs of each prompt (token ids), prompt by prompt.

    ``stop_token_ids``: those of the request, not the model's own. ``echo``: prompts as text, if the answer repeats
    them. ``scored``: it has log-probabilities of their tokens, with this many alternatives. ``generates``: False if
    only prompts are repeated. ``tools_of``: what tells the model of tools, the chat template or the server's prompt,
    and decides how calls look, if the outputs may have any. ``priority``: jobs with a lower one are admitted first.
    ``thinks``: the prompt ends within the assistant's reasoning. ``shown``: special tokens that are part of the text.
    ``grammar``: that of ``params``, which is held here until the engine asks for it.
    """

    prompts: list[list[int]]
    params: SamplingParams
    count: int
    stop_token_ids: tuple[int, ...] = ()
    echo: tuple[str, ...] = ()
    scored: int | None = None
    generates: bool = True
    tools_of: str | None = None
    priority: int = 0
    thinks: bool = False
    shown: frozenset[int] = frozenset()
    grammar: CompiledGrammar | None = None
