"""README.md shows commands, files and code that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from infcl_gen.cli import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
SHELL = [line.strip().split("  #")[0] for line in TEXT.splitlines() if line.startswith("    ")]
COMMANDS = [line.split(";")[0] for line in SHELL if line.startswith("infcl-gen ")]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 5 and len(PYTHON) == 2


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_flags(line: str) -> None:
    flags = [value for value in re.findall(r'^    P="(.*)"$', TEXT, re.MULTILINE)]
    for variant in flags if "$P" in line else [""]:
        _, name, *arguments = shlex.split(line.replace("$P", variant))
        command = main.commands[name]
        with click.Context(main, obj={}) as parent:
            command.make_context(name, arguments, parent=parent)


def test_the_cluster_file_is_one() -> None:
    import msgspec

    from infcl_gen.inputs.problem import make_problem

    found = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert len(found) == 1
    problem = make_problem(batch_size="4M", dim=1024, cluster=msgspec.toml.decode(found[0]))
    assert (problem.devices, problem.nodes, problem.device_profile) == (512, 64, "h200")
    assert problem.links is not None and problem.links.node_latency_us is not None


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_exist() -> None:
    named = re.findall(r"\b((?:generated|tests|infcl_gen|templates)/[\w./-]*\w)", TEXT)
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert not missing


def test_every_command_is_described() -> None:
    for name in main.commands:
        assert f"| `infcl-gen {name}" in TEXT, name


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.partition("\n")[0])
def test_code_compiles(code: str) -> None:
    compile(code, "README.md", "exec")


# After the example's last line. A gloo thread that is left when Python ends may abort the process as it lets go of what
# it has reduced (https://github.com/pytorch/pytorch/issues/190489).
GROUP_IS_GONE = """
from pathlib import Path
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
"""


def test_training_prints_the_losses_it_names(tmp_path: Path) -> None:
    (code,) = (code for code in PYTHON if code.startswith("# train.py"))
    (tmp_path / "train.py").write_text(code + GROUP_IS_GONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    named = re.findall(r"# ([\d., ]+)\n", code)[0].split(", ")
    assert re.findall(r"step \d: loss (\S+)", done.stdout) == named and len(named) == 3


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    from infcl_gen.losses import derive, load_loss

    file = tmp_path / "weighted.py"
    file.write_text(PYTHON[1])
    derivation = derive(load_loss(f"{file}:weighted"))
    assert f"g_ij = {derivation.formulas()['dL/dx'].removeprefix('g_ij = ')}" in TEXT


def test_the_sample_of_a_plan_is_what_plan_prints() -> None:
    """What the README shows of a plan, line by line; lines that end in "..." up to there."""
    sample = TEXT.split("`plan` explains each level", 1)[1].split("\n\n")[1].splitlines()
    flags = re.search(r'P="(.*?)"', TEXT)
    assert flags and len(sample) >= 4
    command = [sys.executable, "-m", "infcl_gen", "plan", *flags[1].split()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [" ".join(line.split()) for line in printed.splitlines()]
    for line in sample:
        shown = " ".join(line.removesuffix("...").split())
        assert any(real.startswith(shown) for real in found), f"plan does not print {shown!r}"
