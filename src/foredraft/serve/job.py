"""What a request asks the engine for. The server and offline batches start it here."""

from dataclasses import dataclass

from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Job:
    """``count`` outputs of each prompt (token ids), prompt by prompt.

    ``stop_token_ids``: those of the request, not the model's own. ``echo``: prompts as text, if the answer repeats
    them. ``scored``: it has log-probabilities of their tokens, with this many alternatives. ``generates``: False if
    only prompts are repeated. ``tools_of``: what tells the model of tools, the chat template or the server's prompt,
    and decides how calls look, if the outputs may have any. ``priority``: jobs with a lower one are admitted first.
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

    def start(self, generator: Generator, *, tenant: str = "") -> list[Sequence]:
        """Queue the outputs; none if only prompts are repeated. Scores are the caller's, see ``engine.scoring``.

        Raises:
            UsageError: a prompt does not fit the model, or an option names a token that it does not have.
        """
        if self.generates:
            return generator.submit(self.prompts, self.params, self.count, priority=self.priority, tenant=tenant)
        for prompt in self.prompts:
            generator.engine.check_tokens(prompt)
        return []
