"""From a problem to text, and to an imported module: hostile text stays text, and the cache heals itself."""

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen.emission import build, cache, read_package, rerender, write_package
from infcl_gen.emission.lower import lower
from infcl_gen.emission.pipeline import plan_problem
from infcl_gen.errors import InfclError, InputError, LockTimeoutError
from infcl_gen.files import template_folder
from infcl_gen.hardware import resolve_cluster
from infcl_gen.inputs.problem import make_problem
from infcl_gen.processes import Worker

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"batch_size": 256, "dim": 32, "dtype": "fp32", "target": "cpu"}

HOSTILE = [
    'x"); import os; os.abort() #',
    "x'); import os; os.abort() #",
    '"""\nimport os\nos.abort()\n"""',
    "{{ 7 * 7 }}{% for x in y %}",
    "{# comment",
    "\\",
    "\\N{BULLET}\\x00\\u0000",
    "%s%n%(name)s{0}{x!r}",
    "ünïcode 漢字",
    "a b\tc",
    "\u202egnp.exe",
    "x" * 900,
    "__import__",
    "../../../etc/passwd",
    "$(reboot)`reboot`",
]
LOSS_FILE = """
from infcl_gen.losses import LossSpec
from infcl_gen.losses.language import logsumexp_over_keys, mean_over_queries, positive, scale, z
mine = LossSpec("mine", mean_over_queries(logsumexp_over_keys(scale * z) - positive(scale * z)), "label", {doc!r})
"""


def code_of(files: dict[str, str]) -> str:
    """Everything that runs: the syntax trees of all files without their string constants."""
    return "\n".join(tree_of(path, text) for path, text in sorted(files.items()))


