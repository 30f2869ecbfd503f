"""Mistakes on the command lines of planner.simulate and planner.profile: one line, code 2, nothing run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from planner import profile, simulate
from planner.options import Number, Option, OptionParser

Parse = Callable[[Sequence[str]], tuple[OptionParser, argparse.Namespace]]

TABLES: list[tuple[Parse, Option]] = [
    *((simulate.arguments, option) for option in (*simulate.LOAD, *simulate.WHAT_IF, *simulate.OUTPUT)),
    *((profile.arguments, option) for option in (*profile.WHAT, *profile.HOW)),
]
NUMBERS = [(parse, option) for parse, option in TABLES if isinstance(option.allowed, Number)]
TIED = [(parse, option) for parse, option in TABLES if option.only_with is not None]
WITHIN = {  # arguments that meet the condition, and that do not
    simulate.WITH_MADE_UP: ([], ["--trace", "conversation"]),
    simulate.WITH_TRACE: (["--trace", "conversation"], []),
    simulate.WITH_WAVE: (["--wave", "0.5"], []),
    simulate.WITH_PLANNER: ([], ["--policy", "static"]),
    simulate.WITH_MEAN: (["--policy", "mean_throughput"], []),
    profile.BY_CONFIG: (["--config", "x.yaml"], []),
    profile.BY_OPTIONS: ([], ["--config", "x.yaml"]),
    profile.SIMULATED: (["--engine", "sim"], []),
}


def named(pairs: list[tuple[Parse, Option]]) -> list[object]:
    return [pytest.param(*pair, id=f"{pair[0].__module__}{pair[1].flag}") for pair in pairs]


def refusal(
    parse: Callable[[Sequence[str]], object], argv: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """The one line."""
    try:
        code: object = parse(argv)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def values(option: Option, text: str) -> list[str]:
    n = len(option.metavar) if isinstance(option.metavar, tuple) else 1
    return [f"{option.flag}={text}"] if n == 1 else [option.flag, *([text] * n)]


def outside(number: Number) -> list[str]:
    """Texts just beyond its ends."""
    step = 1 if number.whole else 1e-3
    texts = [number.above, number.below]
    texts += [None if number.least is None else number.least - step]
    texts += [None if number.most is None else number.most * (1 + 1e-6) + step]
    return [str(int(value) if number.whole else value) for value in texts if value is not None]


@pytest.mark.parametrize(("parse", "option"), named(NUMBERS))
def test_a_number_is_finite_and_within_its_range(
    parse: Parse, option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(option.allowed, Number)
    for text in ("nan", "inf", "many", "1e999", *outside(option.allowed)):
        line = refusal(parse, values(option, text), capsys)
        assert f"argument {option.flag}: {text!r}; allowed: {option.allowed}" in line


@pytest.mark.parametrize(("parse", "option"), named(NUMBERS))
def test_the_ends_of_a_range_are_within(parse: Parse, option: Option) -> None:
    number = option.allowed
    assert isinstance(number, Number)
    for end in (number.least, number.most, option.default):
        assert end is None or number(str(end)) == end


def test_no_option_takes_any_number_there_is() -> None:
    assert not [option.flag for _, option in TABLES if option.allowed in (int, float)]


@pytest.mark.parametrize(("parse", "option"), named(TIED))
def test_an_option_without_effect_is_refused(
    parse: Parse, option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option.only_with is not None
    within, without = WITHIN[option.only_with]
    given = [option.flag] if option.allowed is None else values(option, valid(option))
    parse([*within, *given])
    line = refusal(parse, [*without, *given], capsys)
    assert f"argument {option.flag}: without effect here; it goes with {option.only_with}" in line
    assert getattr(parse(within)[1], option.dest) == option.default


def valid(option: Option) -> str:
    if isinstance(option.allowed, Number):
        least = option.allowed.least
        return str(least or 1)
    return option.allowed[0] if isinstance(option.allowed, tuple) else "x"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--percentile 150", "above 0 and below 100"),
        ("--mttf-s 0", "at least 1"),
        ("--burst 10 10 -3", "argument --burst: '-3'"),
        ("--burst 10 0 3", "a time within --duration-s"),
        ("--burst 3600 10 3", "a time within --duration-s"),
        ("--burst 10 10 1001", "at most 1,000"),
        ("--rate 10000 --duration-s 100000", "at most 10,000,000"),
        ("--rate 5 --burst 0 3600 1000", "at most 10,000,000"),
        ("--policy static --prefill 0", "at least 1"),
        ("--policy request_count --decode 0", "at least 1"),
        ("--budget 1", "at most --budget 1"),
        ("--prefill 16", "at most --budget 16"),
        ("--placeable 1", "at most --placeable 1"),
        ("--wave 0 --wave-s 60", "--wave above 0"),
        ("--trace nope", "invalid choice: 'nope'"),
        ("--percent 95", "unrecognized arguments: --percent 95"),
        ("--admission maybe", "invalid choice: 'maybe'"),
    ],
)
def test_options_that_do_not_go_together(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(simulate.arguments, argv.split(), capsys)


def test_a_start_from_zero_is_for_the_planner() -> None:
    assert simulate.arguments(["--prefill", "0", "--decode", "0"])[1].decode == 0


# ------------------------------------------------------------ files


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("old")
    OptionParser(prog="p").will_write("--out", str(tmp_path / "x"), (".json", ".png"))
    OptionParser(prog="p").will_write("--out", str(tmp_path / "new" / "x"), (".json",))
    assert (tmp_path / "x.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "x.json"]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("nothing may run")

    monkeypatch.setattr(simulate, "simulate", never)
    monkeypatch.setattr(profile, "build_engine", never)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("main", [simulate.main, profile.main], ids=["simulate", "profile"])
@pytest.mark.parametrize(
    ("out", "says"),
    [
        pytest.param("file/x", "file/x.json': Not a directory; allowed: a file", id="below a file"),
        pytest.param("", "is a folder; allowed: what the names", id="a folder"),
        pytest.param("taken", "taken.png': Is a directory", id="a folder of the picture's name"),
    ],
)
def test_out_is_checked_before_anything_runs(
    main: Callable[[Sequence[str]], int],
    out: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.png").mkdir()
    line = refusal(main, [f"--out={tmp_path}/{out}"], capsys)
    assert "argument --out: " in line
    assert says in line


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        pytest.param(["--profile", "."], "is a directory; make one with", id="a folder as profile"),
        pytest.param(["--profile", "nope"], "no such file", id="no profile"),
        pytest.param(["--rate", "0.001", "--duration-s", "1"], "came to no request", id="no request"),
        pytest.param(["--trace", "azure-code", "--traces", "."], "is missing; --traces DIR", id="no trace"),
        pytest.param(["--trace", "azure-code", "--traces", "nope"], "no traces in nope", id="no folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refusal(simulate.main, argv, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "content", [b"no gzip", b"\x1f\x8b\x08\x00", b""], ids=["text", "cut off", "empty"]
)
def test_a_trace_that_is_none_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mooncake_conversation.jsonl.gz").write_bytes(content)
    argv = ["--trace", "conversation", "--traces", str(tmp_path)]
    line = refusal(simulate.main, argv, capsys)
    assert "conversation" in line
