"""kvrouter.perf_model: the forms are learnt from noisy samples, outliers are not, changes are."""

from __future__ import annotations

import random

import pytest

from kvrouter.perf_model import (
    MOVE_REACH,
    PREFILL_REACH,
    STEP_REACH,
    LinearModel,
    MoveModel,
    PrefillModel,
    StepModel,
    WorkerModels,
)

TRUE_PREFILL = (4.0, 0.08, 3e-6)


def prefill_ms(uncached: int, context: int) -> float:
    a, b, c = TRUE_PREFILL
    return a + b * uncached + c * uncached * (context - uncached / 2)


def learn(
    model: PrefillModel, samples: int, noise: float = 0.05, scale: float = 1.0, seed: int = 1
) -> None:
    generator = random.Random(seed)
    for _ in range(samples):
        context = generator.randint(50, 60_000)
        uncached = generator.randint(1, context)
        ms = scale * prefill_ms(uncached, context) * generator.uniform(1 - noise, 1 + noise)
        model.observe(uncached, context, ms)


def test_formula_counts_attention_of_the_last_tokens() -> None:
    model = PrefillModel(LinearModel((1.0, 2.0, 3.0), PREFILL_REACH))
    # tokens 7..10 of 10: 4 * (10 - 2) = 32 pairs
    assert model.ms(4, 10) == 1 + 2 * 4 + 3 * 32
    assert model.ms(0, 10) == 0


def test_same_tokens_cost_more_behind_a_longer_prefix() -> None:
    model = WorkerModels.from_priors(prefill=TRUE_PREFILL).prefill
    assert model.ms(1000, 50_000) > model.ms(1000, 1000)


@pytest.mark.parametrize(
    "factor", [0.1, 1.0, 10.0], ids=["prior 10x fast", "prior right", "prior 10x slow"]
)
def test_learns_whatever_the_prior(factor: float) -> None:
    model = PrefillModel(
        LinearModel((TRUE_PREFILL[0] * factor, TRUE_PREFILL[1] * factor, 0.0), PREFILL_REACH)
    )
    learn(model, 300)
    for uncached, context in ((100, 100), (1000, 30_000), (8000, 8000), (30_000, 60_000)):
        assert model.ms(uncached, context) == pytest.approx(prefill_ms(uncached, context), rel=0.08)


def test_few_samples_are_enough_to_be_near() -> None:
    model = PrefillModel(LinearModel((1.0, 0.01, 0.0), PREFILL_REACH))
    learn(model, 20)
    assert model.ms(8000, 8000) == pytest.approx(prefill_ms(8000, 8000), rel=0.25)


def test_outlier_is_left_out() -> None:
    model = PrefillModel(LinearModel((1.0, 0.05, 0.0), PREFILL_REACH))
    learn(model, 300)
    before = list(model.linear.coefficients)
    assert not model.observe(1000, 1000, 50 * prefill_ms(1000, 1000))
    assert not model.observe(1000, 1000, 0.02 * prefill_ms(1000, 1000))
    assert model.linear.coefficients == before
    assert model.linear.outliers == 2


def test_lasting_change_is_believed() -> None:
    model = PrefillModel(LinearModel((1.0, 0.05, 0.0), PREFILL_REACH))
    learn(model, 300)
    learn(model, 120, scale=3.0, seed=2)
    assert model.ms(8000, 8000) == pytest.approx(3 * prefill_ms(8000, 8000), rel=0.15)


def test_coefficients_never_go_below_zero() -> None:
    model = StepModel()
    generator = random.Random(3)
    for _ in range(500):
        model.observe(generator.randint(1, 64), generator.randint(0, 10_000), generator.uniform(1, 40))
        assert min(model.linear.coefficients) >= 0


def test_step_time_is_learnt() -> None:
    model = StepModel(LinearModel((10.0, 0.1, 0.0), STEP_REACH))
    generator = random.Random(4)
    for _ in range(400):
        batch, kv = generator.randint(1, 128), generator.randint(1000, 400_000)
        model.observe(batch, kv, (12 + 0.2 * batch + 4e-5 * kv) * generator.uniform(0.97, 1.03))
    assert model.ms(64, 200_000) == pytest.approx(12 + 12.8 + 8, rel=0.05)