@functools.cache  # most files are the same in each package
def tree_of(path: str, text: str) -> str:
    tree = ast.parse(text, path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.fixture(scope="module")
def plain_code(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plain") / "plain.py"
    file.write_text(LOSS_FILE.format(doc="plain"))
    return code_of(build(make_problem(**SMALL, loss=f"{file}:mine")))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_code: str, text: str) -> None:
    """As the doc of a loss and in the path of its file: refused with one clear line, or a literal and nothing else."""
    monkeypatch.chdir(tmp_path)
    Path("doc.py").write_text(LOSS_FILE.format(doc=text))
    named = re.sub("[/\0]", "_", text)[:60] + ".py"
    Path(named).write_text(LOSS_FILE.format(doc="plain"))
    for loss in ("doc.py:mine", f"{named}:mine"):
        try:
            files = build(make_problem(**SMALL, loss=loss))
        except InputError as error:
            assert "\n" not in str(error)
            continue
        assert code_of(files) == plain_code
        written = write_package(files, tmp_path / "package", force=True)
        spec = read_package(written).spec
        assert spec["problem"]["loss"] == spec["loss"]["name"] == "mine"
        assert spec["loss"]["doc"] == (text if loss == "doc.py:mine" else "plain")
        assert rerender(written)["spec.py"] == files["spec.py"].encode()


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("field", ["loss", "dtype", "precision", "target", "device_profile", "set"])
def test_hostile_flags_are_refused_in_one_line(field: str, text: str) -> None:
    value = [f"strategy={text}"] if field == "set" else text
    with pytest.raises(InfclError) as raised:
        build(make_problem(**{**SMALL, "device_profile": "cpu", field: value}))
    assert raised.value.exit_code in (2, 4)
    assert str(raised.value).isprintable()


def test_device_profile_file_is_text_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = (ROOT / "infcl_gen/hardware/profiles/h200.toml").read_text()
    hostile = "source = '''\\1: \" + __import__(\"os\").abort() #'''"
    Path('it\'s "mine".toml').write_text(re.sub(r'source = "(\w+): [^"]*"', hostile, source))
    flags = {"batch_size": 4096, "dim": 64}
    files = build(make_problem(**flags, device_profile='it\'s "mine".toml'))
    assert code_of(files) == code_of(build(make_problem(**flags, device_profile="h200")))


@pytest.mark.parametrize("profile", ["cpu", "h200"])
def test_lowered_package_is_complete_and_names_are_read(profile: str) -> None:
    problem = make_problem(**{**SMALL, "target": None, "device_profile": profile})
    planned, derivation = plan_problem(problem)
    files = {file.path: file for file in lower(planned, derivation, resolve_cluster(problem).profile)}
    assert {"__init__.py", "spec.py", "loss.py", "schedule.py"} == files.keys() - {"kernels.py"}
    spec = files["spec.py"].names["spec"]
    assert (spec["name"], spec["problem"]["device_profile"]) == (f"clip_{profile}_d32", profile)
    templates = "".join(path.read_text() for path in template_folder().rglob("*.py.jinja"))
    read = set(re.findall(r"\w+", " ".join(re.findall(r"\{[{%].*?[}%]\}", templates, re.DOTALL))))
    assert {name for file in files.values() for name in file.names} <= read


def test_runtime_is_copied_verbatim() -> None:
    files = build(make_problem(**SMALL))
    sources = list((ROOT / "infcl_gen/runtime").glob("*.py"))
    assert {"engine.py", "table.py", "transport.py", "group.py", "ops.py", "api.py"} <= {path.name for path in sources}
    for source in sources:
        assert files[f"_runtime/{source.name}"] == source.read_text()


def test_plan_and_generate_take_a_problem_or_flags(tmp_path: Path) -> None:
    problem = make_problem(**SMALL)
    first = infcl_gen.generate(problem, tmp_path / "a")
    second = infcl_gen.generate(output=tmp_path / "b", **SMALL)
    assert read_package(first).files == read_package(second).files
    assert infcl_gen.plan(problem) == infcl_gen.plan(**SMALL)
    for arguments, flags in (((problem,), {"dim": 64}), ((), {"dim": 64}), ((), {**SMALL, "dimm": 3})):
        with pytest.raises(InputError):
            infcl_gen.plan(*arguments, **flags)
    with pytest.raises(InputError, match="output"):
        infcl_gen.generate(problem)


def test_load_generates_once_and_imports() -> None:
    module = infcl_gen.load(**SMALL)
    assert infcl_gen.load(**SMALL) is module
    for name in ("SPEC", "ContrastiveLoss", "contrastive_loss", "loss_and_grads", "reference", "selftest"):
        assert getattr(module, name).__doc__, name
    assert module.SPEC["problem"]["batch_size"] == 256
    assert infcl_gen.load(**{**SMALL, "dim": 33}) is not module


DAMAGES = ("cut", "remove", "add", "empty", "a file", "a link", "a broken link")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_entry_is_generated_again(damage: str, tmp_path: Path) -> None:
    problem = make_problem(**{**SMALL, "batch_size": 100 + DAMAGES.index(damage), "dim": 5})
    folder = cache.cache_folder() / cache.cache_key(problem)
    write_package(build(problem), folder)
    if damage == "cut":
        (folder / "loss.py").write_bytes((folder / "loss.py").read_bytes()[:100])
    elif damage == "remove":
        (folder / "manifest.json").unlink()
    elif damage == "add":
        (folder / "torch.py").write_text("raise SystemExit")
    elif damage.startswith("a "):
        shutil.rmtree(folder)
        if damage == "a file":
            folder.write_text("")
        else:
            folder.symlink_to(tmp_path if damage == "a link" else tmp_path / "nowhere")
    else:
        for file in folder.rglob("*.py"):
            file.write_bytes(b"")
    assert infcl_gen.load(problem).SPEC["digest"] == read_package(folder).digest


def load_small(requests: Any, answer: Callable[..., None]) -> None:
    """The task of a process."""
    answer(digest=infcl_gen.load(**{**SMALL, "dim": 48}).SPEC["digest"])


@pytest.mark.usefixtures("forked")
def test_many_processes_load_at_once(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    task = "tests.emission.test_emission:load_small"
    workers = [Worker(task, [], tmp_path / f"log {number}", environment) for number in range(3)]
    try:
        found = [worker.answer(120.0) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert found[0] and "digest" in found[0] and found == [found[0]] * 3
    folders = [path for path in (tmp_path / "infcl_gen" / "packages").iterdir() if path.is_dir()]
    assert len(folders) == 1


def test_load_gives_up_on_a_lock_that_is_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    from infcl_gen import files

    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.2)
    problem = make_problem(**{**SMALL, "dim": 47})
    cache.cache_folder().mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache.cache_folder() / f"{cache.cache_key(problem)}.lock"), pytest.raises(LockTimeoutError):
        infcl_gen.load(problem)


def test_cache_key_follows_the_content(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(LOSS_FILE.format(doc="one"))
    problem = make_problem(**SMALL, loss=f"{file}:mine")
    first = cache.cache_key(problem)
    assert cache.cache_key(problem) == first
    file.write_text(LOSS_FILE.format(doc="two"))
    assert cache.cache_key(problem) != first
    assert cache.cache_key(make_problem(**SMALL)) != cache.cache_key(make_problem(**{**SMALL, "dim": 31}))


def test_cache_key_follows_the_figures_of_the_device(tmp_path: Path) -> None:
    """Of a profile in a file, whose name stays."""
    shipped = (ROOT / "infcl_gen/hardware/profiles/h200.toml").read_text()
    keys = set()
    for bandwidth in ("4300.0", "4301.0"):
        file = tmp_path / "mine.toml"
        file.write_text(shipped.replace("bandwidth_gbs = { value = 4300.0", f"bandwidth_gbs = {{ value = {bandwidth}"))
        keys.add(cache.cache_key(make_problem(batch_size=256, dim=32, device_profile=str(file))))
    assert len(keys) == 2


def test_cache_key_follows_tuning_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a key without them, or without those of one folder."""
    problem = make_problem(**SMALL)
    folders = (tmp_path / "users", tmp_path / "installed")
    monkeypatch.setattr(cache, "record_folders", lambda: folders)
    keys = {cache.cache_key(problem)}
    for folder in folders:
        folder.mkdir()
        (folder / "cpu.json").write_text('{"records": []}')
        keys.add(cache.cache_key(problem))
        (folder / "h200.json").write_text('{"records": []}')  # of another board
        assert cache.cache_key(problem) in keys
    assert len(keys) == 3


def test_a_package_in_the_cache_is_found_without_sympy() -> None:
    """Which takes half a second or more of a process's first call. Planted: a module that looks its loss up, or what
    its positives are where there are more keys than queries."""
    call = (
        "import torch, infcl_gen\n"
        "infcl_gen.ContrastiveLoss('infonce')(torch.ones(2, 16), torch.ones(6, 16), 1.0, labels='own')\n"
    )
    exec(call, {})
    unneeded = {"sympy", "jinja2", "infcl_gen.planning", "infcl_gen.kernels"}
    assert unneeded <= set(sys.modules)
    code = f"{call}import sys\nprint(sorted({unneeded | {'torch._dynamo'}} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.strip() == "[]"


def test_cache_key_follows_the_generator_and_its_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**SMALL)
    keys = {cache.cache_key(problem)}
    for name in ("source", "templates"):
        (tmp_path / name / "inner").mkdir(parents=True)
    monkeypatch.setattr(cache, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(cache, "template_folder", lambda: tmp_path / "templates")
    edits = ("source/a.py", "source/inner/b.py", "source/inner/c.toml", "templates/inner/kernel.py.jinja")
    for name in edits:
        for text in ("one", "two"):
            (tmp_path / name).write_text(text)
            keys.add(cache.cache_key(problem))
    assert len(keys) == 1 + 2 * len(edits)


def test_rerender_needs_the_problem_only(tmp_path: Path) -> None:
    written = infcl_gen.generate(output=tmp_path / "p", **SMALL, set=["panel_rows=64"])
    assert rerender(written) == read_package(written).files


@pytest.mark.parametrize(
    "problem",
    ["", "[]", "{}", '{"batch_size": "many", "dim": 3}', '{"dim": -1, "batch_size": 1}', '{1: 2}', '{"x": 1}'],
)  # fmt: skip
def test_rerender_refuses_a_spec_with_a_wrong_problem(tmp_path: Path, problem: str) -> None:
    files = build(make_problem(**SMALL))
    before, _, rest = files["spec.py"].partition('    "problem": ')
    _, separator, after = rest.partition('    "positives"')
    files["spec.py"] = (
        f'{before}    "problem": {problem},\n{separator}{after}' if problem else before + separator + after
    )
    from infcl_gen.emission.package import content_digest

    digest = re.search(r'"digest": "([0-9a-f]+)"', files["spec.py"])
    assert digest
    files["spec.py"] = files["spec.py"].replace(digest[1], content_digest(files))
    with pytest.raises(InputError):
        rerender(write_package(files, tmp_path / "p"))
