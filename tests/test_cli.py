"""The command line: every command, its JSON, exit codes and streams. Bad inputs are in test_bad_inputs.py."""

import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import infcl_gen
from infcl_gen import cli
from infcl_gen.cli import text
from infcl_gen.emission import read_package
from infcl_gen.emission.package import kernels_of
from infcl_gen.errors import InfeasibleError, InputError, LockTimeoutError, ToolchainError, VerificationError
from infcl_gen.hardware import doctor, load_profile
from infcl_gen.inputs.problem import make_problem
from infcl_gen.step.costs import read_costs
from infcl_gen.step.planner import PlannedLoss

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--batch-size", "256", "--dim", "16", "--target", "cpu")
COMMANDS = ("plan", "generate", "inspect", "verify", "tune", "bench", "scale", "cache", "doctor")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def subprocess_of(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "infcl_gen", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "package"
    done = run("generate", *SMALL, "-o", str(folder))
    assert done.exit_code == 0, done.stderr
    return folder


def test_help_and_version_of_every_command() -> None:
    for arguments in ([], *([command] for command in COMMANDS)):
        done = run(*arguments, "--help")
        assert done.exit_code == 0 and "Usage: infcl-gen" in done.stdout and not done.stderr
    assert run("--version").stdout == f"infcl-gen {infcl_gen.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--bogus"), "see infcl-gen plan --help\n"),
        (("verify",), "see infcl-gen verify --help\n"),
        (("nope",), "see infcl-gen --help\n"),
        (("cache", "list", "--days", "3"), "--days, --all: are of infcl-gen cache prune, not of cache list\n"),
        (("cache", "path", "--all"), "--days, --all: are of infcl-gen cache prune, not of cache path\n"),
    ],
)
def test_wrong_use_names_the_command(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and done.stderr.endswith(words) and not done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom infcl_gen.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'triton', 'sympy', 'jinja2', 'numpy', 'rich', 'msgspec'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == "[]\n"


def test_plan_prints_tiles_memory_time_and_the_largest_batch() -> None:
    done = run("plan", "--batch-size", "64k", "--dim", "768", "--device-profile", "h200", "--memory-budget", "1GiB")
    assert done.exit_code == 0 and not done.stderr
    for part in ("Tiles", "Blocks", "Memory per device", "Time", "bound by", "largest batch for this budget"):
        assert part in done.stdout
    plan = infcl_gen.plan(make_problem(batch_size="64k", dim=768, device_profile="h200", memory_budget="1GiB"))
    for reason in plan.reasons:
        assert reason.why in done.stdout
    for buffer in plan.buffers:
        assert buffer.name in done.stdout
    assert str(plan.largest_batch) in done.stdout


def test_plan_as_json() -> None:
    done = run("plan", *SMALL, "--json")
    assert done.exit_code == 0 and not done.stderr
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1
    assert result["plan"]["strategy"] == "torch"
    assert result["plan"]["predicted_peak_bytes"] <= result["plan"]["budget_bytes"]


def test_generate_inspect_and_their_json(package: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    done = run("generate", *SMALL, "--json", "--output", str(again))
    assert json.loads(done.stdout) == {"schema_version": 1, "path": str(again)}
    files = sorted(path.relative_to(package) for path in package.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((package / file).read_bytes() == (again / file).read_bytes() for file in files)

    shown = json.loads(run("inspect", str(package), "--json").stdout)
    assert shown["schema_version"] == 1
    assert shown["spec"]["problem"]["batch_size"] == 256
    assert set(shown["files"]) == {str(file) for file in files}
    text = run("inspect", str(package)).stdout
    assert "digest" in text and "spec.py" in text and "loss.py" in text


@pytest.mark.parametrize(("dim", "hopper"), [("768", False), ("256", True)])
def test_inspect_lists_kernels(dim: str, hopper: bool, tmp_path: Path) -> None:
    """Those of kernels.py, and of hopper.py where there is one."""
    folder = tmp_path / "h200"
    flags = ("--batch-size", "64k", "--dim", dim, "--device-profile", "h200", "-o", str(folder))
    assert run("generate", *flags).exit_code == 0
    kernels = json.loads(run("inspect", str(folder), "--json").stdout)["kernels"]
    assert kernels and all(kernel["line"] > 0 for kernel in kernels)
    names = {kernel["name"] for kernel in kernels}
    assert {"forward", "gradient"} <= names and ({"forward_hopper", "gradient_hopper"} <= names) == hopper


def test_a_partial_package_is_shown_and_nothing_else(tmp_path: Path) -> None:
    folder = str(ROOT / "generated" / "infonce_a100")
    shown = json.loads(run("inspect", folder, "--json").stdout)
    assert shown["partial"] and "__init__.py" in shown["missing"] and "spec.py" in shown["files"]
    assert "partial: cannot be imported; left out: __init__.py, _runtime/" in run("inspect", folder).stdout
    whole = json.loads(run("inspect", str(ROOT / "generated" / "clip_cpu"), "--json").stdout)
    assert (whole["partial"], whole["missing"]) == (False, [])
    ring = ("--ranks", "2", "--against", "none")
    for arguments in (["verify"], ["tune"], ["bench", "--package"]):
        done = run(*arguments, folder)
        assert done.exit_code == 2 and done.stdout == "", done.output
        assert done.stderr.count("\n") == 1 and "a partial package, without __init__.py" in done.stderr
    done = run("bench", "--package", folder, *ring)
    assert done.exit_code == 2 and "a partial package" in done.stderr, done.output


def test_inspect_prints_the_loss_in_latex() -> None:
    """Of a partial package, too: it needs SPEC alone."""
    folder = str(ROOT / "generated" / "infonce_a100")
    formulas = json.loads(run("inspect", folder, "--latex", "--json").stdout)["latex"]
    assert formulas["loss"] == r"L = \frac{1}{M} \sum_i \left(r_i - p_i\right)"
    lines = run("inspect", folder, "--latex").stdout.splitlines()
    assert (lines[0], lines[-1]) == (r"\begin{align*}", r"\end{align*}") and len(lines) == 2 + len(formulas)
    assert formulas["loss"].replace(" = ", " &= ") + r" \\" in lines and not lines[-2].endswith("\\")


def test_inspect_never_imports(package: Path, tmp_path: Path) -> None:
    before = set(sys.modules)
    assert run("inspect", str(package)).exit_code == 0
    assert not [name for name in set(sys.modules) - before if "package" in name and "infcl_gen" not in name]
    assert not list(package.rglob("__pycache__"))


def test_force_replaces(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    for flags, code in (((), 0), ((), 2), (("--force",), 0)):
        assert run("generate", *SMALL, "-o", str(folder), *flags).exit_code == code


def test_quiet_is_quiet(tmp_path: Path) -> None:
    done = run("generate", *SMALL, "-q", "-o", str(tmp_path / "p"))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_a_config_file_gives_every_flag_and_flags_win(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'batch-size = "1k"\ndim = 16\ntarget = "cpu"\nloss = "infonce"\nkeys = 2048\ndtype = "fp32"\njson = true\n'
        'memory-budget = "64MiB"\ndevices = 2\nranks = 2\n[set]\nstrategy = "torch"\npanel_rows = 64\n'
    )
    done = run("plan", "--config", str(config), "--dim", "32", "--set", "panel_rows=128")
    assert done.exit_code == 0, done.stderr
    problem = json.loads(done.stdout)["plan"]["problem"]
    assert (problem["batch_size"], problem["dim"], problem["keys"]) == (1024, 32, 2048)
    assert (problem["loss"], problem["dtype"], problem["devices"]) == ("infonce", "fp32", 2)
    assert dict(map(tuple, problem["settings"])) == {"strategy": "torch", "panel_rows": "128"}


def test_flags_win_over_a_file_also_where_they_are_empty_or_contradict_it(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('batch-size = 64\ndim = 16\ntarget = "cpu"\nloss = "infonce"\nquiet = true\n')
    assert run("plan", "--config", str(config)).stdout == ""
    assert "peak" in run("plan", "--config", str(config), "-v").stdout
    done = run("plan", "--config", str(config), "--loss", "")
    assert done.exit_code == 2 and "--loss" in done.stderr


def test_an_infeasible_budget_states_feasible_numbers() -> None:
    flags = ("plan", "--dim", "256", "--target", "cpu")
    done = run(*flags, "--batch-size", "64k", "--memory-budget", "1MiB", "--json")
    assert done.exit_code == 3
    assert len(done.stderr.splitlines()) == 1
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "InfeasibleError" and error["exit_code"] == 3
    budget, batch = error["smallest_budget_bytes"], error["largest_batch"]
    assert str(budget) in done.stderr and str(batch) in done.stderr
    assert run(*flags, "--batch-size", "64k", "--memory-budget", str(budget)).exit_code == 0
    assert run(*flags, "--batch-size", "64k", "--memory-budget", str(budget - 1)).exit_code == 3
    assert run(*flags, "--batch-size", str(batch), "--memory-budget", "1MiB").exit_code == 0
    assert run(*flags, "--batch-size", str(batch + 1), "--memory-budget", "1MiB").exit_code == 3


def test_a_budget_is_at_most_the_memory_of_the_device(tmp_path: Path) -> None:
    """Of a GPU: the memory in the profile of a CPU is nominal. A whole step asks for other budgets of the loss."""
    flags = {"batch_size": 4096, "dim": 64, "device_profile": "h100"}
    message = r"^memory_budget: 80 GiB on each device exceeds the 79 GiB of one h100; give less$"
    for budget, ask in (
        ("80GiB", infcl_gen.plan),
        ("80GiB", infcl_gen.simulate),
        ("80GiB", infcl_gen.load),
        (80 << 30, partial(infcl_gen.generate, output=tmp_path / "package")),
    ):
        with pytest.raises(infcl_gen.InputError, match=message):
            ask(**flags, memory_budget=budget)
    assert infcl_gen.plan(**flags, memory_budget="80GB").budget_bytes == 80 * 10**9
    assert (
        infcl_gen.plan(**flags | {"device_profile": "cpu", "dtype": "fp32"}, memory_budget="80GiB").strategy == "torch"
    )
    device = ("--device-profile", "h100", "--memory-budget", "80GiB")
    for command in (("plan", "--batch-size", "4k"), ("scale", "--batches", "4k", "--devices", "8")):
        done = run(*command, "--dim", "64", *device)
        assert done.exit_code == 2 and "--memory-budget: 80 GiB on each device exceeds" in done.stderr
    *_, largest = PlannedLoss("clip", read_costs("vit_l_14-h200"), 1).within_budgets(16 << 20)
    assert largest.budget_bytes > load_profile("h200").memory_bytes


def test_an_infeasible_plan_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    done = run("generate", *SMALL, "--memory-budget", "1KiB", "-o", str(folder))
    assert done.exit_code == 3 and not folder.exists()


@pytest.mark.parametrize("passed", [True, False])
def test_verify_reports_rows(package: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    import infcl_gen.verification.verify as module

    seen = {}

    def fake(path: str, progress: Callable[[str, int, int], None], **given: Any) -> list[Any]:
        progress("numerics", 0, 1)
        seen.update(given)
        bytes_row = {"check": "bytes", "passed": True, "detail": "-"}
        marked = {"edited": True} if given["edited"] else {}
        return [bytes_row, {"check": "loss", "passed": passed, "detail": "x", **marked}]

    monkeypatch.setattr(module, "verify_package", fake)
    done = run("verify", str(package), "--ranks", "2", "--aot", "sm_90, gfx942,sm_90", "--json")
    assert seen == {"ranks": 2, "aot": ["sm_90", "gfx942"], "edited": False}
    assert done.exit_code == (0 if passed else 5)
    assert json.loads(done.stdout)["passed"] is passed
    assert done.stderr == ("" if passed else "infcl-gen: error: 1 of 2 checks failed: loss\n")
    done = run("verify", str(package), "--edited")
    assert "loss (edited)" in done.stdout and seen["edited"]
    assert done.stderr == ("" if passed else "infcl-gen: error: 1 of 2 checks failed: loss (edited)\n")


@pytest.mark.usefixtures("forked")
def test_verify_for_real(package: Path) -> None:
    done = run("verify", str(package), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"]


def test_doctor() -> None:
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.stderr
    findings = {row["subject"]: row for row in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["state"] == findings["gloo"]["state"] == "ok"
    assert all(row["advice"] for row in findings.values() if row["state"] != "ok")
    if findings.get("gpu", {}).get("state") == "missing":
        assert json.loads(done.stdout)["links"] is None
    assert "python" in run("doctor").stdout


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    done = run("doctor", "--json")
    states = {row["subject"]: row["state"] for row in json.loads(done.stdout)["findings"]}
    assert (states["torch"], states["triton"]) == ("missing", "missing")
    assert done.exit_code == 4 and "torch is missing" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.1", "old"), ("2.11.0a0+git", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok"), ("1", "old")]
)
def test_doctor_compares_versions_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert doctor._version("torch").state == state


def test_doctor_survives_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "find_device", broken)
    done = run("doctor")
    assert done.exit_code == 0 and "broken" in done.stdout and "libcudart" in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InfeasibleError("too small", 2048, None), 3, "too small"),
        (ToolchainError("no ptxas"), 4, "no ptxas"),
        (VerificationError("bytes differ"), 5, "bytes differ"),
        (LockTimeoutError("held"), 6, "held"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 4, "torch is not installed"),
        (RuntimeError("a\nb\x1b[31m"), 1, "internal error: RuntimeError: a b\\x1b[31m (-v shows where)"),
        (RecursionError("deep"), 1, "internal error: RecursionError"),
        (MemoryError(), 1, "internal error: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_and_its_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(infcl_gen, "plan", fail)
    done = run("plan", *SMALL)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(f"infcl-gen: error: {message}") and len(done.stderr.splitlines()) == 1
    payload = json.loads(run("plan", *SMALL, "--json").stdout)["error"]
    assert payload["exit_code"] == code and message in payload["message"]


def test_verbose_shows_where_an_internal_error_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infcl_gen, "plan", lambda *_: 1 // 0)
    assert "Traceback" in run("plan", *SMALL, "-v").stderr
    assert "Traceback" not in run("plan", *SMALL).stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess_of("plan", *SMALL, "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.wait(60)
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
def test_an_interrupt_ends_with_130(tmp_path: Path, sent: signal.Signals) -> None:
    loss = tmp_path / "slow.py"
    loss.write_text("import pathlib, time\npathlib.Path(__file__).with_suffix('.started').touch()\ntime.sleep(60)\n")
    process = subprocess_of("plan", *SMALL, "--loss", f"{loss}:loss")
    started = loss.with_suffix(".started")
    while not started.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "infcl-gen: error: interrupted\n")


AT_THE_END = """
import os, signal, sys
from infcl_gen import cli
where = sys.argv.pop(1)
def interrupted(function):
    def call(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)
    return call
if where == "flush":
    sys.stdout.flush = interrupted(sys.stdout.flush)
elif where == "exit":
    sys.exit = interrupted(sys.exit)
else:
    import atexit
    atexit.register(interrupted(print))
cli.main()
"""


@pytest.mark.parametrize(("where", "code"), [("flush", 130), ("exit", 0), ("shutdown", 0)])
def test_an_interrupt_at_the_very_end_gives_an_exit_code_too(where: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, where, "cache", "path", "--quiet"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "infcl-gen: error: interrupted\n" * (code == 130))


@pytest.mark.parametrize("arguments", [("cache", "path"), ("plan", *SMALL, "--json"), ("--help",)])
def test_a_full_disk_behind_stdout_is_one_clear_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "infcl_gen", *arguments], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr and "internal error" not in done.stderr


def test_tune_finds_out_before_it_measures_that_nothing_can_be_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infcl_gen.tuning import search

    def measured(*_: object) -> None:
        raise AssertionError("measured before the outputs were looked at")

    monkeypatch.setattr(search.Family, "run", measured)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(package)
    for arguments, named in (
        ((str(package), "--records", str(tmp_path / "file")), "--records"),
        ((str(package), "--records", str(tmp_path / "file" / "inner")), "--records"),
        ((str(tmp_path / "link"), "--records", str(tmp_path)), "symbolic link"),
    ):
        done = run("tune", *arguments)
        assert done.exit_code == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1, done.output


def test_text_in_tables_cannot_break_lines() -> None:
    table = text.table_text(("a", "b"), [("x\ny", "\x1b[31mred"), ("1", "2")])
    assert len(table.splitlines()) == 3 and "\x1b" not in table


def test_shown_sizes_suffice() -> None:
    from infcl_gen.inputs.text import bytes_text, parse_bytes

    for size in (1, 1023, 1025, 1048577, 123456789, 5 * 2**30 + 1):
        assert parse_bytes(bytes_text(size)) >= size


def test_counts_and_times_are_short() -> None:
    assert (text.count_text(2.5e15), text.count_text(3e12), text.count_text(10)) == ("2.5 P", "3 T", "10 ")
    assert (text.time_text(0.0123), text.time_text(4e-6)) == ("12.3 ms", "4 us")
    assert (text.time_text(3.4712), text.time_text(12345.6)) == ("3.47 s", "12346 s")


def test_kernels_are_found_by_parsing() -> None:
    source = '@triton.jit\ndef forward(q, k):\n    """First line.\n\n    More."""\n\n\ndef host():\n    pass\n'
    assert kernels_of(source) == [{"name": "forward", "line": 2, "summary": "First line.", "arguments": ["q", "k"]}]
    assert kernels_of("") == []


def test_module_runs_as_script() -> None:
    process = subprocess_of("--version")
    out, _ = process.communicate(timeout=60)
    assert out.startswith("infcl-gen ")


def test_the_command_for_another_size_makes_such_a_package(tmp_path: Path) -> None:
    """With what was set. Files of the user's own are words in capitals."""
    flags: dict[str, Any] = {"dim": 32, "dtype": "fp32", "target": "cpu", "set": {"panel_rows": "64"}}
    one = infcl_gen.generate(output=tmp_path / "one", batch_size=96, memory_budget="8MiB", **flags)
    spec, again = read_package(one).spec, tmp_path / "again"
    command = spec["regenerate"].format(queries=96, keys=96)
    done = run(*shlex.split(command.replace("DIR", str(again)))[1:])
    assert done.exit_code == 0, done.output
    other = read_package(again).spec
    assert other["digest"] == spec["digest"]
    (tmp_path / "mine.py").write_text(
        "from infcl_gen.losses.language import *\n"
        "MINE = LossSpec('mine', mean_over_queries(logsumexp_over_keys(z) - positive(z)), 'diagonal')\n"
    )
    mine = infcl_gen.generate(output=tmp_path / "two", loss=f"{tmp_path}/mine.py:MINE", batch_size=96, **flags)
    assert "--loss FILE.py:NAME " in read_package(mine).spec["regenerate"]
    with pytest.raises(InputError, match="pairs query i with key i"):
        infcl_gen.plan(loss=f"{tmp_path}/mine.py:MINE", batch_size=96, keys=100, **flags)


def test_the_cache_is_listed_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFCL_GEN_CACHE", str(tmp_path))
    assert run("cache", "path").stdout == f"{tmp_path / 'packages'}\n"
    assert json.loads(run("cache", "list", "--json").stdout)["packages"] == []
    for dim in (16, 32):
        infcl_gen.load(batch_size=8, dim=dim, dtype="fp32", target="cpu")
    listed = json.loads(run("cache", "list", "--json").stdout)["packages"]
    assert [found["dim"] for found in listed] == [32, 16] and all(found["bytes"] > 10_000 for found in listed)
    assert json.loads(run("cache", "prune", "--json").stdout)["packages"] == []
    old = tmp_path / "packages" / listed[1]["package"]
    seconds = 2 * 86400  # of two days
    os.utime(old, (0, time.time() - seconds + 3600))
    assert json.loads(run("cache", "prune", "--days", "2", "--json").stdout)["packages"] == []
    os.utime(old, (0, time.time() - seconds))
    assert [
        found["dim"] for found in json.loads(run("cache", "prune", "--days", "2", "--json").stdout)["packages"]
    ] == [16]
    (tmp_path / "packages" / listed[0]["package"] / "loss.py").write_text("")
    assert "damaged" in run("cache", "list").stdout
    assert "removed 1" in run("cache", "prune").stdout and not list((tmp_path / "packages").glob("p*/"))
    infcl_gen.load(batch_size=8, dim=16, dtype="fp32", target="cpu")
    assert "removed 1" in run("cache", "prune", "--all").stdout
    assert run("cache", "nonsense").exit_code == 2
