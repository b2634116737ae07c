"""Admission: order, room, lanes, and nobody waiting for ever."""

import asyncio
import contextlib
import math
import random

import pytest

from pipelines.admission import Admission
from pipelines.waiting import OLDEST_EVERY, Ask
from schemas.failures import NotBegun


def ask(priority=0, *, lane="batch", sequences=1, prompt=(), max_tokens=1, kind=None, salt="", **run):
    return Ask(lane, priority, sequences, list(prompt), max_tokens, kind, salt, **run)


class Door:
    """Requests before an admission, by name; each leaves when told, or when it is set aside, to ask again."""

    def __init__(self, admission):
        self.admission = admission
        self.entered = []
        self.aside = []
        self.tasks = {}
        self.leave = {}

    async def send(self, name, asked):
        leave = self.leave[name] = asyncio.Event()

        async def stay():
            place = None
            while place is None or place.set_aside.is_set():
                async with self.admission.room(asked, can_leave=True, again=place) as place:
                    self.entered.append(name)
                    gone = [asyncio.create_task(event.wait()) for event in (leave, place.set_aside)]
                    try:
                        await asyncio.wait(gone, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for task in gone:
                            task.cancel()
                if leave.is_set():
                    return
                self.aside.append(name)

        self.tasks[name] = asyncio.create_task(stay())
        await settle()

    async def done(self, *names):
        for name in names:
            self.leave[name].set()
        await settle()

    async def close(self):
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle():
    for _ in range(6):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def door(sequences=2, tokens=10_000, block_size=4, batch_share=1.0, **more):
    opened = Door(Admission(sequences, tokens, block_size, batch_share, **more))
    yield opened
    await opened.close()
    admission = opened.admission
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    assert admission._all.num_tokens == 0 and not admission._kinds
    assert all(usage.num_tokens == 0 for usage in admission._in_use.values())


def test_lower_priorities_go_first_and_equal_ones_by_age():
    async def check():
        async with door(sequences=1) as at:
            for name, priority in (("first", 0), ("late", 5), ("b", 1), ("c", 1), ("urgent", -7)):
                await at.send(name, ask(priority))
            for name in ("first", "urgent", "b", "c"):
                await at.done(name)
            assert at.entered == ["first", "urgent", "b", "c", "late"]

    asyncio.run(check())


def test_a_reserve_stays_free_for_people():
    async def check():
        async with door(sequences=4, batch_share=0.5) as at:
            for number in range(4):
                await at.send(f"batch{number}", ask(-100))
            assert at.entered == ["batch0", "batch1"]
            for number in range(3):
                await at.send(f"person{number}", ask(9, lane="online"))
            assert at.entered[2:] == ["person0", "person1"]
            # A place that a batch request leaves goes to the person who waits.
            await at.done("batch0")
            assert at.entered[4:] == ["person2"]

    asyncio.run(check())


def test_room_is_counted_in_tokens_of_the_cache_too():
    async def check():
        async with door(sequences=100, tokens=100) as at:
            await at.send("a", ask(prompt=range(40), max_tokens=20))
            await at.send("b", ask(prompt=range(100, 140), max_tokens=20))
            await at.send("c", ask(prompt=[7], max_tokens=1))
            # Nothing small slips past the one whose turn it is.
            assert at.entered == ["a"]
            await at.done("a")
            assert at.entered == ["a", "b", "c"]

    asyncio.run(check())


def test_a_prompt_that_is_in_the_engine_already_takes_no_room_again():
    async def check():
        async with door(sequences=100, tokens=100) as at:
            await at.send("a", ask(prompt=range(80), max_tokens=5))
            await at.send("same beginning", ask(prompt=[*range(80), 1], max_tokens=5))
            await at.send("salted", ask(prompt=range(80), max_tokens=5, salt="x"))
            assert at.entered == ["a", "same beginning"]

    asyncio.run(check())


def test_a_prompt_stays_counted_while_anybody_has_it():
    async def check():
        async with door(sequences=100, tokens=100) as at:
            await at.send("a", ask(prompt=range(80), max_tokens=5))
            await at.send("same beginning", ask(prompt=[*range(80), 1], max_tokens=5))
            await at.done("a")
            await at.send("other", ask(prompt=range(100, 180), max_tokens=5))
            assert at.entered == ["a", "same beginning"]
            await at.done("same beginning")
            assert at.entered == ["a", "same beginning", "other"]

    asyncio.run(check())


def test_what_is_larger_than_all_there_is_comes_in_alone():
    async def check():
        async with door(sequences=4, tokens=50, batch_share=0.5) as at:
            await at.send("small", ask())
            await at.send("huge", ask(sequences=99, prompt=range(400), max_tokens=9))
            assert at.entered == ["small"]
            await at.done("small")
            assert at.entered == ["small", "huge"]
            await at.send("next", ask())
            assert at.entered == ["small", "huge"]

    asyncio.run(check())


def test_answers_that_are_shorter_than_they_might_be_let_more_in():
    async def check():
        async with door(sequences=1000, tokens=2_000) as at:
            for _ in range(100):
                at.admission._observe(10)
            for number in range(200):
                await at.send(number, ask(max_tokens=4_000))
            assert 100 < len(at.entered) < 200

    asyncio.run(check())


def test_kinds_that_spoil_one_another_are_kept_apart():
    async def check():
        async with door(sequences=10) as at:
            await at.send("top", ask(kind="top"))
            await at.send("ids", ask(kind="ids"))
            await at.send("plain", ask())
            await at.send("person", ask(lane="online"))
            assert at.entered == ["top", "person"]
            await at.done("top")
            assert at.entered[2:] == ["ids", "plain"]

    asyncio.run(check())


def test_nobody_waits_for_ever_behind_urgent_ones():
    async def check():
        async with door(sequences=1) as at:
            await at.send("running", ask())
            await at.send("patient", ask(9))
            for number in range(2 * OLDEST_EVERY):
                await at.send(number, ask(-1))
            await at.done("running")
            while "patient" not in at.entered:
                await at.done(at.entered[-1])
            assert at.entered.index("patient") == OLDEST_EVERY - 1

    asyncio.run(check())


def test_one_who_leaves_while_waiting_holds_nothing_and_blocks_nobody():
    async def check():
        async with door(sequences=1) as at:
            await at.send("a", ask())
            await at.send("gone", ask(-1))
            await at.send("b", ask())
            at.tasks["gone"].cancel()
            await settle()
            await at.done("a")
            assert at.entered == ["a", "b"]

    asyncio.run(check())


def test_runs_at_one_priority_go_by_when_they_must_be_done():
    async def check():
        async with door(sequences=1) as at:
            await at.send("running", ask())
            for name, priority, due in (
                ("never", 0, math.inf),
                ("late", 0, 9.0),
                ("soon", 0, 5.0),
                ("urgent", -1, 99.0),
            ):
                await at.send(name, ask(priority, run=name, due=due))
            for name in ("running", "urgent", "soon", "late"):
                await at.done(name)
            assert at.entered == ["running", "urgent", "soon", "late", "never"]

    asyncio.run(check())


def test_runs_that_are_equal_share_evenly_by_tokens():
    async def check():
        async with door(sequences=1, tokens=100_000) as at:
            await at.send("running", ask())
            at.admission._observe(10)
            for number in range(40):
                await at.send(("long", number), ask(run="long", prompt=range(number * 100, number * 100 + 30)))
            for number in range(120):
                await at.send(
                    ("short", number), ask(run="short", prompt=range(9_000 + number * 20, 9_009 + number * 20))
                )
            await at.done("running")
            while len(at.entered) < 60:
                await at.done(at.entered[-1])
            runs = [name[0] for name in at.entered[1:]]
            # 31 tokens each against 10: three short ones for a long one, and neither waits for the other's end.
            assert runs.count("short") / runs.count("long") == pytest.approx(3.1, rel=0.15)

    asyncio.run(check())


def test_people_who_find_no_room_set_the_youngest_of_the_least_urgent_aside():
    async def check():
        async with door(sequences=4, gives_way=True) as at:
            for name, priority in (("old", 5), ("urgent", 0), ("young", 5), ("youngest", 5)):
                await at.send(name, ask(priority))
            await at.send("waits", ask(5))
            for number in range(2):
                await at.send(f"person{number}", ask(9, lane="online"))
            assert at.aside == ["youngest", "young"] and at.entered[4:] == ["person0", "person1"]
            assert at.admission.num_set_aside == 2
            # They come in again before what is as urgent and younger; nothing comes in before a person who waits.
            await at.done("person0", "person1")
            assert at.entered[6:] == ["young", "youngest"]
            await at.send("many", ask(9, lane="online", sequences=4))
            assert at.entered[8:] == ["many"] and len(at.aside) == 6

    asyncio.run(check())


def test_nobody_is_set_aside_where_that_wouldnt_do():
    async def check():
        async with door(sequences=4, gives_way=True) as at:
            await at.send("person", ask(lane="online", sequences=2))
            await at.send("batch", ask())
            await at.send("many", ask(lane="online", sequences=3))
            assert at.entered == ["person", "batch"] and not at.aside
            # The room that is there is kept for who waits.
            await at.send("another", ask())
            assert "another" not in at.entered
            await at.done("person")
            assert at.entered[2:] == ["many"]
            await at.done("many")
            assert at.entered[3:] == ["another"]

    asyncio.run(check())


def test_another_kind_is_set_aside_too():
    async def check():
        async with door(sequences=9, gives_way=True) as at:
            for name, kind in (("top", "top"), ("none", None)):
                await at.send(name, ask(kind=kind))
            await at.send("person", ask(lane="online", kind="ids"))
            assert at.entered == ["top", "none", "person"] and at.aside == ["top"]

    asyncio.run(check())


def test_places_that_people_needed_lately_are_kept_free_for_a_while():
    async def check():
        now = [0.0]
        async with door(sequences=64, gives_way=True, clock=lambda: now[0]) as at:
            for number in range(80):
                await at.send(number, ask())
            assert at.admission.num_batch == at.admission.batch_budget == 64
            for number in range(4):
                await at.send(f"person{number}", ask(lane="online"))
            assert len(at.aside) == 4 and at.admission.batch_budget == 60
            await at.done(*(f"person{number}" for number in range(4)))
            # A person who comes next finds room at once.
            assert at.admission.batch_budget == 60 and at.admission.num_batch == 60
            await at.send("next", ask(lane="online"))
            assert len(at.aside) == 4
            await at.done("next")
            now[0] += 300
            await at.done(at.entered[0])
            assert at.admission.num_batch == at.admission.batch_budget == 64

    asyncio.run(check())


def test_what_a_crowd_needed_is_kept_free_in_part_alone():
    async def check():
        async with door(sequences=64, gives_way=True) as at:
            for number in range(48):
                await at.send(f"person{number}", ask(lane="online"))
            for number in range(80):
                await at.send(number, ask())
            assert at.admission.num_batch == 16
            await at.done(*(f"person{number}" for number in range(48)))
            assert at.admission.num_batch == 64 - 8

    asyncio.run(check())


@pytest.mark.parametrize("seed", range(5))
def test_room_is_never_overdrawn_and_everybody_gets_in(seed):
    draw = random.Random(seed)  # noqa: S311

    async def check():
        admission = Admission(8, 200, 4, 0.5)
        peak = [0]

        async def visit():
            asked = ask(
                draw.randint(-5, 5),
                lane=draw.choice(["batch", "online"]),
                sequences=draw.randint(1, 10),
                prompt=range(draw.randint(0, 120)),
                max_tokens=draw.randint(1, 60),
                kind=draw.choice([None, None, "top", "ids"]),
            )
            await asyncio.sleep(draw.random() / 100)
            async with admission.room(asked) as place:
                peak[0] = max(peak[0], admission.num_running)
                everybody, batch = admission._all, admission._in_use["batch"]
                assert everybody.num_sequences <= 8 and everybody.num_tokens <= 200 and batch.num_sequences <= 4
                # One of it comes in whatever it holds, where people hold most of its prompt already.
                assert batch.num_tokens <= 100 or len(admission._batch_places) == 1
                assert len(admission._kinds) <= 1
                await asyncio.sleep(draw.random() / 1000)
                place.observe(draw.randint(1, asked.max_tokens))

        visits = [asyncio.create_task(visit()) for _ in range(300)]
        for task in draw.sample(visits, 30):
            asyncio.get_running_loop().call_later(draw.random() / 50, task.cancel)
        results = await asyncio.wait_for(asyncio.gather(*visits, return_exceptions=True), 30)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert admission.num_running == admission.num_waiting == 0 and peak[0] == 8

    asyncio.run(check())


def test_a_closed_admission_lets_those_inside_finish_and_nobody_else_in():
    async def run():
        door = Door(Admission(1, 1000, 32))
        await door.send("inside", ask())
        await door.send("waiting", ask())
        door.admission.close()
        await settle()
        await door.send("late", ask())
        for name in ("waiting", "late"):
            with pytest.raises(NotBegun):
                await door.tasks[name]
        assert door.entered == ["inside"] and door.admission.num_running == 1
        await door.done("inside")
        assert door.admission.num_running == 0 and door.admission.num_waiting == 0
        await door.close()

    asyncio.run(run())
