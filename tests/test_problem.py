"""Parsing and validation of problems."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infcl_gen.cli.options import FLAGS, read_config
from infcl_gen.errors import (
    InfclError,
    InfeasibleError,
    InputError,
    LockTimeoutError,
    ToolchainError,
    VerificationError,
)
from infcl_gen.inputs.overrides import Overrides, parse_overrides
from infcl_gen.inputs.problem import MAX_BATCH, Problem, make_problem
from infcl_gen.inputs.text import clean, parse_bytes, parse_count, show


@pytest.mark.parametrize(
    ("text", "count"),
    [("65536", 65536), ("64k", 65536), ("64K", 65536), ("4M", 4 << 20), ("1G", 1 << 30), (7, 7), ("0", 0)],
)
def test_counts(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 GiB", 2 << 30),
        ("1GB", 10**9),
        ("1.5GiB", 3 << 29),
        ("1.25kB", 1250),
        ("0.000001TiB", 1099511),
        ("100", 100),
        ("100B", 100),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["1.5", "0.5B", "1.0"])
def test_a_fraction_needs_a_unit(text: str) -> None:
    with pytest.raises(InputError, match=r"--memory-budget: .* fraction of a byte; give a unit"):
        parse_bytes(text, "--memory-budget")


@given(st.integers(0, 2**40))
def test_counts_and_sizes_keep_every_digit(value: int) -> None:
    assert parse_count(str(value)) == parse_bytes(str(value)) == parse_count(value) == value
    assert parse_count(f"{value}k") == parse_bytes(f"{value}KiB") == 1024 * value


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        try:
            assert parse(text, "--flag") >= 0
        except InputError as error:
            assert str(error).startswith("--flag: ") and str(error).isprintable()


def test_flags_as_users_write_them() -> None:
    problem = make_problem(
        batch_size="64k",
        dim="768",
        memory_budget="1GiB",
        devices=4,
        nodes="2",
        set=["strategy=panel", "gradient.keys=256"],
    )
    assert problem == Problem(
        batch_size=65536,
        dim=768,
        memory_budget_bytes=1 << 30,
        devices=4,
        nodes=2,
        settings=(("gradient.keys", "256"), ("strategy", "panel")),
    )
    assert problem.total_keys == 65536
    assert problem.settings == Overrides(strategy="panel", blocks=(("gradient", "keys", 256),))
    assert make_problem(batch_size=4, dim=4, keys=9).total_keys == 9


def test_a_problem_survives_the_trip_through_its_fields() -> None:
    problem = make_problem(batch_size="1k", dim=8, memory_budget="1GiB", set={"panel_rows": 128})
    assert make_problem(**problem.as_dict()) == problem
    assert make_problem(batch_size=8, dim=8, memory_budget="auto").memory_budget_bytes is None
    assert make_problem(batch_size=8, dim=8, memory_budget=None, keys=None) == Problem(batch_size=8, dim=8)


def test_settings_are_sorted_and_unique() -> None:
    expected = Overrides(strategy="panel", panel_rows=64)
    assert expected.pairs == (("panel_rows", "64"), ("strategy", "panel"))
    assert parse_overrides(["strategy=panel", "panel_rows=64"]) == expected
    assert parse_overrides({"strategy": "panel", "panel_rows": 64}) == expected
    assert parse_overrides([("strategy", "panel"), ("panel_rows", "64")]) == expected
    for key in ("panel_rows", "forward.rows"):
        with pytest.raises(InputError, match=f"'{key}' is given twice"):
            parse_overrides([f"{key}=64", f"{key}=128"])


def test_settings_are_typed_once() -> None:
    given = {"replay": "off", "panel_keys": "1k", "forward.warps": 8, "fused.rows": "64", "products": "triton"}
    overrides = parse_overrides(given)
    assert (overrides.replay, overrides.panel_keys, overrides.products) == (False, 1024, "triton")
    assert overrides.block("forward") == {"warps": 8} and overrides.block("gradient") == {}
    assert overrides.keys == set(given) and overrides.strategy is overrides.keeps is None
    assert parse_overrides(overrides.pairs) == overrides == parse_overrides(overrides)
    assert parse_overrides(()) == Overrides() and Overrides().pairs == ()


def test_largest_values_are_valid() -> None:
    assert Problem(batch_size=MAX_BATCH, dim=65536).total_keys == MAX_BATCH


def test_a_problem_is_frozen_and_hashable() -> None:
    problem = Problem(batch_size=4, dim=4)
    assert hash(problem) == hash(Problem(batch_size=4, dim=4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.dim = 5  # type: ignore[misc]


def test_misspelt_options_are_named_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="--batchsize: unknown option; did you mean 'batch_size'"):
        make_problem(batchsize=4, dim=4)


def test_config_accepts_dashes_and_underscores(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('batch-size = "64k"\ndim = 768\nmemory_budget = "1GiB"\nranks = 2\n[set]\npanel_rows = 64\n')
    config = read_config(file)
    assert config == {"batch_size": "64k", "dim": 768, "memory_budget": "1GiB", "ranks": 2, "set": {"panel_rows": 64}}
    assert set(config) <= set(FLAGS)


@given(st.text(max_size=200))
def test_shown_text_is_one_printable_line(text: str) -> None:
    assert clean(text).isprintable() and show(text).isprintable() and len(show(text)) <= 120


def test_exit_codes() -> None:
    family = (InputError, InfeasibleError, ToolchainError, VerificationError, LockTimeoutError)
    assert [error.exit_code for error in family] == [2, 3, 4, 5, 6]
    assert InfclError.exit_code == 1 and all(issubclass(error, InfclError) for error in family)
    error = InfeasibleError("no", smallest_budget_bytes=5, largest_batch=6)
    assert (str(error), error.smallest_budget_bytes, error.largest_batch) == ("no", 5, 6)
