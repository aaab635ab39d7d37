"""The order of calls that wait."""

import asyncio

from foredraft.serve.conversions import Turns


def order(sizes: list[int], *, cancelled: tuple[int, ...] = (), later: tuple[int, ...] = ()) -> list[int]:
    """The order in which calls of these sizes run; at each turn the next of ``later`` comes to wait."""

    async def main() -> list[int]:
        turns, ran, coming = Turns(), list[int](), list(later)
        tasks: list[asyncio.Task[None]] = []

        async def call(size: int) -> None:
            async with turns.turn(size):
                ran.append(size)
                if coming:
                    tasks.append(asyncio.create_task(call(coming.pop(0))))
                    await asyncio.sleep(0)

        tasks += [asyncio.create_task(call(size)) for size in sizes]
        async with turns.turn(0):
            await asyncio.sleep(0)  # all of them wait
            for number in cancelled:
                tasks[number].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
        async with turns.turn(0):  # free again
            return ran

    return asyncio.run(main())


def test_the_smallest_and_the_oldest_go_next_by_turns():
    assert order([5, 4, 3, 1, 2]) == [1, 5, 2, 4, 3]
    assert order([5, 4, 3, 1, 2], cancelled=(0, 3)) == [2, 4, 3]


def test_a_large_call_gets_its_turn_among_ever_new_small_ones():
    assert order([9, 1, 1], later=(1,) * 20).index(9) == 1


def test_a_small_call_does_not_wait_for_all_large_ones():
    ran = order([9] * 10, later=(9, 9, 1, *[9] * 10))
    assert 3 < ran.index(1) <= 5
