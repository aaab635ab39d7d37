"""The random numbers: as splitmix64 defines them, uniform, independent along every axis that is used."""

import itertools

import pytest
import torch
from scipy import stats

from foredraft.core.rng import (
    HashedRng,
    Noise,
    RandomStream,
    RecentTimes,
    derive_seeds,
    draw,
    draw_distinct,
    exponentials,
    first,
    request_seed,
    resolve_seed,
    target_bits,
)

WORD = (1 << 64) - 1
BINS = 16


def _mix(x: int) -> int:
    """The finaliser of splitmix64 in unsigned integers of Python."""
    x &= WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def _slow(seed: int, position: int, stream: RandomStream, index: int) -> float:
    golden = 0x9E3779B97F4A7C15
    state = _mix(seed + golden)
    state = _mix((state ^ position) + golden)
    state = _mix((state ^ (index * 8 + int(stream))) + golden)
    return (state >> 12) * 2.0**-52


def test_hash_is_splitmix64() -> None:
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63), 123456789], [0, 1, 5, 100_000, 7, 2**40]
    noise = Noise(torch.tensor(seeds), torch.tensor(positions))
    for stream in RandomStream:
        index = torch.tensor([[0, 1, 63, 64, 999]]).expand(len(seeds), -1)
        fast = noise.uniform(stream, index)
        slow = [[_slow(s, t, stream, i) for i in index[0].tolist()] for s, t in zip(seeds, positions, strict=True)]
        assert fast.tolist() == slow
    assert _mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first number of splitmix64 with seed 0


def grid(seeds: int, positions: int, indices: int, first_seed: int = 0) -> torch.Tensor:
    """[seed, position, stream, index]"""
    noise = Noise(torch.arange(seeds) + first_seed, torch.zeros(seeds, dtype=torch.long))
    place = torch.arange(positions)[None, :, None].expand(seeds, -1, 1)
    index = torch.arange(indices).expand(seeds, positions, -1)
    return torch.stack([noise.uniform_at(place, stream, index) for stream in RandomStream], 2)


def _uniform(counts: torch.Tensor) -> float:
    return float(stats.chisquare(counts.flatten()).pvalue)


def _independent(a: torch.Tensor, b: torch.Tensor) -> float:
    """How well pairs of these numbers fill a square evenly, as a p-value."""
    cell = (a * BINS).long() * BINS + (b * BINS).long()
    return _uniform(cell.flatten().bincount(minlength=BINS**2))


@pytest.mark.parametrize("first_seed", [0, 2**62, -(2**63)])
def test_uniform(first_seed: int) -> None:
    u = grid(64, 64, 16, first_seed)
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    assert _uniform(torch.histc(u, bins=256, min=0.0, max=1.0)) > 1e-4
    low_bits = (u * 2.0**52).long() % 64
    assert _uniform(low_bits.flatten().bincount(minlength=64)) > 1e-4
    assert u.flatten().unique().numel() == u.numel()


