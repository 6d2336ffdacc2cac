"""The schedule kernel against the reference, bit for bit, over routings, sizes and virtual ranks."""

import random

import pytest
import torch

from tests.gpu.world import KINDS, Case, Layer, World, assert_schedules, route


def schedules(layer, device, calls=3, **settings):
    """Several schedules through one workspace, each with other ids, each compared."""
    from megatron_mok.native import Settings

    generator = torch.Generator(device).manual_seed(layer.case.seed + 1)
    with World(layer.case, device, Settings(**settings)) as world:
        for i in range(calls):
            prepared = world.prepare(layer)
            world.virtual.launch(prepared, main=())
            torch.cuda.synchronize()  # stands in for the main kernel's last wait, before ids are overwritten
            world.virtual.check()
            assert_schedules(layer, prepared)
            kind = KINDS[i % len(KINDS)]
            layer.ids = [
                route(kind, t, layer.case.top_k, layer.case.experts, generator) for t in layer.case.tokens
            ]


def case(tokens, top_k, experts, routing="random", seed=0, max_tokens=0):
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    return Case(tokens, top_k, experts, 128, 128, routing, seed, max_tokens=max_tokens)


def random_schedule(seed):
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2, 3, 4, 8])
    tokens = tuple(rng.choice([0, 1, 31, rng.randint(0, 600), rng.randint(0, 5000)]) for _ in range(ranks))
    return case(
        tokens,
        top_k=rng.choice([1, 2, 3, 8, 17, 32]),
        experts=ranks * rng.choice([1, 2, 7, 32, 33, 130]),
        routing=rng.choice(KINDS),
        seed=seed,
        max_tokens=max(tokens) + rng.choice([0, 9]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_random(seed, device):
    schedules(Layer.make(random_schedule(seed), device), device)


CORNERS = {
    "B01-one rank gets everything": case((512, 512, 512, 512), 2, 8, "rank 0"),
    "B05-rank without tokens": case((512, 0, 512, 512), 2, 8),
    "no tokens at all": case((0, 0), 2, 4, max_tokens=5),
    "one rank no tokens": case(0, 2, 4, max_tokens=5),
    "B06-uneven": case((512, 768, 512, 1024), 2, 8),
    "B07-one expert": case((2304,), 8, 64, "one expert"),
    "B08-repeated": case((100,), 4, 8, "repeated"),
    "B09-absent": case((512,), 2, 8, "absent"),
    "B13-top 1": case((300,), 1, 8),
    "B15-512 experts": case((1024,), 8, 512),
    "B15-65 experts": case((1024,), 8, 65),
    "B18-one token": case((1,), 8, 8),
    "B18-not a multiple": case((513,), 8, 8),
    "top 32": case((257, 255), 32, 64),
    "many chunks": case((30000,), 8, 16),
    "B72-6 ranks": case((40, 50, 60, 70, 80, 90), 3, 12),
    "B72-12 ranks": case((100,) * 12, 4, 24),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corner(name, device):
    schedules(Layer.make(CORNERS[name], device), device, calls=2)


@pytest.mark.parametrize("experts", [513, 896, 1024, 1025])
def test_B15_more_experts_on_a_rank_than_the_kernels_count_are_refused(experts, device):
    layer = Layer.make(case((8,), 1, experts), device)
    with (
        World(layer.case, device) as world,
        pytest.raises(ValueError, match=f"num_experts / num_ranks: got {experts}, need 1 to 512"),
    ):
        world.prepare(layer)


@pytest.mark.parametrize("num_sms", [4, 6, 64])
def test_any_grid_gives_the_same_table(num_sms, device):
    schedules(Layer.make(case((3000, 1000), 8, 32), device), device, num_sms=num_sms)


@pytest.mark.parametrize(("tokens", "experts"), [(2048, 8), (8192, 128)], ids=["C", "B"])
def test_takes_little_time(tokens, experts, device):
    """Well under 50 us for one rank; the bound leaves room for a slow card."""
    layer = Layer.make(case(tokens, 8, experts, "distinct"), device)
    with World(layer.case, device) as world:
        call = world.virtual.prepare(layer.inputs(), num_experts=experts)[0]
        torch.cuda.synchronize()
        stream = world.virtual.streams[0]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**6)  # launches queue up behind it, so that gaps of the host do not count
            call.schedule_rows()
            begin.record()
            for _ in range(20):
                call.schedule_rows()
            end.record()
        torch.cuda.synchronize()
        world.virtual.check()
        microseconds = begin.elapsed_time(end) * 1e3 / 20
        print(f"schedule of T={tokens}, E={experts}: {microseconds:.1f} us")
        assert microseconds < 50
