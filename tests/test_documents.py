"""README and documentation show commands, files, code and outputs that exist, in sentences that can be read."""

import contextlib
import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from infcl_gen.cli import main
from infcl_gen.inputs.overrides import BLOCK_FIELDS, Overrides
from infcl_gen.losses import BUILTIN_LOSSES, LossSpec
from infcl_gen.processes import Worker
from infcl_gen.verification.verify import verify_package
from tests.documents import PAGES, ROOT, blocks, commands, links, sentences, without_generated
from tests.tiers import nightly

PYTHON = blocks("python")
README = PAGES["README.md"]
UNPLACED = {"cwcl", "gist", "mil_nce", "mil_nce_multi"}  # losses whose place in their source is still to be looked up
# After the example's last line. A gloo thread that is left when Python ends may abort the process as it lets go of what
# it has reduced (https://github.com/pytorch/pytorch/issues/190489).
GROUP_IS_GONE = """
from pathlib import Path
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
"""


def named(block: tuple[str, str]) -> str:
    page, code = block
    return f"{page}:{code.partition(chr(10))[0]}"


def test_there_is_something_to_check() -> None:
    assert len(commands()) > 15 and len(PYTHON) > 6 and len(PAGES) > 12


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 220
    assert len(README.encode()) <= 14 << 10


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    long = [found for found in sentences(PAGES[page]) if len(found.split()) > 35]
    assert not long