@pytest.mark.parametrize("axis", range(4), ids=["seeds", "positions", "streams", "indices"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_neighbours_are_independent(axis: int, step: int) -> None:
    """Pairs a few steps apart fill a square evenly: small seeds, positions, streams, indices."""
    u = grid(64, 64, 16)
    count = u.shape[axis] - step
    assert _independent(u.narrow(axis, 0, count), u.narrow(axis, step, count)) > 1e-4


def test_seed_and_position_do_not_trade_places() -> None:
    """(seed, position) and (position, seed) share nothing, nor do (seed + 1, t) and (seed, t + 1)."""
    u = grid(64, 64, 16)
    off = ~torch.eye(64, dtype=torch.bool)
    assert not bool((u == u.transpose(0, 1))[off].any())
    assert not bool((u[1:, :-1] == u[:-1, 1:]).any())


def test_numbers_at_other_positions_are_those_of_rows_that_are_there():
    noise, index = Noise(torch.tensor([3, 4]), torch.tensor([10, 20])), torch.arange(4).view(2, 2)
    later = torch.tensor([12, 20])
    wanted = Noise(noise.seeds, later).bits(RandomStream.DRAFT, index)
    assert torch.equal(noise.at(later).bits(RandomStream.DRAFT, index), wanted)
    noise.bits(RandomStream.DRAFT, index)
    moved = noise.at(later)
    assert moved._rows is noise._rows and torch.equal(moved.bits(RandomStream.DRAFT, index), wanted)


def test_rows_are_their_own() -> None:
    noise = Noise(torch.tensor([3, 4, 3]), torch.tensor([10, 20, 10]))
    u = noise.uniform(RandomStream.DRAFT, torch.arange(6).view(1, 2, 3).expand(3, -1, -1))
    alone = Noise(torch.tensor([4]), torch.tensor([20])).uniform(RandomStream.DRAFT, torch.arange(6).view(1, 2, 3))
    assert torch.equal(u[1:2], alone) and torch.equal(u[0], u[2]) and not bool((u[0] == u[1]).any())


def test_coins_toss_the_numbers_of_their_streams() -> None:
    seeds, positions = torch.arange(50), torch.full((50,), 4)
    noise = Noise(seeds, positions)
    coins = HashedRng(noise)
    half = torch.full((50, 200), 0.5)
    tossed = coins.accept(half)
    for index in (0, 1, 63, 64, 199):
        expected = noise.uniform(RandomStream.ACCEPT, torch.full((50,), index)) < 0.5
        assert torch.equal(tossed[:, index], expected)
    assert not bool(coins.accept(torch.zeros(50, 2)).any()) and bool(coins.accept(torch.ones(50, 2)).all())
    law = torch.tensor([0.2, 0.5, 0.3]).expand(50, -1)
    going = torch.ones(50, dtype=torch.bool)
    drawn, ahead = coins.target(law, 3, going), HashedRng(Noise(seeds, positions + 3)).target(law, 0, going)
    assert torch.equal(drawn, ahead)  # keyed by the place in the text
    assert not torch.equal(drawn, coins.target(law, 0, going))
    assert not torch.equal(coins.target(law, 0, going), coins.residual(law))


def bits(count: int, rows: int = 1) -> torch.Tensor:
    """Random bits, ``[rows, count]``."""
    index = torch.arange(count).expand(rows, -1)
    return Noise(torch.arange(rows), torch.zeros(rows, dtype=torch.long)).bits(RandomStream.TARGET, index)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 127, 1000, 16_384, 50_257])
def test_a_token_of_probability_zero_is_never_drawn(size: int) -> None:
    for only in {0, size // 2, size - 1}:
        law = torch.zeros(size)
        law[only] = 1e-30
        assert draw(law.expand(50, -1), bits(50)[0]).unique().tolist() == [only]
    assert 0 <= int(draw(torch.zeros(size), bits(1)[0, 0])) < size  # no law at all: still a token


@pytest.mark.parametrize("size", [2, 5, 37, 300])
def test_draw_follows_the_law(size: int) -> None:
    count = 200_000
    law = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) ** 3
    law[2::4] = 0.0
    counts = draw((7.0 * law).float().expand(count, -1), bits(count)[0]).bincount(minlength=size)
    possible = law > 0
    assert int(counts[~possible].sum()) == 0
    expected = law[possible] / law.sum() * count
    assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


@pytest.mark.parametrize("size", [4, 5, 9])
def test_distinct_draws_follow_the_law_without_the_earlier_ones(size: int) -> None:
    """Every ordered triple."""
    count = 200_000
    law = torch.rand(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) ** 2 + 0.02
    law[1] = 0.0
    law = law / law.sum()
    times = exponentials(bits(count)[0], size)
    tokens, chances = draw_distinct(law.expand(count, -1), times, 3)
    assert torch.equal(chances, law[tokens])
    found = (tokens @ torch.tensor([size * size, size, 1])).bincount(minlength=size**3)
    expected = torch.zeros(size, size, size, dtype=torch.float64)
    for a, b, c in itertools.permutations([token for token in range(size) if token != 1], 3):
        expected[a, b, c] = law[a] * law[b] / (1 - law[a]) * law[c] / (1 - law[a] - law[b])
    expected = expected.flatten() * count
    possible = expected > 0
    assert int(found[~possible].sum()) == 0
    assert stats.chisquare(found[possible], expected[possible]).pvalue > 1e-4


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
def test_distinct_draws_end_with_the_law(size: int) -> None:
    """Each token of the law once, then none."""
    law = torch.rand(500, size, generator=torch.Generator().manual_seed(size)) + 0.1
    law[:, 2::3] = 0.0
    count, support = size + 2, int((law[0] > 0).sum())
    times = exponentials(bits(500)[0], size)
    tokens, chances = draw_distinct(law, times, count)
    assert torch.equal(chances > 0, (torch.arange(count) < support).expand(500, -1))
    assert torch.equal(tokens[:, :support].sort(1).values, (law[0] > 0).nonzero()[:, 0].expand(500, -1))
    assert torch.equal(draw_distinct(law, times, 1)[0], draw_distinct(law, times, size)[0][:, :1])


