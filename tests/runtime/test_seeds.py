"""Seeds: a run's, a sample's, and the generators' state."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain import CheckpointError, ConfigurationError, PartialState, set_seed
from drivetrain.runtime import devices, seeds
from drivetrain.runtime.seeds import RandomState, sample_seed, seed_all_generators
from tests.runtime.pretend import Pretend, pretend_device


def draw() -> tuple[float, ...]:
    """One number from each global generator, and one that uses up half of a pair of Gaussians."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    )


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    with seeds.isolated_random_state():
        yield


@pytest.fixture
def settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_one_seed_gives_one_sequence() -> None:
    set_seed(7)
    first = draw()
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert all(new != old for new, old in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(5), torch.tensor(5)])
def test_every_integer_of_32_bits_is_a_seed(seed: Any) -> None:
    set_seed(seed)
    recorded = seeds.recorded_seed()
    assert recorded == int(seed)
    assert type(recorded) is int


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_anything_else_is_refused_before_anything_is_seeded(seed: Any) -> None:
    state = random.getstate()
    with pytest.raises(ConfigurationError, match=r"from 0 to 4294967295"):
        set_seed(seed)
    assert random.getstate() == state
    assert seeds.recorded_seed() is None


def test_the_seed_is_recorded_without_starting_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert seeds.recorded_seed() is None
    set_seed(7)
    assert seeds.recorded_seed() == 7
    assert not torch.distributed.is_initialized()
    assert set(PartialState.registry()) == {"seed"}