@pytest.mark.parametrize("spec", BUILTIN_LOSSES.values(), ids=lambda spec: spec.name)
def test_built_in_losses_say_where_they_are_from_and_when_to_use_them(spec: LossSpec) -> None:
    place = "" if spec.name in UNPLACED else ", ((algorithm|equation|figure|section) \\d|pseudo code)"
    assert re.search(r"arXiv \d{4}\.\d{5}" + place, spec.source)
    assert spec.doc.endswith(".") and spec.use.endswith(".") and not spec.use.startswith("\n")
    assert not [found for found in sentences(f"{spec.doc}\n\n{spec.use}") if len(found.split()) > 25]
    assert f"\n## {spec.name}\n" in PAGES["docs/losses.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    missing = [target for target in links(page) if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


@pytest.mark.parametrize("line", [line for _, line in commands() if line.startswith("infcl-gen ")])
def test_commands_exist_with_their_flags(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = main.commands[name]
    with click.Context(main, obj={}) as parent:
        command.make_context(name, arguments, parent=parent)


def test_the_guide_has_every_setting() -> None:
    page = (ROOT / "docs" / "tiles.md").read_text().partition("## Settings\n")[2]
    named = set(
        re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in page.splitlines() if row.startswith("| `")))
    )
    assert named == {each.name for each in dataclasses.fields(Overrides)} - {"blocks"}
    (of_kernels,) = (row for row in page.splitlines() if row.startswith("| `<kernel>"))
    assert all(f"`{name}`" in of_kernels for name in BLOCK_FIELDS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for _, line in commands():
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    found = re.findall(
        r"\b((?:generated|tests|infcl_gen|templates|tune|docs)/[\w./-]*\w)", without_generated(PAGES[page])
    )
    missing = sorted({name for name in found if not (ROOT / name).exists()} - {"tune/campaigns/NAME.toml"})
    assert not missing


def test_every_command_is_described() -> None:
    for name in main.commands:
        assert f"| `infcl-gen {name}" in README, name


def test_the_cluster_file_is_one() -> None:
    import msgspec

    from infcl_gen.inputs.problem import make_problem

    ((_, text),) = blocks("toml")
    problem = make_problem(batch_size="4M", dim=1024, cluster=msgspec.toml.decode(text))
    assert (problem.devices, problem.nodes, problem.device_profile) == (512, 64, "h200")
    assert problem.links is not None and problem.links.node_latency_us is not None


# Those that define losses of the page of losses run where these are judged (tests/verification/test_numerics.py).
EXAMPLES = [
    (page, code)
    for page, code in PYTHON
    if "dist." not in code and not (page == "docs/losses.md" and re.search(r"^\w+ = LossSpec\(", code, re.MULTILINE))
]
FIRST = [found for found in EXAMPLES if found[0] == "README.md"]
OWN_PROCESS = nightly(FIRST, FIRST[1:])


def environment_of(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "INFCL_GEN_CACHE": str(folder / "cache")}


@contextlib.contextmanager
def running(file: str, folder: Path, **environment: str) -> Iterator[Callable[[], str]]:
    """A program there in a forked process (the fixture `forked`); the call waits for it, and gives what it printed."""
    log = folder / f"log{environment.get('RANK', '')}"
    worker = Worker("tests.documents:run_example", [file], log, environment_of(folder) | environment)

    def printed() -> str:
        assert worker.answer(120.0) == {"done": True}, log.read_text()
        return log.read_text()

    try:
        yield printed
    finally:
        worker.kill()


@pytest.mark.parametrize("block", OWN_PROCESS, ids=named)
def test_the_first_examples_run_on_their_own(block: tuple[str, str], tmp_path: Path) -> None:
    """Up to the end of the interpreter."""
    (tmp_path / "example.py").write_text(block[1])
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env={**os.environ, **environment_of(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("block", [found for found in EXAMPLES if found not in OWN_PROCESS], ids=named)
def test_examples_run(block: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("example.py").write_text(block[1])
    with running("example.py", tmp_path) as printed:
        printed()


def write_training(folder: Path) -> list[str]:
    """The page's program for two processes, and the losses that it says it prints."""
    (code,) = (code for _, code in PYTHON if code.startswith("# train.py"))
    (folder / "train.py").write_text(code + GROUP_IS_GONE)
    promised = re.findall(r"# ([\d., ]+)\n", code)[0].split(", ")
    assert len(promised) == 3
    return list(promised)


@pytest.mark.usefixtures("forked")
def test_training_on_two_processes_prints_the_losses_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment that torchrun makes, whose store is another process's."""
    import torch.distributed as dist

    promised = write_training(tmp_path)
    monkeypatch.chdir(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(running("train.py", tmp_path, RANK=rank, LOCAL_RANK=rank, **torchrun)) for rank in "01"
        ]
        first, second = [printed() for printed in ranks]
    assert re.findall(r"step \d: loss (\S+)", first) == promised and "step" not in second


@pytest.mark.long
def test_torchrun_trains_on_two_processes(tmp_path: Path) -> None:
    promised = write_training(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment_of(tmp_path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step \d: loss (\S+)", done.stdout) == promised


def test_a_loss_of_ones_own_has_the_gradient_shown(tmp_path: Path) -> None:
    from infcl_gen.losses import derive, formulas_of, load_loss

    file = tmp_path / "weighted.py"
    file.write_text(next(code for page, code in PYTHON if page == "docs/losses.md"))
    derivation = derive(load_loss(f"{file}:weighted"))
    assert f"g_ij = {formulas_of(derivation)['dL/dx'].removeprefix('g_ij = ')}" in PAGES["docs/losses.md"]


def test_the_smooth_substitute_of_hardest_negatives() -> None:
    """Of the page, in fp64: the hinge of its own definition, and near that of the hardest negatives."""
    import torch

    from infcl_gen import ContrastiveLoss

    defined: dict[str, Any] = {}
    exec(next(code for _, code in PYTHON if "triplet = " in code), defined)
    q, k = torch.nn.functional.normalize(torch.randn(2, 40, 16, generator=torch.manual_seed(1)).double(), dim=2)
    leaves = q.requires_grad_(), k.requires_grad_()
    loss = ContrastiveLoss(defined["triplet"])(*leaves, 1.0)
    products = q @ k.T
    others = products.masked_fill(torch.eye(40, dtype=torch.bool), -torch.inf)
    nearest = (50 * others).logsumexp(1) / 50
    truth = (nearest - products.diagonal() + 0.2).relu().mean()
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves), strict=True)
    for found, expected in ((loss, truth), *pairs):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    hardest = (others.amax(1) - products.diagonal() + 0.2).relu().mean()
    assert 0 < loss - hardest < math.log(39) / 50


def test_the_sample_of_a_plan_is_what_plan_prints() -> None:
    """What the page shows of a plan, line by line; lines that end in "..." up to there."""
    sample = next(text for page, text in blocks("text") if page == "docs/clusters.md").splitlines()
    flags = next(line for page, line in commands() if page == "docs/clusters.md" and line.startswith("infcl-gen plan"))
    command = [sys.executable, "-m", "infcl_gen", *shlex.split(flags)[1:]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [" ".join(line.split()) for line in printed.splitlines()]
    assert len(sample) >= 4
    for line in sample:
        shown = " ".join(line.removesuffix("...").split())
        assert any(real.startswith(shown) for real in found), f"plan does not print {shown!r}"


def test_the_commands_of_guides_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that take long, or need a GPU."""
    monkeypatch.chdir(tmp_path)
    Path("build").mkdir()
    Path("tune").symlink_to(ROOT / "tune")
    Path("cluster.toml").write_text(blocks("toml")[0][1])
    Path("build/weighted.py").write_text(next(code for page, code in PYTHON if page == "docs/losses.md"))
    done = 0
    for page, line in commands():
        if page not in ("docs/clusters.md", "docs/losses.md", "docs/benchmarks.md"):
            continue
        _, name, *arguments = shlex.split(line)
        if name in ("plan", "generate", "inspect", "scale") or "--results" in arguments:
            result = CliRunner().invoke(main, [name, *arguments])
            assert result.exit_code == 0 and not result.stderr, (line, result.stderr)
            done += 1
    assert done >= 9
    assert {path.name for path in Path("build").iterdir()} > {"clip_h100", "weighted", "plan.html", "bench.html"}


@pytest.mark.usefixtures("forked")
def test_the_bug_that_a_page_plants_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for page, line in commands() if page == "docs/trust.md" and line.startswith(("mkdir", "sed", "cd "))]
    (tmp_path / "generated").symlink_to(ROOT / "generated")
    *made, asked = lines
    subprocess.run(["bash", "-c", "set -e\n" + "\n".join(made)], cwd=tmp_path, timeout=120, check=True)
    (code,) = re.findall('^cd build && python -c "(.*)"$', asked)
    (tmp_path / "build" / "program.py").write_text(code)
    monkeypatch.chdir(tmp_path / "build")
    with running("program.py", tmp_path, PYTHONPATH=str(tmp_path / "build")) as printed:
        assert len(made) == 2 and printed() == "False\n"
    (planted,) = verify_package(tmp_path / "build" / "planted")
    assert not planted["passed"] and "schedule.py was edited" in planted["detail"]


@pytest.mark.usefixtures("forked")
def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    log = tmp_path / "log"
    worker = Worker("tests.documents:build_site", [str(tmp_path / "html")], log)
    try:
        assert worker.answer(240.0) == {"status": 0}, log.read_text()
    finally:
        worker.kill()
    pages = {page for page in PAGES if page.startswith("docs/")}
    assert all((tmp_path / "html" / Path(page).with_suffix(".html").name).exists() for page in pages)