def test_draws_of_a_position_and_of_the_next_are_independent() -> None:
    law, count = torch.tensor([0.1, 0.2, 0.3, 0.4]), 40_000
    noise = Noise(torch.arange(count), torch.full((count,), 3))
    index = torch.zeros(count, dtype=torch.long)
    a = draw(law.expand(count, -1), noise.bits_at(torch.full((count,), 3), RandomStream.TARGET, index))
    for other in (
        noise.bits_at(torch.full((count,), 4), RandomStream.TARGET, index),
        noise.bits(RandomStream.RESIDUAL, index),
    ):
        pairs = (a * 4 + draw(law.expand(count, -1), other)).bincount(minlength=16)
        expected = (law[:, None] * law).flatten().double()
        assert stats.chisquare(pairs, expected / expected.sum() * count).pvalue > 1e-4


def test_arrival_times_are_exponential_down_to_the_earliest() -> None:
    """The least of n exponentials of rate 1 is exponential of rate n: the earliest of 49,152 decide the token."""
    size, count = 49_152, 400
    times = exponentials(bits(count)[0], size)
    assert times.dtype == torch.float32 and float(times.min()) > 0 and bool(times.isfinite().all())
    assert stats.kstest(times[:20].flatten().double(), "expon").pvalue > 1e-4
    assert stats.kstest(times.amin(1).double() * size, "expon").pvalue > 1e-4
    assert times[0].unique().numel() > size - 400, "the uniform numbers behind them have more than 24 bits"
    early = times[times < 1e-3]
    assert early.unique().numel() > 0.99 * early.numel(), "small times keep their relative precision"


@pytest.mark.parametrize("shape", [[0.5, 0.3, 0.2, 0.0], [0.0, 0.97, 0.0, 0.03], [1e-4, 1 - 1e-4, 0.0, 0.0]])
def test_the_race_follows_the_law_exactly(shape: list[float]) -> None:
    """By enumeration of the orders of arrival: token i is first with probability p[i], for every subset of tokens."""
    law, count = torch.tensor(shape, dtype=torch.float64), 200_000
    times = exponentials(bits(count)[0], 4)
    ranks = times.argsort(-1)  # of equal rates: all 24 orders are equally likely
    orders = (ranks @ torch.tensor([64, 16, 4, 1])).bincount(minlength=256)
    assert stats.chisquare(orders[orders > 0]).pvalue > 1e-4 and int((orders > 0).sum()) == 24
    seen = first(law.float().expand(count, -1), times).bincount(minlength=4)
    assert int(seen[law == 0].sum()) == 0
    assert stats.chisquare(seen[law > 0], law[law > 0] * count).pvalue > 1e-4


def test_the_host_hashes_as_tensors_do() -> None:
    seeds = [0, 3, -1, 2**53, -(2**63), 2**63 - 1]
    for position in (0, 1, 4095, 2**40):
        noise = Noise(torch.tensor(seeds), torch.full((len(seeds),), position))
        assert [target_bits(seed, position + 2) for seed in seeds] == noise.target_bits(2).tolist()


def test_times_are_keyed_by_seed_position_and_token_alone() -> None:
    noise = Noise(torch.tensor([3, 4]), torch.tensor([10, 20]))
    times = noise.times(2, 50)
    assert torch.equal(times, Noise(noise.seeds, noise.positions + 2).times(0, 50))
    assert torch.equal(times[1:], Noise(torch.tensor([4]), torch.tensor([22])).times(0, 50))
    assert torch.equal(times[:, :30], noise.times(2, 30)), "a narrower vocabulary has the same times"
    assert not bool((times == noise.times(1, 50)).any()) and not bool((times[0] == times[1]).any())