def test_a_day_of_equal_samples_does_no_harm() -> None:
    """Forgetting without news: the variance of what is not excited stays bounded."""
    model = StepModel()
    generator = random.Random(5)
    for _ in range(20_000):
        model.observe(4, 4000, 13.0 * generator.uniform(0.98, 1.02))
    assert model.ms(4, 4000) == pytest.approx(13.0, rel=0.02)
    for _ in range(100):
        model.observe(8, 90_000, 20.0)
    assert model.ms(8, 90_000) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_short_prompts_say_little_of_long_ones(seed: int) -> None:
    """Overheads that vary are no attention: 226 times too long were predicted, and refused."""
    generator, model = random.Random(seed), PrefillModel()
    for _ in range(40):
        length = generator.randint(24, 80)
        model.observe(length, length, 0.05 * length + generator.choice([0.5, 1, 1, 1, 2, 5]))
    assert 0.5 < model.ms(6000, 6000) / 301 < 2
    assert 0.5 < model.ms(100_000, 100_000) / 5001 < 3
    # And attention is learnt as soon as long ones come.
    for _ in range(40):
        length = generator.randint(2000, 8000)
        model.observe(length, length, 1 + 0.05 * length + 1.3e-5 * length * length / 2)
    assert model.ms(8000, 8000) == pytest.approx(1 + 400 + 416, rel=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_small_batches_say_little_of_large_ones(seed: int) -> None:
    generator, model = random.Random(seed), StepModel()
    for _ in range(40):
        batch = generator.randint(1, 3)
        kv = batch * generator.randint(30, 120)
        model.observe(batch, kv, 20 + 0.2 * batch + generator.choice([0, 0, 0, 1, 3, 8]))
    assert 0.5 < model.ms(64, 64 * 1024) / 33.5 < 2.5
    for _ in range(40):
        batch = generator.randint(16, 64)
        kv = batch * generator.randint(500, 2000)
        model.observe(batch, kv, 20 + 0.2 * batch + 1e-4 * kv)
    assert model.ms(64, 64 * 1024) == pytest.approx(20 + 12.8 + 6.6, rel=0.05)


@pytest.mark.parametrize("ms", [0.0, -1.0])
def test_times_that_cannot_be_teach_nothing(ms: float) -> None:
    model = MoveModel()
    assert not model.observe(1000, ms)
    assert not model.observe(0, 1.0)
    assert model.linear.samples == 0


@pytest.mark.parametrize("prior", [(-1.0, 1.0), (0.0, 0.0)])
def test_priors_that_cannot_be_are_refused(prior: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="coefficients"):
        LinearModel(prior, MOVE_REACH)


def test_new_worker_starts_from_what_a_peer_knows() -> None:
    taught, fresh = WorkerModels(), WorkerModels()
    learn(taught.prefill, 50)
    fresh.learn_from(taught)
    assert fresh.prefill.ms(5000, 5000) == taught.prefill.ms(5000, 5000)
    assert fresh.step.linear.coefficients == StepModel().linear.coefficients, "nothing known: its own prior"


def profiled(evidence: int = 100) -> WorkerModels:
    return WorkerModels.from_priors(prefill=(4.0, 0.08, 0.0), evidence=evidence, spreads=(0.02, 0.1))


def test_a_cold_start_does_not_bend_a_profile() -> None:
    """The first prompt of a worker may take twenty times as long: kernels compile, caches are cold."""
    models = profiled()
    assert not models.prefill.observe(1000, 1000, 20 * 84.0)
    assert models.prefill.ms(1000, 1000) == pytest.approx(84)
    assert (models.prefill.linear.samples, models.prefill.linear.evidence) == (0, 100)


def test_a_profile_of_another_speed_is_given_up() -> None:
    model = profiled().prefill
    generator = random.Random(8)
    for _ in range(40):
        length = generator.randint(500, 4000)
        model.observe(length, length, 3 * (4 + 0.08 * length) * generator.uniform(0.95, 1.05))
    assert model.ms(2000, 2000) == pytest.approx(3 * 164, rel=0.1)
    assert model.linear.evidence < 40, "what the profile rested on is nothing any more"


def test_a_profile_is_refined() -> None:
    model = profiled().prefill
    for n in range(60):
        length = 500 + 300 * (n % 10)
        model.observe(length, length, 1.1 * (4 + 0.08 * length))
    assert model.linear.outliers == 0
    assert model.ms(2000, 2000) == pytest.approx(1.1 * 164, rel=0.03)


def test_a_profile_says_nothing_of_moves() -> None:
    models = profiled()
    assert models.move.linear.evidence == 0
    assert models.move.observe(1000, 400.0), "the first one scales the guess"


def test_one_sample_of_a_peer_is_not_believed_like_a_profile() -> None:
    """It may have been a cold one."""
    taught, fresh = WorkerModels(), WorkerModels()
    taught.prefill.observe(1000, 1000, 2000.0)
    fresh.learn_from(taught)
    assert fresh.prefill.observe(1000, 1000, 84.0)
    assert fresh.prefill.ms(1000, 1000) == pytest.approx(84, rel=0.05)
