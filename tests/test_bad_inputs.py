"""Bad inputs to the command line and to Python: one clear line, the right exit code, no traceback, nothing
written.

What a generated package refuses while it runs (wrong dtypes, labels out of range, ...) is in tests/runtime.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.errors import InputError
from infcl_gen.inputs.problem import Problem, make_problem

ROOT = Path(__file__).resolve().parent.parent
GOOD = {"--batch-size": "256", "--dim": "16", "--target": "cpu"}
HOSTILE = (
    "",
    "\n",
    "a\nb",
    "a\rb",
    "\x00",
    "\x1b[31mred",
    "\u202eevil",
    "x" * 5000,
    "'; import os; os.abort() #",
    '"""',
    "{{ 7 * 7 }}",
    "{% raw %}",
    "$(touch pwned)",
    "../../etc/passwd",
    "\\",
    "\udc80",
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that anything that is written by a relative path is seen."""
    folder = tmp_path / "workplace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "package"
    infcl_gen.generate(make_problem(batch_size=256, dim=16, target="cpu"), folder)
    return folder


@pytest.fixture
def package(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "package"))


def arguments(changes: dict[str, str]) -> list[str]:
    return [f"{flag}={value}" for flag, value in {**GOOD, **changes}.items()]


def contents(folder: Path) -> dict[str, Any]:
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def refuse(words: list[str], *expected: str, code: int = 2) -> str:
    """Run the command line and check how it refuses; returns the one line."""
    before = contents(Path.cwd().parent)
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("infcl-gen: error: ") and lines[0].isprintable() and len(lines[0]) < 1000
    assert "Traceback" not in lines[0] and "internal error" not in lines[0]
    for part in expected:
        assert part in lines[0]
    assert contents(Path.cwd().parent) == before
    return lines[0]


FLAG_VALUES = [
    *(("--batch-size", value) for value in ("0", "-1", "1.5", "1e3", "64q", "k", "0x10", "١٢", "nan", "9" * 400)),
    *(("--batch-size", value) for value in ("1099511627777", "2T", " 64", "6 4", "1_000", "+4", "True")),
    *(("--keys", value) for value in ("0", "-5", "many", "1.0", "2000000G")),
    *(("--dim", value) for value in ("0", "-3", "65537", "64k ", "768.0", "inf")),
    *(("--devices", value) for value in ("0", "-1", "65537", "two", "1.5")),
    *(("--nodes", value) for value in ("0", "-1", "none", "65537")),
    *(("--memory-budget", value) for value in ("0", "-1GiB", "1PB", "lots", "GiB", "1..5GiB", "1,5GiB", "1e9", "nan")),
    *(("--memory-budget", value) for value in ("AUTO", "2097152GiB", "0.0000001B", "50%")),
    *(("--dtype", value) for value in ("float32", "BF16", "fp8", "int8", "torch.float32")),
    *(("--precision", value) for value in ("high", "TF32", "ieee")),
    *(("--frozen", value) for value in ("both", "Key", "queries")),
    *(("--negatives", value) for value in ("0", "-1", "many", "65537", "7")),
    *(("--target", value) for value in ("gpu", "CUDA", "metal", "cpu,cuda")),
    *(("--device-profile", value) for value in ("h300", "h200.tml", "nope.toml", "h200-0mp-1gib")),
    *(("--device-profile", value) for value in ("h200-1mp-1gib-x", "/dev/zero.toml")),
    *(("--cluster", value) for value in ("absent.toml", ".", "/dev/zero", "/dev/null/x.toml")),
    *(("--loss", value) for value in ("clop", "siglip()", "a b", "file.py:", ":clip", "file.txt:x")),
    *(("--loss", value) for value in ("no.py:loss", "no.py:1x", "über")),
    *(("--set", value) for value in ("strategy", "=panel", "strategy=", "strategy=magic")),
    *(("--set", value) for value in ("Strategy=panel", "stategy=panel", "descriptors=yes")),
    *(("--set", value) for value in ("panel_rows=0", "panel_rows=-1", "panel_rows=x", "products=cublas")),
    *(("--set", value) for value in ("gradient.kees=256", "gradient.keys=0", "gradient.keys=a")),
    *(("--set", value) for value in (".keys=1", "a.b.keys=1")),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), FLAG_VALUES, ids=lambda text: text[:24].encode("unicode_escape").decode())
def test_values_of_flags(flag: str, value: str) -> None:
    refuse(["plan", *arguments({flag: value})], flag)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize(
    "flag", ["--loss", "--device-profile", "--set", "--dtype", "--target", "--batch-size", "--config", "--cluster"]
)
def test_hostile_text_in_flags(flag: str, value: str) -> None:
    refuse(["plan", *arguments({flag: value})], flag)


@pytest.mark.parametrize("value", [v for v in HOSTILE if not v.isprintable() or not v or len(v) > 1024])
def test_hostile_text_as_output(value: str) -> None:
    refuse(["generate", *arguments({"--output": value})], "--output")


@pytest.mark.parametrize("value", [v for v in HOSTILE if v.isprintable() and v and len(v) < 1024 and "/" not in v])
def test_odd_but_legal_folders_work_and_leave_no_trace_in_the_package(value: str, pristine: Path) -> None:
    done = CliRunner().invoke(cli.main, ["generate", *arguments({"--output": value})])
    assert done.exit_code == 0, done.output
    assert os.listdir() == [value]
    written = {path.name: path.read_bytes() for path in Path(value).iterdir() if path.is_file()}
    assert written == {name: (pristine / name).read_bytes() for name in written}


@pytest.mark.parametrize("value", HOSTILE, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_hostile_text_as_folder(command: str, value: str) -> None:
    refuse([command, "--", value])


COMBINATIONS = [
    (["--devices=4", "--nodes=3"], "--nodes"),
    (["--devices=1", "--nodes=2"], "--nodes"),
    (["--dtype=bf16", "--precision=tf32"], "--precision"),
    (["--dtype=fp32", "--precision=tf32"], "--precision"),
    (["--device-profile=h200"], "--target"),
    (["--target=auto", "--device-profile=h200", "--dtype=fp64"], "--dtype"),
    (["--target=cuda", "--device-profile=mi300x"], "--target"),
    (["--set=panel_rows=64", "--set=panel_rows=128"], "--set"),
    (["--set=strategy=panel"], "strategy"),
    (["--set=strategy=fused"], "strategy"),
    (["--set=nokernel.rows=64"], "nokernel"),
    (["--target=auto", "--device-profile=h200", "--set=forward.rows=63"], "forward"),
    (["--target=auto", "--device-profile=h200", "--set=gradient.warps=3"], "gradient"),
    (["--target=auto", "--device-profile=h200", "--set=nokernel.rows=64"], "nokernel"),
    (["--target=auto", "--device-profile=a100", "--set=descriptors=on"], "descriptors"),
    (["--loss=clip", "--keys=512"], "--keys"),
    (["--quiet", "--verbose"], "--quiet"),
    (["--json=1"], "--json"),
    (["--batch-size"], "--batch-size"),
    (["--batchsize=4"], "--batch-size"),
    (["--bogus"], "--bogus"),
    (["--output=x"], "--output"),
    (["stray"], "stray"),
]


@pytest.mark.parametrize(
    ("words", "named"), COMBINATIONS, ids=lambda value: "_".join(value) if isinstance(value, list) else ""
)
def test_contradictions_and_unknown_flags(words: list[str], named: str) -> None:
    refuse(["plan", *arguments({}), *words], named)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "command"),
        (["plna"], "plna"),
        (["plan"], "--batch-size"),
        (["plan", "--batch-size=4"], "--dim"),
        (["plan", "--dim=4"], "--batch-size"),
        (["generate", "--batch-size=4", "--dim=4"], "--output"),
        (["inspect"], "DIR"),
        (["inspect", "a", "b"], "b"),
        (["inspect", "absent"], "absent"),
        (["verify"], "DIR"),
        (["verify", "absent"], "absent"),
        (["verify", ".", "--ranks=0"], "--ranks"),
        (["verify", ".", "--ranks=65"], "--ranks"),
        (["verify", ".", "--ranks=two"], "--ranks"),
        (["verify", ".", "--aot="], "--aot"),
        (["verify", ".", "--aot=sm_90,,"], "--aot"),
        (["verify", ".", "--aot=sm_91"], "--aot"),
        (["verify", ".", "--aot=sm_90;rm"], "--aot"),
        (["doctor", "now"], "now"),
        (["tune"], "DIR"),
    ],
)
def test_commands(words: list[str], named: str) -> None:
    refuse(words, named)


BENCH = [
    *([f"--batches={value}"] for value in ("", "0", "4,", "4;8", "-4", "x", "9999999G", "4,8.5")),
    *([f"--dims={value}"] for value in ("", "0", "16,none", "70000")),
    *([f"--against={value}"] for value in ("", "torhc", "torch,,memeff", "all,torch", "siglip-kernel-ring", "\n")),
    *([f"--scale={value}"] for value in ("", "0", "-1", "nan", "inf", "1e7", "warm")),
    *([f"--repeats={value}"] for value in ("0", "-1", "2.5", "many", "1000000")),
    *([f"--errors={value}"] for value in ("-1", "all", "1.5")),
    *([f"--output={value}"] for value in ("", "rows.txt", "rows", "/proc/nowhere/rows.json", "\n.json", "/")),
    *([f"--plot={value}"] for value in ("", "plot", "plot.gif", "/proc/nowhere/plot.svg", "\x00.svg")),
    *([f"--html={value}"] for value in ("", "page", "page.htm", "/proc/nowhere/page.html", "\x00.html", "/")),
    *([f"--package={value}"] for value in ("", "absent", "/dev/null", "\n")),
    ["--devices=2"],
]  # fmt: skip


@pytest.mark.parametrize("words", BENCH, ids=lambda words: ascii(words[0][:24]))
def test_bench(words: list[str]) -> None:
    flag = words[0].partition("=")[0]
    replaced = {"--batches": "--batch-size", "--dims": "--dim"}.get(flag)
    problem = [] if flag == "--package" else [f"{name}={value}" for name, value in GOOD.items() if name != replaced]
    refuse(["bench", *problem, *words], flag)


@pytest.mark.parametrize("value", ["", "page", "page.htm", "/proc/nowhere/page.html", "\x00.html", "/"])
def test_pages_of_plans(value: str) -> None:
    refuse(["plan", *arguments({}), f"--html={value}"], "--html")


@pytest.mark.parametrize("value", ["", "absent.json", "/dev/null", "/", "\x00.json"])
def test_results_that_are_none(value: str) -> None:
    refuse(["bench", f"--results={value}"], "--results")


def test_nothing_is_measured_with_results() -> None:
    for flag in ("--dim=16", "--package=x", "--ranks=2", "--campaign=x.toml", "--output=x.json"):
        refuse(["bench", "--results=rows.json", flag], flag.split("=")[0], "--results")


SCALE = [
    *([f"--batches={value}"] for value in ("0", "4,", "x", "9999999G")),
    *([f"--devices={value}"] for value in ("", "0", "8,", "8;16", "12", "1G", "-8")),
    *([f"--output={value}"] for value in ("", "rows.txt", "/proc/nowhere/rows.json", "\n.json")),
    *([f"--plot={value}"] for value in ("", "plot.gif", "/proc/nowhere/plot.svg")),
    *([f"--cluster={value}"] for value in ("", "absent.toml", "\x1b")),
    ["--batch-size=4"],
    ["--nodes=2"],
    ["--dim=0"],
    ["--device-profile=h300"],
    ["--set=strategy=magic"],
]


@pytest.mark.parametrize("words", SCALE, ids=lambda words: ascii(words[0][:24]))
def test_scale(words: list[str]) -> None:
    flag = words[0].partition("=")[0]
    given = [] if flag in ("--dim", "--device-profile") else ["--dim=16", "--device-profile=h200"]
    refuse(["scale", *given, *(["--dim=16"] if flag == "--device-profile" else []), *words], flag)


def test_scale_needs_a_dimension() -> None:
    refuse(["scale"], "--dim")


def test_bench_of_problems_and_packages_that_contradict(package: Path, tmp_path: Path) -> None:
    given = [f"--package={package}"]
    refuse(["bench"], "--batch-size")
    refuse(["bench", "--batches=4"], "--dim")
    refuse(["bench", *arguments({}), "--batches=4"], "--batches", "--batch-size")
    refuse(["bench", *arguments({}), "--dims=4"], "--dims", "--dim")
    for flag in ("--dim=16", "--dims=16", "--loss=clip", "--set=strategy=torch", "--memory-budget=auto"):
        refuse(["bench", *given, flag], flag.split("=")[0], "--package")
    refuse(["bench", *given, "--batches=257"], "--batches", "257")
    refuse(["bench", "--batch-size=64k", "--dim=4", "--target=cpu", "--memory-budget=1"], "budget", code=3)
    ranks = ["bench", "--ranks=2", "--target=cpu", "--batch-size=256"]
    refuse([*ranks, "--dim=16", "--devices=4"], "--devices", "--ranks 2")
    refuse([*ranks, "--dim=16", "--loss=infonce", "--keys=1024", "--against=none"], "--keys", "1024")
    for flag in ("--dim=99", "--batches=8k"):
        refuse(["bench", "--ranks=2", *given, flag], flag.split("=")[0], "--package")
    other = tmp_path / "other"
    infcl_gen.generate(make_problem(batch_size=256, dim=24, target="cpu"), other)
    refuse(["bench", *given, f"--package={other}"], "--package", "another dim")
    (package / "spec.py").write_text("raise SystemExit('imported')")
    refuse(["bench", *given], "edited")


def test_bench_without_the_library_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    refuse(["bench", *arguments({}), "--plot=p.svg"], "--plot", "matplotlib", code=4)


CONFIGS = [
    ("batch-siz = 4", "batch-siz"),
    ("batch_size = 4\nbatch-size = 4", "batch"),
    ("batch_size = 4\nbatch_size = 4", "TOML"),
    ("batch_size = 1.5", "batch_size"),
    ("batch_size = true", "batch_size"),
    ("batch_size = [4]", "batch_size"),
    ("batch_size = -4", "--batch-size"),
    ("dim = {}", "dim"),
    ("dim = 2024-01-01", "dim"),
    ("loss = 3", "loss"),
    ('loss = "a\\nb"', "--loss"),
    ('dtype = ["bf16"]', "dtype"),
    ('force = "yes"', "force"),
    ("force = 1", "force"),
    ("json = 0", "json"),
    ("set = 3", "set"),
    ('set = "strategy=torch"', "set"),
    ("[set]\nstrategy = 1.5", "set"),
    ("[set]\nstrategy = 'magic'", "--set"),
    ("[set]\n'a\\nb' = 'x'", "--set"),
    ("[plan]\ndim = 3", "plan"),
    ("nodes = 3\ndevices = 4", "--nodes"),
    ("batch_size = ", "TOML"),
    ("= 4", "TOML"),
    ("[[", "TOML"),
    ("a = " + "[" * 5000, "TOML"),
    ("'\\u001b[31m' = 1", "unknown key"),
    ("config = 'other.toml'", "config"),
    ("__class__ = 1", "__class__"),
    ("against = 3", "against"),
    ("batches = [4, 8.5]", "batches"),
    ('package = "folder"', "package"),
    ("scale = true", "scale"),
    ("plot = 1", "plot"),
]


@pytest.mark.parametrize(("text", "named"), CONFIGS, ids=range(len(CONFIGS)))
def test_config_files(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    size = [] if "batch" in text else ["--batch-size=256"]
    refuse(["plan", "--config", str(file), "--dim=16", "--target=cpu", *size], named)


CLUSTERS = [
    ("nodes = 2\ndevices_per_node = 0", "devices_per_node"),
    ("nodes = 2\ndevices_per_node = 40000", "--devices"),
    ("devices_per_node = 3", "--devices"),
    ("nodes = 3", "--nodes"),
    ("device_profile = 'h300'", "--device-profile"),
    ("device_profile = 'absent.toml'", "--device-profile"),
    ("device_profile = 'h200'", "--target"),
    ('device_profile = "a\\u202eb"', "--cluster"),
    ("[links]\nlink_gbs = 3", "unknown key 'links'"),
    ("link_gbs = 50", "link_gbs"),
    ("link_gbs = [50]", "link_gbs"),
    ("link_gbs = { value = 50 }", "link_gbs"),
    ("link_gbs = { value = -50, source = 'measured: x' }", "link_gbs"),
    ("link_gbs = { value = true, source = 'measured: x' }", "link_gbs"),
    ('link_gbs = { value = 50, source = "measured: a\\u001b[31m" }', "link_gbs"),
    ("latency_us = { value = 50, source = 'guessed' }", "latency_us"),
    ("links_per_node = 5", "links_per_node"),
    ("links_per_node = 9999999999999999999", "--cluster"),
    ('"\\u001b[31m" = 1', "unknown key"),
    ("nodes = ", "TOML"),
    ("a = " + "[" * 5000, "TOML"),
]


@pytest.mark.parametrize(("text", "named"), CLUSTERS, ids=range(len(CLUSTERS)))
def test_cluster_files(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    refuse(["plan", *arguments({"--devices": "4", "--cluster": str(file)})], named)


def test_a_cluster_of_nodes_without_devices(tmp_path: Path) -> None:
    file = tmp_path / "c2.toml"
    file.write_text("nodes = 4")
    refuse(["plan", *arguments({"--cluster": str(file)})], "--cluster: set devices_per_node in", "c2.toml")


def test_config_that_is_no_readable_file(tmp_path: Path) -> None:
    refuse(["plan", *arguments({}), f"--config={tmp_path}"], "--config", "not a regular file")
    refuse(["plan", *arguments({}), "--config=absent.toml"], "--config", "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b'loss = "\xe9"')
    refuse(["plan", *arguments({}), f"--config={tmp_path / 'latin.toml'}"], "--config", "UTF-8")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2**20 + 1))
    refuse(["plan", *arguments({}), f"--config={tmp_path / 'huge.toml'}"], "--config", "larger")
    os.mkfifo(tmp_path / "pipe.toml")
    for flag in ("--config", "--device-profile", "--cluster"):  # a pipe without a writer would block for ever
        done = CliRunner().invoke(cli.main, ["plan", *arguments({flag: str(tmp_path / "pipe.toml")})])
        assert done.exit_code == 2 and "not a regular file" in done.stderr


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o500)
    yield folder
    folder.chmod(0o700)


def test_outputs_that_cannot_be_written(tmp_path: Path, package: Path) -> None:
    def bad(output: Path | str) -> None:
        refuse(["generate", *arguments({"--output": str(output)})], "--output")

    (tmp_path / "file").write_text("kept")
    bad(tmp_path / "file")
    bad(tmp_path / "file" / "below")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("kept")
    bad(tmp_path / "full")
    refuse(["generate", *arguments({"--output": str(tmp_path / "full")}), "--force"], "--output")
    bad(package)
    (tmp_path / "link").symlink_to(package)
    bad(tmp_path / "link")
    refuse(["generate", *arguments({"--output": str(tmp_path / "link")}), "--force"], "--output")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    bad(tmp_path / "dangling")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    bad(tmp_path / "loop")
    bad(tmp_path / "loop" / "below")
    bad(tmp_path / ("n" * 300))
    bad("/")
    bad("/proc/nowhere/package")
    (package / "notes.txt").write_text("kept")
    refuse(["generate", *arguments({"--output": str(package)}), "--force"], "--output")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_in_a_folder_without_permission(unwritable: Path) -> None:
    refuse(["generate", *arguments({"--output": str(unwritable / "package")})], "--output")


def damage(package: Path, how: str, name: str) -> None:
    file = package / name
    content = file.read_bytes()
    if how == "empty":
        file.write_bytes(b"")
    elif how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "edited":
        file.write_bytes(content + b"\n# edited\n")
    elif how == "binary":
        file.write_bytes(b"\xff\x00" + content)
    elif how == "missing":
        file.unlink()
    elif how == "folder":
        file.unlink()
        file.mkdir()
    elif how == "link":
        other = package.parent / "elsewhere"
        file.rename(other)
        file.symlink_to(other)
    else:
        raise AssertionError(how)


def assert_not_verified(package: Path, name: str) -> None:
    """An edited package is a valid input to `verify`, whose answer is no; nothing of the package runs."""
    done = CliRunner().invoke(cli.main, ["verify", str(package)])
    assert done.exit_code == 5 and len(done.stderr.splitlines()) == 1
    assert "edited" in done.stdout and name in done.stdout and "Traceback" not in done.output


HOW = ("empty", "truncated", "edited", "binary", "missing", "folder", "link")
FILES = ("spec.py", "loss.py", "__init__.py", "schedule.py", "_runtime/__init__.py", "manifest.json")
# test_forged_manifests edits the manifest in ways that keep it JSON.
DAMAGES = [(how, name) for how in HOW for name in FILES if (how, name) != ("edited", "manifest.json")]


@pytest.mark.parametrize(("how", "name"), DAMAGES)
def test_damaged_packages(how: str, name: str, package: Path) -> None:
    damage(package, how, name)
    refuse(["inspect", str(package)], str(package)[:40])
    if how == "edited":
        assert_not_verified(package, name)


@pytest.mark.parametrize(
    "manifest",
    [
        "{}", "[]", "null", "3", "{", '{"files": {}}', '{"files": {"../../spec.py": "x"}}',
        '{"files": {"/etc/passwd": "x"}}', '{"files": {"spec.py": 3}}', '{"files": []}', "[" * 100000,
    ],
    ids=range(11),
)  # fmt: skip
def test_forged_manifests(manifest: str, package: Path) -> None:
    (package / "manifest.json").write_text(manifest)
    refuse(["inspect", str(package)], "manifest")


def test_forged_manifest_versions(package: Path) -> None:
    file = package / "manifest.json"
    manifest = json.loads(file.read_text())
    for key, value in (("schema_version", 999), ("schema_version", "1"), ("generator", "other"), ("digest", "0")):
        file.write_text(json.dumps({**manifest, key: value}))
        done = CliRunner().invoke(cli.main, ["inspect", str(package)])
        assert done.exit_code == 2, key
    assert_not_verified(package, "manifest.json")  # the last one: its digest is not SPEC's


def test_added_files(package: Path) -> None:
    (package / "sitecustomize.py").write_text("raise SystemExit('imported')")
    refuse(["inspect", str(package)], "sitecustomize.py")


def test_an_edited_package_is_never_run(package: Path) -> None:
    for name in ("spec.py", "__init__.py"):
        (package / name).write_text(f"open({str(package.parent / 'pwned')!r}, 'w').write('x')\nSPEC = {{}}\n")
    refuse(["inspect", str(package)], "edited")
    assert_not_verified(package, "spec.py")
    assert not (package.parent / "pwned").exists()


LOSS_FILES = [
    "raise RuntimeError('a\\nb')",
    "raise SystemExit(0)",
    "import sys; sys.exit('bye')",
    "loss = 3",
    "loss = None",
    "other = 1",
    "def loss(:",
    "1 / 0",
    "import no_such_module_anywhere",
    "loss = __import__('infcl_gen.losses.language', fromlist=['x']).LossSpec()",
    "x = '\\ud800'\nraise ValueError(x)",
    "def f(): return f()\nf()",
]


@pytest.mark.parametrize("source", LOSS_FILES, ids=range(len(LOSS_FILES)))
def test_loss_files(source: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    refuse(["plan", *arguments({"--loss": f"{file}:loss"})], "--loss")


def test_loss_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.py").mkdir()
    for name in ("binary.py", "folder.py", "absent.py"):
        refuse(["plan", *arguments({"--loss": f"{tmp_path / name}:loss"})], "--loss")


PYTHON = [
    ({}, "--batch-size"),
    ({"batch_size": None}, "--batch-size"),
    ({"batch_size": 4.0}, "--batch-size"),
    ({"batch_size": True}, "--batch-size"),
    ({"batch_size": b"4"}, "--batch-size"),
    ({"batch_size": [4]}, "--batch-size"),
    ({"batch_size": 10**5000}, "--batch-size"),
    ({"batch_size": -(10**5000)}, "--batch-size"),
    ({"batch_size": float("nan")}, "--batch-size"),
    ({"dim": {}}, "--dim"),
    ({"dim": 1j}, "--dim"),
    ({"keys": False}, "--keys"),
    ({"devices": "1"*5000}, "--devices"),
    ({"nodes": 0}, "--nodes"),
    ({"memory_budget": 1.5}, "--memory-budget"),
    ({"memory_budget": 0}, "--memory-budget"),
    ({"memory_budget": 2**60}, "--memory-budget"),
    ({"memory_budget": "1GiB", "memory_budget_bytes": 4}, "--memory-budget"),
    ({"dtype": "torch.float32"}, "--dtype"),
    ({"dtype": float}, "--dtype"),
    ({"dtype": ["bf16"]}, "--dtype"),
    ({"precision": 3}, "--precision"),
    ({"target": object()}, "--target"),
    ({"loss": 3}, "--loss"),
    ({"loss": ""}, "--loss"),
    ({"loss": "a\x00b"}, "--loss"),
    ({"loss": lambda x: x}, "--loss"),
    ({"device_profile": 7}, "--device-profile"),
    ({"device_profile": "h200\n"}, "--device-profile"),
    ({"cluster": 7}, "--cluster"),
    ({"cluster": {"nodes": 10**5000}}, "--cluster"),
    ({"cluster": {"link_gbs": {"value": 10**400, "source": "measured: x"}}}, "--cluster"),
    ({"cluster": {"link_gbs": {1: 2}}}, "--cluster"),
    ({"links": {"link_gbps": 3}}, "--cluster"),
    ({"set": "strategy=panel"}, "--set"),
    ({"set": 3}, "--set"),
    ({"set": {"strategy": None}}, "--set"),
    ({"set": {3: "panel"}}, "--set"),
    ({"set": [("strategy",)]}, "--set"),
    ({"set": {"strategy": "panel\n"}}, "--set"),
    ({"settings": {"strategy": "panel"}, "set": {}}, "--set"),
    ({"batchsize": 4}, "--batchsize"),
    ({"x\ny": 4}, "unknown option"),
    ({"schema_version": 1}, "unknown option"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "named"), PYTHON, ids=range(len(PYTHON)))
def test_python_arguments(flags: dict[str, Any], named: str, workplace: Path) -> None:
    given = {"dim": 16, "target": "cpu", **({"batch_size": 256} if flags else {}), **flags}
    keyword = named.removeprefix("--").replace("-", "_") if named.startswith("--") else named
    for call, word in ((make_problem, named), (infcl_gen.plan, keyword), (infcl_gen.load, keyword)):
        with pytest.raises(InputError) as raised:
            call(**given)
        assert word in str(raised.value) and str(raised.value).isprintable() and len(str(raised.value)) < 1000
        assert "--" not in str(raised.value) or call is make_problem
    with pytest.raises(InputError):
        infcl_gen.generate(output="package", **given)
    assert not list(workplace.iterdir())


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size": "256"},
        {"dim": 16.0},
        {"settings": (("strategy", "panel", "x"),)},
        {"settings": (("strategy", 3),)},
        {"settings": (("strategy", "torch"), ("strategy", "torch"))},
        {"settings": None},
        {"loss": None},
        {"memory_budget_bytes": "1GiB"},
        {"keys": "many"},
    ],
)
def test_a_problem_refuses_what_is_not_canonical(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^--"):
        Problem(**{"batch_size": 256, "dim": 16, **fields})


def test_generate_in_python_refuses_bad_outputs(workplace: Path) -> None:
    problem = make_problem(batch_size=256, dim=16, target="cpu")
    for output in (None, "", "a\nb", "a\x00b", 3, b"package", [], Path("/")):
        with pytest.raises(InputError, match="output"):
            infcl_gen.generate(problem, output)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        infcl_gen.generate(problem, "package", dim=4)
    with pytest.raises(InputError):
        infcl_gen.plan({"batch_size": 4, "dim": 4})  # type: ignore[arg-type]
    assert not list(workplace.iterdir())


def test_from_a_folder_that_was_deleted(workplace: Path) -> None:
    workplace.rmdir()
    for words in (["plan", *arguments({})], ["generate", *arguments({}), "-o", "p"], ["verify", "."]):
        done = CliRunner().invoke(cli.main, words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == "infcl-gen: error: the current folder was deleted; change to another one\n"
    with pytest.raises(InputError, match=r"^output p: No such file"):
        infcl_gen.generate(output="p", batch_size=256, dim=16, target="cpu")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["plan", "--batch-size", "0", "--dim", "4"], 2, "--batch-size"),
        (["plan", "--bogus"], 2, "--bogus"),
        (["generate", "--batch-size", "64", "--dim", "4", "--target", "cpu", "-o", "a\nb"], 2, "--output"),
        (["inspect", "absent"], 2, "absent"),
        (["generate", "--batch-size", "64k", "--dim", "4", "--target", "cpu", "--memory-budget", "1", "-o", "p"],
         3, "budget"),
    ],
)  # fmt: skip
def test_as_real_processes(words: list[str], code: int, named: str, workplace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infcl_gen", *words],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1 and named in done.stderr
    assert not list(workplace.iterdir())


@pytest.mark.parametrize("flag", ["--dim", "--loss", "--bogus"])
def test_json_errors_are_one_object(flag: str) -> None:
    done = CliRunner().invoke(cli.main, ["plan", *arguments({flag: "\x1b"}), "--json"])
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == error["exit_code"] == 2
    assert done.stderr == f"infcl-gen: error: {error['message']}\n" and flag in error["message"]
