"""What a TensorRT-LLM engine answers: tokens told once, ends on either side, log probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.engine.base import TokenLogprobs
from serving.engine.trtllm.sampling import token_logprobs
from tests.unit.trtllm_rig import EOS, NAMESPACE, prompt, running, versions


def test_logprobs_of_a_token() -> None:
    class Logprob:
        def __init__(self, logprob: float) -> None:
            self.logprob = logprob

    entry = {5: Logprob(-2.0), 6: Logprob(-0.5), 7: Logprob(-1.0)}
    assert token_logprobs(entry, 5, 2) == TokenLogprobs(5, -2.0, [(6, -0.5), (7, -1.0)])
    assert token_logprobs(entry, 6, 0) == TokenLogprobs(6, -0.5, [])
    assert token_logprobs(-0.75, 5, 1) == TokenLogprobs(5, -0.75, [(5, -0.75)])
    with pytest.raises(ValueError, match="no logprob for token 9"):
        token_logprobs(entry, 9, 1)


@versions
def test_growing_lists_become_differences(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        tokens = heard.local(1, prompt(20), max_tokens=30, logprobs=2)
        assert len(tokens) == 30  # `Heard.tokens` refuses a position told twice
        entries = [e for o in heard.outputs for e in o.logprobs.values()]
        assert [entry.token for entry in entries] == tokens
        assert all(len(entry.top) == 2 for entry in entries)
        assert heard.reason(1) == "length"


@versions
@pytest.mark.parametrize("n", [0, 3])
def test_an_eos_ends_it_on_either_side(version: str, n: int, tmp_path: Path) -> None:
    """eos_first_token: as first token it ends the request without a hand-over."""
    fake = {"eos_after": n}
    with (
        running(version, tmp_path / "p", "prefill", fake) as prefill,
        running(version, tmp_path / "d", "decode", fake) as decode,
    ):
        whole = decode.local(1, prompt(20))
        assert (len(whole), whole[-1], decode.reason(1)) == (n + 1, EOS, "stop")
        chunk = prefill.prefill(2, prompt(20))
        if n == 0:
            assert chunk.token is None
            assert prefill.reason(2) == "stop"
            assert prefill.tokens(2) == {0: EOS}
            return
        decode.decode(3, prompt(20), chunk)
        decode.until(lambda: decode.reason(3))
        assert decode.reason(3) == "stop"
        assert list(prefill.tokens(2)) == [0]
        assert 0 not in decode.tokens(3)  # told once, by prefill
        assert {**prefill.tokens(2), **decode.tokens(3)} == dict(enumerate(whole))


@versions
def test_one_token_is_the_whole_answer(version: str, tmp_path: Path) -> None:
    """context_only writes max_tokens = 1 into its parameters; a limit of one is the client's own."""
    with running(version, tmp_path, "prefill") as prefill:
        chunk = prefill.prefill(1, prompt(20), max_tokens=1)
        assert (chunk.token, prefill.reason(1)) == (None, "length")
        chunk = prefill.prefill(2, prompt(20), max_tokens=2)
        assert chunk.token is not None
        assert chunk.state
        assert chunk.blocks == []


@versions
def test_two_prompts_are_not_mixed_up(version: str, tmp_path: Path) -> None:
    with (
        running(version, tmp_path / "p", "prefill") as prefill,
        running(version, tmp_path / "d") as decode,
    ):
        chunk = prefill.prefill(1, prompt(20))
        decode.decode(2, prompt(20, salt=1), chunk)
        decode.until(lambda: decode.failure(2))
        failure = decode.failure(2)
        assert failure is not None
        assert "another prompt" in failure[0]


@versions
def test_pulls_and_loans_have_an_end(version: str, tmp_path: Path) -> None:
    """Nothing of it is cached here, as far as a reader of our own can know."""
    from array import array

    from serving.engine.base import AttemptId

    with running(version, tmp_path) as heard:
        heard.local(1, prompt(20), pull_tokens=16)
        reserved = [r for output in heard.outputs for r in output.reserved]
        assert [(r.attempt, r.blocks) for r in reserved] == [(1, [])]
        heard.engine.lend(AttemptId(7), NAMESPACE, array("I", prompt(20)))
        heard.until(lambda: heard.chunk(7))
        chunk = heard.chunk(7)
        assert chunk is not None
        assert (chunk.token, chunk.last) == (None, True)