def test_the_state_found_later_keeps_the_seed() -> None:
    set_seed(7)
    PartialState(cpu=True)
    assert seeds.recorded_seed() == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_specific_seed_differs_by_rank_and_is_recorded_alike(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seed(7 + rank)
    expected = draw()
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    set_seed(7, device_specific=True)
    assert draw() == expected
    assert seeds.recorded_seed() == 7


def test_a_device_specific_seed_wraps_around_at_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    set_seed(0)
    expected = draw()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    set_seed(2**32 - 1, device_specific=True)
    assert draw() == expected


def test_every_kind_of_device_is_seeded() -> None:
    with pretend_device() as kind:
        set_seed(7)
        assert ("manual_seed_all", 7) in kind.module.calls


@pytest.mark.usefixtures("settings_as_before")
def test_deterministic_mode_refuses_what_is_not() -> None:
    torch.backends.cudnn.benchmark = True
    set_seed(7, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("settings_as_before")
def test_deterministic_mode_can_warn_and_keeps_a_workspace_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_seed(7, deterministic="warn")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.usefixtures("settings_as_before")
def test_seeding_alone_leaves_determinism_as_it_is() -> None:
    torch.use_deterministic_algorithms(True)
    set_seed(7)
    assert torch.are_deterministic_algorithms_enabled()


def test_an_unknown_deterministic_mode_is_refused() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ConfigurationError, match=r"'always', but must be True, False or 'warn'"):
        set_seed(7, deterministic="always")  # type: ignore[arg-type]
    assert torch.are_deterministic_algorithms_enabled() is before


# one sample's seed


def test_sample_seeds_are_a_fixed_function() -> None:
    """Written down: a resumed run of a later version must see the same augmentation."""
    assert sample_seed(0, 0, 0) == 0x238275BC38FCBE91
    assert sample_seed(42, 3, 1_000_000_000) == 0x1EC3ED1C2FB2B781


def test_sample_seeds_are_splitmix64_of_each_argument_in_turn() -> None:
    """SplitMix64 from state 0 begins with 0xE220A8397B1DCDAF, in the published reference implementation."""
    first = 0xE220A8397B1DCDAF

    def mixed(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    assert mixed(0) == first
    assert sample_seed(0, 0, 0) == mixed(mixed(first))
    assert sample_seed(5, 6, 7) == mixed((mixed((mixed(5) + 6) % 2**64) + 7) % 2**64)


def test_sample_seeds_do_not_collide_over_seeds_epochs_and_indices() -> None:
    grid = {sample_seed(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in range(4000)}
    assert len(grid) == 4 * 4 * 4000
    assert all(0 <= value < 2**64 for value in grid)


def test_the_order_of_the_arguments_matters() -> None:
    assert len({sample_seed(1, 2, 3), sample_seed(1, 3, 2), sample_seed(2, 1, 3), sample_seed(3, 2, 1)}) == 4


def test_each_bit_of_a_sample_seed_is_set_in_half_of_the_samples() -> None:
    values = np.array([sample_seed(42, 0, index) for index in range(20_000)], dtype=np.uint64)
    for bit in range(64):
        share = float(((values >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 0.02, f"bit {bit} is set in {share:.1%}"  # 5.6 standard deviations


def test_changing_one_bit_of_the_index_changes_half_of_the_seed() -> None:
    changed = [
        (sample_seed(42, 0, index) ^ sample_seed(42, 0, index ^ (1 << bit))).bit_count()
        for index in range(200)
        for bit in range(32)
    ]
    assert 31.5 < sum(changed) / len(changed) < 32.5


def test_seeding_the_generators_makes_them_repeat() -> None:
    seed_all_generators(sample_seed(1, 2, 3))
    first = draw()
    seed_all_generators(sample_seed(1, 2, 3))
    assert draw() == first
    seed_all_generators(sample_seed(1, 2, 4))
    assert all(new != old for new, old in zip(draw(), first, strict=True))


@pytest.mark.parametrize("seed", [0, 2**32, 2**63, 2**64 - 1])
def test_any_64_bits_seed_the_generators(seed: int) -> None:
    seed_all_generators(seed)
    first = draw()
    seed_all_generators(seed)
    assert draw() == first


def test_numpy_and_torch_do_not_run_in_step() -> None:
    """Both are the same Mersenne Twister: with one 32-bit seed they would give the same bits."""
    seed_all_generators(sample_seed(1, 2, 3))
    numpy_bits = np.random.randint(0, 2**32, size=8, dtype=np.uint32).astype(np.int64)
    torch_bits = torch.empty(8, dtype=torch.int64).random_(0, 2**32)
    assert not set(numpy_bits.tolist()) & set(torch_bits.tolist())


def test_seeding_a_sample_leaves_devices_alone() -> None:
    with pretend_device() as kind:
        seed_all_generators(7)
        assert kind.module.calls == []


# keeping the state


def use_up_some() -> None:
    """Leave every generator in the middle: a Gaussian kept back, a position in the block of words."""
    set_seed(11)
    draw()


def test_a_captured_state_can_be_restored() -> None:
    use_up_some()
    state = RandomState.capture()
    expected = [draw() for _ in range(300)]
    state.restore()
    assert [draw() for _ in range(300)] == expected


def test_a_state_survives_a_state_dict_of_tensors_and_numbers() -> None:
    use_up_some()
    exported = RandomState.capture().state_dict()
    expected = [draw() for _ in range(300)]

    def only_plain(node: Any) -> bool:
        if isinstance(node, dict):
            return all(isinstance(key, str) and only_plain(value) for key, value in node.items())
        return node is None or type(node) in (int, float, str, torch.Tensor)

    assert only_plain(exported)
    RandomState.from_state_dict(exported).restore()
    assert [draw() for _ in range(300)] == expected


def test_a_state_survives_json() -> None:
    use_up_some()
    exported = RandomState.capture().state_dict()
    expected = [draw() for _ in range(300)]
    text = json.dumps(exported, default=torch.Tensor.tolist)
    RandomState.from_state_dict(json.loads(text)).restore()
    assert [draw() for _ in range(300)] == expected


def test_a_state_dict_with_a_missing_part_is_refused() -> None:
    exported = RandomState.capture().state_dict()
    del exported["numpy"]["position"]
    with pytest.raises(CheckpointError, match="no key 'position'"):
        RandomState.from_state_dict(exported)


def test_the_state_of_devices_is_kept_unless_told_otherwise() -> None:
    with pretend_device() as kind:
        kind.module.rng_state = torch.tensor([1, 2, 3], dtype=torch.uint8)
        state = RandomState.from_state_dict(RandomState.capture().state_dict())
        assert RandomState.capture(devices=False).devices == {}
        kind.module.rng_state = torch.zeros(3, dtype=torch.uint8)
        state.restore()
        assert kind.module.rng_state.tolist() == [1, 2, 3]


def test_the_state_of_a_device_that_is_not_here_is_passed_over() -> None:
    with pretend_device():
        state = RandomState.capture()
        assert Pretend.NAME in state.devices
    assert Pretend.NAME not in {kind.name for kind in devices.available_device_kinds()}
    expected = draw()
    state.restore()
    assert draw() == expected


def test_an_isolated_body_leaves_the_generators_where_they_were() -> None:
    use_up_some()
    state = RandomState.capture()
    expected = draw()
    state.restore()

    def fail_after_drawing() -> None:
        with seeds.isolated_random_state():
            seed_all_generators(5)
            draw()
            raise KeyError("from the body")

    with pytest.raises(KeyError, match="from the body"):
        fail_after_drawing()
    assert draw() == expected
