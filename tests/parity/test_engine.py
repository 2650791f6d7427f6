"""The engine on a tiny decoder in plain torch: it generates what the decoder says without pools, batches, eviction and preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.parity.engine import Engine
from replayer.parity.errors import PoolTooSmall, ScheduleMismatch
from replayer.parity.flushes import FlushLog
from replayer.parity.pools import Allocation, KVPools, Layout
from replayer.parity.requests import Request
from replayer.parity.sampling import choose, top_logprobs
from replayer.parity.schedule import Decode, Evict, Extend, Preempt
from replayer.parity.scheduler import Limits, follow, serve
from tests.parity.toy import SETUP, VOCABULARY, ToyModel, toy_requests

pytestmark = pytest.mark.cpu

#: So few that prefixes are evicted and requests preempted.
CROWDED = Allocation(tokens=150)


def served(
    requests: list[Request],
    allocation: Allocation = CROWDED,
    layout: Layout = SETUP.layout,
    seed: int = 0,
) -> Engine:
    model = ToyModel(seed, torch.float64)
    with FlushLog("cpu") as log:
        engine = Engine(model, KVPools(model.shape, layout, allocation, log), requests)
        serve(engine, SETUP.limits)
    return engine


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("window", [24, 7, None])
def test_answers_are_those_of_the_bare_model(page_size: int, window: int | None) -> None:
    """In float64, so that what another order of sums changes is far below what a wrong key would."""
    requests, layout = toy_requests(20), Layout(page_size, window)
    engine = served(requests, Allocation(tokens=260 if window is None else 190), layout)
    kinds = {type(operation) for operation in engine.schedule}
    assert {Extend, Decode, Evict} <= kinds
    model = ToyModel(0, torch.float64)
    for request in requests:
        made = engine.generations[request.name]
        assert len(made.output_ids) == request.max_new_tokens
        text = [*request.input_ids, *made.output_ids[:-1]]
        logits = model.dense(text, layout)[len(request.input_ids) - 1 :]
        expected = torch.log_softmax(logits.float(), -1)
        for number, (ids, logprobs) in enumerate(zip(made.top_ids, made.top_logprobs, strict=True)):
            torch.testing.assert_close(expected[number][ids], torch.tensor(logprobs), rtol=0, atol=2e-6)
            assert choose(ids, logprobs, request.temperature, request.seed, number) == made.output_ids[number]


@pytest.mark.parametrize("lazy", [True, False])
def test_crowded_pools_evict_preempt_move_and_leak_nothing(lazy: bool) -> None:
    model, requests = ToyModel(), toy_requests(30)
    with FlushLog("cpu") as log:
        pools = KVPools(model.shape, SETUP.layout, replace(CROWDED, lazy=lazy), log)
        engine = Engine(model, pools, requests)
        serve(engine, SETUP.limits)
        found = log.summary()
    preempted = [each.request for each in engine.schedule if isinstance(each, Preempt)]
    reused = [prefix for each in engine.schedule if isinstance(each, Extend) for _, prefix in each.requests]
    assert len(preempted) >= 3 and sum(reused) >= 50
    assert found["pages_moved"] >= 100 and (found["urgent_that_moved"] >= 10 or not lazy)
    for request in requests:
        assert len(engine.generations[request.name].output_ids) == request.max_new_tokens
    # All that lives is what the prefix cache holds, and that can be taken back to the last page.
    full, window = engine.cache.held()
    assert pools.live_tokens() == (len(full) + len(window)) * pools.page_size
    while engine.evict("full", 64):
        pass
    assert pools.live_tokens() == 0


class Silent(ToyModel):
    """Computes nothing: for what does not depend on keys and values."""

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch
    ) -> torch.Tensor:
        return torch.zeros(len(rows), VOCABULARY)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([None, 1, 5, 24]),
    tokens=st.integers(150, 320),
    limits=st.builds(Limits, st.integers(1, 7), st.integers(1, 120)),
    lazy=st.booleans(),
)
def test_any_pools_finish_every_request_and_repeat_on_large_ones(
    seed: int, page_size: int, window: int | None, tokens: int, limits: Limits, lazy: bool
) -> None:
    model, requests, layout = Silent(), toy_requests(8, seed), Layout(page_size, window)
    with FlushLog("cpu") as log:
        pools = KVPools(model.shape, layout, Allocation(tokens, lazy=lazy), log)
        engine = Engine(model, pools, requests)
        serve(engine, limits)
        large = KVPools(model.shape, layout, Allocation(3000), log)
        again = Engine(model, large, requests, flushes_between=False)
        follow(again, engine.schedule)
    assert again.generations == engine.generations
    for each, owner in ((engine, pools), (again, large)):
        full, shared_window = each.cache.held()
        assert owner.live_tokens() == (len(full) + len(shared_window)) * page_size
        ran = [len(made.output_ids) for made in each.generations.values()]
        assert ran == [request.max_new_tokens for request in requests]


def test_a_schedule_repeats_itself_on_other_pools() -> None:
    requests = toy_requests(20)
    first = served(requests)
    model = ToyModel(0, torch.float64)
    with FlushLog("cpu") as log:
        pools = KVPools(model.shape, SETUP.layout, Allocation(tokens=2000), log)
        again = Engine(model, pools, requests, flushes_between=False)
        follow(again, first.schedule)
        assert log.summary()["pages_moved"] == 0
    assert again.schedule == first.schedule
    assert again.generations == first.generations


def test_the_schedule_does_not_depend_on_what_is_generated() -> None:
    """Another model says other things, in the same batches: so a run that went wrong can be followed too."""
    requests = toy_requests(20)
    one, other = served(requests, seed=0), served(requests, seed=1)
    assert one.schedule == other.schedule
    assert one.generations != other.generations


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda schedule: schedule[:-1], "ends with"),
        (lambda schedule: [Extend(((schedule[0].requests[0][0], 2),)), *schedule[1:]], "came out as"),
        (lambda schedule: [Evict("full", 3), *schedule], "came out as"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(spoil, message: str) -> None:
    requests = toy_requests(8)
    schedule = served(requests).schedule
    model = ToyModel(0)
    with FlushLog("cpu") as log:
        engine = Engine(model, KVPools(model.shape, SETUP.layout, Allocation(tokens=2000), log), requests)
        with pytest.raises(ScheduleMismatch, match=message):
            follow(engine, spoil(schedule))


def test_a_schedule_needs_the_room_it_had() -> None:
    requests = toy_requests(12)
    schedule = served(requests, Allocation(tokens=600)).schedule
    model = ToyModel(0)
    with FlushLog("cpu") as log:
        engine = Engine(model, KVPools(model.shape, SETUP.layout, Allocation(tokens=100), log), requests)
        with pytest.raises(ScheduleMismatch, match="too small"):
            follow(engine, schedule)


def test_a_request_that_never_fits_is_said_at_once() -> None:
    long = Request("long", tuple(range(60)), 30)
    with pytest.raises(PoolTooSmall, match="'long' alone"):
        served([*toy_requests(2), long], Allocation(tokens=50))


def test_one_forward_computes_at_most_so_many_tokens() -> None:
    model, requests = ToyModel(), toy_requests(12)
    with FlushLog("cpu") as log:
        engine = Engine(model, KVPools(model.shape, SETUP.layout, Allocation(tokens=2000), log), requests)
        serve(engine, Limits(max_running=3, max_prefill_tokens=50))
    lengths = {request.name: len(request.input_ids) for request in requests}
    for each in engine.schedule:
        if isinstance(each, Extend) and len(each.requests) > 1:
            assert sum(lengths[name] - prefix for name, prefix in each.requests) <= 50
        if isinstance(each, Decode):
            assert len(each.requests) <= 3


def test_sampling_depends_on_seed_and_number_alone() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    ids, logprobs = top_logprobs(logits)
    assert len(ids[0]) == 20 and logprobs[0] == sorted(logprobs[0], reverse=True)
    assert choose(ids[0], logprobs[0], 0.0, 1, 5) == ids[0][0]
    drawn = [choose(ids[0], logprobs[0], 0.8, 1, number) for number in range(50)]
    assert drawn == [choose(ids[0], logprobs[0], 0.8, 1, number) for number in range(50)]
    assert len(set(drawn)) > 5 and set(drawn) <= set(ids[0])
    assert drawn != [choose(ids[0], logprobs[0], 0.8, 2, number) for number in range(50)]
    assert choose(ids[0], [float("nan")] * 20, 0.8, 1, 0) == ids[0][0]
