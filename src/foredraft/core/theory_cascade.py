"""What cascades of drafters can gain: vertical and horizontal, after CS Drafting (Chen et al., arXiv:2312.11462).

Letters are those of ``theory``: alpha is the acceptance of the outer draft under the target, beta (alpha' in the paper)
that of the inner draft under the middle model, each independent and the same everywhere; costs are times of one forward
in units of the target's. A middle that is not drafted for at all (``inner`` is 0) is the draft model of ``theory``.
"""

from collections.abc import Sequence

from foredraft.core.errors import OptionError
from foredraft.core.theory import check_alpha, check_cost, check_length, geometric


def block_generating(beta: float, inner: int, x: float) -> float:
    """phi(x) = E x^L, L being what one inner step says: at most ``inner`` accepted tokens, and one of the middle's.

    phi(x) = 1 + (x - 1) (1 - beta^(k+1) x^(k+1)) / (1 - beta x), section 4 of the paper with k = ``inner``.
    """
    check_alpha(beta)
    check_length("inner", inner)
    check_alpha(x)
    return 1.0 + (x - 1.0) * geometric(beta * x, inner + 1)


def blocks_tokens(alpha: float, beta: float, inner: int, blocks: int) -> float:
    """Tokens a step of the target, with the bonus, where n inner steps draft: (1 - alpha phi(alpha)^n) / (1 - alpha).

    How many tokens they draft is left to chance, so the formula is the paper's and not of what this library does.
    """
    check_length("blocks", blocks)
    check_alpha(alpha)
    if alpha == 1.0:
        return 1.0 + blocks * geometric(beta, inner + 1)
    return (1.0 - alpha * block_generating(beta, inner, alpha) ** blocks) / (1.0 - alpha)


def blocks_speed_up(alpha: float, beta: float, inner: int, blocks: int, costs: tuple[float, float]) -> float:
    """Plain time over cascaded time: ``blocks_tokens`` / (1 + n c1 + n k c2).

    Args:
        costs: c1 and c2, of a forward of the middle and of a token drafted for it.
    """
    for cost in costs:
        check_cost(cost)
    spent = 1.0 + blocks * costs[0] + blocks * inner * costs[1]
    return blocks_tokens(alpha, beta, inner, blocks) / spent


def inner_work(beta: float, inner: int, length: int) -> tuple[float, float]:
    """Inner steps, and tokens drafted in them, that a draft of exactly ``length`` tokens takes on average.

    The last token of an inner step is the middle's own, so a step that has r tokens left to say drafts at most r - 1.
    """
    check_alpha(beta)
    check_length("inner", inner)
    check_length("length", length)
    work = [(0.0, 0.0)]
    for left in range(1, length + 1):
        drafted = min(inner, left - 1)
        chances = [beta**i * (1.0 - beta) for i in range(drafted)] + [beta**drafted]
        after = [work[left - 1 - accepted] for accepted in range(drafted + 1)]
        steps = 1.0 + sum(chance * rest[0] for chance, rest in zip(chances, after, strict=True))
        work.append((steps, drafted + sum(chance * rest[1] for chance, rest in zip(chances, after, strict=True))))
    return work[length]


def cascade_speed_up(alpha: float, beta: float, inner: int, length: int, costs: tuple[float, float]) -> float:
    """Plain time over the time of a cascade that drafts exactly ``length`` tokens, as ``drafters/cascade.py`` does.

    With ``inner`` 0 it is ``theory.speed_up`` at cost c1. Costs are those of ``blocks_speed_up``.
    """
    check_alpha(alpha)
    for cost in costs:
        check_cost(cost)
    steps, drafted = inner_work(beta, inner, length)
    return geometric(alpha, length + 1) / (1.0 + steps * costs[0] + drafted * costs[1])


def relay_speed_up(alphas: Sequence[float], costs: Sequence[float]) -> float:
    """Plain time over the time of a horizontal cascade: (1 + sum_i prod_{j<=i} alpha_j) / (1 + sum_i c_i).

    Args:
        alphas, costs: of the drafter of each token in turn, each acceptance given that those before it were accepted.
    """
    if len(alphas) != len(costs):
        raise OptionError(f"There are {len(alphas)} acceptances and {len(costs)} costs: one of each for every token.")
    tokens, reach = 1.0, 1.0
    for alpha, cost in zip(alphas, costs, strict=True):
        check_alpha(alpha)
        check_cost(cost)
        reach *= alpha
        tokens += reach
    return tokens / (1.0 + sum(costs))