def test_what_the_next_step_sees_again_is_not_hashed_again() -> None:
    hashed = []
    seeds = torch.tensor([3, 4])
    recent = RecentTimes(lambda bits, count: hashed.append(bits) or exponentials(bits, count))
    fresh = Noise(seeds, torch.tensor([10, 20]))
    for step, (lengths, new) in enumerate([([10, 20], 4), ([11, 23], 3), ([11, 23], 0), ([15, 24], 3)]):
        recent.begin_step()
        noise = Noise(seeds, torch.tensor(lengths), recent)
        hashed.clear()
        found = [noise.times(ahead, 50) for ahead in (0, 1, 1, 0)]
        assert len(hashed) == new, step
        plain = Noise(seeds, noise.positions)
        assert all(torch.equal(each, plain.times(a, 50)) for each, a in zip(found, (0, 1, 1, 0), strict=True))
    assert torch.equal(fresh.at(torch.tensor([15, 24])).times(0, 50), found[0])


def test_rounding_of_the_logits_hardly_ever_gives_another_token() -> None:
    """Logits of wide and narrow forwards differ by about 1e-5; the inverse of a running sum flips 30 times as often."""
    source = torch.Generator().manual_seed(0)
    flips = edges = 0
    for part in range(16):
        logits = 4.0 * torch.randn(256, 16_384, generator=source)
        other = logits + 1e-4 * torch.randn(logits.shape, generator=source)
        noise = Noise(torch.arange(256) + 256 * part, torch.zeros(256, dtype=torch.long))
        own = noise.bits(RandomStream.TARGET, torch.zeros(256, dtype=torch.long))
        flips += int((draw(logits.softmax(-1), own) != draw(other.softmax(-1), own)).sum())
        u = noise.uniform(RandomStream.TARGET, torch.zeros(256, dtype=torch.long))[:, None]
        first, second = (torch.searchsorted(each.softmax(-1).double().cumsum(-1), u) for each in (logits, other))
        edges += int((first != second).sum())
    assert flips <= 2 and edges > 10 * max(flips, 1)


def test_a_call_without_a_seed_is_given_a_new_one() -> None:
    assert resolve_seed(5) == 5 and resolve_seed(0) == 0
    assert len({resolve_seed(None) for _ in range(20)}) == 20
    assert all(0 <= resolve_seed(None) < 2**53 for _ in range(20))


def test_requests_with_one_seed_have_streams_of_their_own() -> None:
    """Seeds of outputs, of requests and of loops inside them never meet."""
    found = [seed for base in range(-3, 60) for seed in derive_seeds(base, 40)[1:]]
    found += [request_seed(base, number) for base in range(-3, 60) for number in range(40)]
    noise = Noise(torch.arange(-3, 60), torch.zeros(63, dtype=torch.long))
    found += [int(seed) for level in range(4) for seed in noise.nested(level).seeds]
    assert len(set(found)) == len(found) and not set(found) & set(range(-3, 60))


def test_nested_noise_shares_nothing_with_what_is_around_or_beside_it() -> None:
    """Seeds of a loop inside differ by row, position and level, and so do its numbers, at every later position."""
    seeds, positions = torch.arange(16).repeat_interleave(16), torch.arange(16).repeat(16)
    outer = Noise(seeds, positions)
    loops = [outer, *(outer.nested(level) for level in range(3)), outer.nested(0).nested(0)]
    kept = torch.cat([noise.seeds for noise in loops[1:]])
    assert kept.unique().numel() == kept.numel()
    place = torch.arange(24)[None, :, None].expand(256, -1, 1)
    index = torch.arange(4).expand(256, 24, -1)
    every = [torch.stack([noise.uniform_at(place, s, index) for s in RandomStream], -1) for noise in loops]
    inner = torch.stack(every[1:]).flatten()
    assert inner.unique().numel() == inner.numel()
    assert _uniform(torch.histc(inner, bins=256, min=0.0, max=1.0)) > 1e-4
    for a in range(len(every)):
        assert torch.equal(loops[a].positions, positions)
        for b in range(a):
            rows = slice(None, None, 17 if b == 0 else 1)  # the same seed at 16 positions is one number, not 16
            assert _independent(every[a][rows], every[b][rows]) > 1e-4


@pytest.mark.parametrize("step", [1, 2, 3])
def test_later_steps_of_a_nested_loop_are_independent_of_earlier_ones(step: int) -> None:
    """The same inner position is visited again by loops that begin a few positions later."""
    seeds, positions = torch.arange(256).repeat_interleave(16), torch.arange(16).repeat(256)
    inner = Noise(seeds, positions).nested(0)
    place = torch.full((4096, 1), 20)
    u = inner.uniform_at(place, RandomStream.ACCEPT, torch.arange(16).expand(4096, -1)).view(256, 16, 16)
    assert _independent(u[:, step:], u[:, :-step]) > 1e-4
