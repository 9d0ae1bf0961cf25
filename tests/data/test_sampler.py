"""Which sample and which task belong to a step: functions of the seed and the step, open at any place."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffcap.data.sampler import ShuffledEpochs, StepDataset, TaskSchedule, step_generator


@pytest.mark.parametrize("size", [1, 7, 40])
def test_every_epoch_has_every_sample_once(size: int) -> None:
    stream = ShuffledEpochs(size, seed=3)
    drawn = stream.take(0, 5 * size)
    for epoch in range(5):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_stream_opens_at_any_place_in_any_order() -> None:
    whole = ShuffledEpochs(11, seed=1).take(0, 400)
    stream = ShuffledEpochs(11, seed=1)
    for start, count in ((300, 50), (0, 11), (5, 100), (399, 1), (10, 2)):
        assert np.array_equal(stream.take(start, count), whole[start : start + count]), (start, count)


def test_tasks_come_by_their_shares() -> None:
    schedule = TaskSchedule({"mlm": 8, "mvcl": 1, "fda": 2}, seed=1234)
    drawn = [schedule.at(step)[0] for step in range(11_000)]
    for task, share in (("mlm", 8), ("mvcl", 1), ("fda", 2)):
        assert drawn.count(task) == pytest.approx(1000 * share, rel=0.1)
    runs = sum(a == b for a, b in pairwise(drawn)) / len(drawn)
    assert runs == pytest.approx((8**2 + 1 + 2**2) / 11**2, abs=0.03)  # drawn one by one, not in turn


def test_the_task_of_a_step_does_not_depend_on_what_was_asked_before() -> None:
    one, other = TaskSchedule({"a": 1, "b": 1}, seed=5), TaskSchedule({"a": 1, "b": 1}, seed=5)
    late = other.at(9000)
    assert [one.at(step) for step in range(9001)][-1] == late
    assert [one.at(step) for step in range(50)] == [other.at(step) for step in range(50)]
    different = TaskSchedule({"a": 1, "b": 1}, seed=6)
    assert [one.at(step)[0] for step in range(50)] != [different.at(step)[0] for step in range(50)]


def test_random_numbers_of_steps_and_seeds_differ() -> None:
    def draw(seed: int, step: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=step_generator(seed, step)).tolist())

    places = [(seed, step) for seed in (0, 1, 1234) for step in (0, 1, 2**20)]
    assert len({draw(*place) for place in places}) == len(places)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_come_in_the_order_of_the_steps_whoever_makes_them(workers: int) -> None:
    batches = DataLoader(StepDataset(_numbered, first=17), batch_size=None, num_workers=workers)
    assert [batch["step"] for batch in islice(batches, 8)] == list(range(17, 25))


def _numbered(step: int) -> dict[str, int]:
    return {"step": step}
