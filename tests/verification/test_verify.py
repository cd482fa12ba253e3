"""`verify` passes good packages, fails damaged, edited and wrong ones, never runs edited code, and never hangs."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import infcl_gen
from infcl_gen import version
from infcl_gen.emission.package import content_digest, manifest_text, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.hardware import doctor
from infcl_gen.inputs.problem import make_problem
from infcl_gen.losses.language import LossSpec, log, logsumexp_over_keys, mean_over_queries, positive, scale, z
from infcl_gen.verification import verify
from infcl_gen.verification.aot import Kernels
from infcl_gen.verification.verify import verify_package
from tests.tiers import combined, nightly

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    problem = make_problem(loss="clip", batch_size=130, dim=16, dtype="fp32", target="cpu")
    return infcl_gen.generate(problem, tmp_path_factory.mktemp("packages") / "clip")


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "package"))


def resealed(folder: Path) -> None:
    """Give an edited package a manifest and digest that fit it again."""
    texts = {
        path: content.decode()
        for path, content in ((p, (folder / p).read_bytes()) for p in read_names(folder))
        if path != "manifest.json"
    }
    old = json.loads((folder / "manifest.json").read_text())["digest"]
    texts["spec.py"] = texts["spec.py"].replace(old, content_digest(texts))
    for path, text in {**texts, "manifest.json": manifest_text(texts)}.items():
        (folder / path).write_text(text)


def read_names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def test_a_good_package_passes_on_one_device_and_on_a_ring(good: Path) -> None:
    begun = list[tuple[str, int, int]]()
    rows = verify_package(good, ranks=2, examples=4, progress=lambda *step: begun.append(step))
    assert all(row["passed"] for row in rows), rows
    names = ("numerics of 4 inputs, cpu", "memory at the planned size, cpu", "a ring of 2 with 4 inputs, cpu")
    assert begun == [(name, done, 3) for done, name in enumerate(names)]
    checks = [row["check"] for row in rows]
    assert checks[:2] == ["files", "re-render"] and "memory" in checks and checks[-1] == "ring of 2"
    assert {f"numerics {name}" for name in ("loss", "dq", "dk", "dscale", "dbias")} <= set(checks)
    assert json.loads(json.dumps(rows)) == rows


def test_examples_are_shared_out_and_none_is_lost(good: Path) -> None:
    """Three processes judge what one does."""
    alone, shared = (verify.run("numerics", good, "cpu", 7, processes) for processes in (1, 3))
    assert shared == alone
    assert all(row["passed"] and row["detail"].startswith("7 inputs on cpu, ") for row in alone)


def test_labels_of_more_queries_than_keys(tmp_path: Path) -> None:
    problem = make_problem(loss="infonce", batch_size=130, keys=20, dim=16, dtype="fp32", target="cpu")
    rows = verify_package(infcl_gen.generate(problem, tmp_path / "infonce"), examples=2)
    assert all(row["passed"] for row in rows), rows


def test_an_edited_package_fails_and_is_not_run(copy: Path) -> None:
    with (copy / "__init__.py").open("a") as file:
        file.write("\nopen('was_run', 'w')\n")
    rows = verify_package(copy)
    assert [(row["check"], row["passed"]) for row in rows] == [("files", False)]
    resealed(copy)
    read_package(copy)
    rows = verify_package(copy)
    assert [(row["check"], row["passed"]) for row in rows] == [("files", True), ("re-render", False)]
    assert "__init__.py" in rows[-1]["detail"]
    assert not Path("was_run").exists()


def test_the_code_of_an_edited_package_is_checked_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels as they are edited, each row marked; the files fail all the same."""
    quick = ["loss_terms", "total_loss", "finish"]  # of 15, which compile in 10 s
    monkeypatch.setattr(Kernels, "names", lambda *_: quick)
    folder = infcl_gen.generate(output=tmp_path / "p", batch_size=1024, dim=64, device_profile="a100")
    (folder / "loss.py").write_text((folder / "loss.py").read_text() + "# Edited.\n")
    rows = verify_package(folder, aot=["sm_80"])
    assert [(row["check"], row["passed"]) for row in rows] == [("files", False), ("aot", False)]
    assert "--edited compiles them all the same" in rows[-1]["detail"]
    kernels = folder / "kernels.py"
    kernels.write_text(kernels.read_text().replace("def loss_terms(", "def loss_terms(misspelt, ", 1))
    files, numerics, *compiled = verify_package(folder, aot=["sm_80"], edited=True)
    assert not files["passed"] and "kernels.py, loss.py was edited" in files["detail"] and "edited" not in files
    assert not numerics["passed"] and "what numbers are compared with" in numerics["detail"]
    assert all(row["edited"] for row in (numerics, *compiled)) and len(compiled) == len(quick)
    assert [row["check"] for row in compiled if not row["passed"]] == ["aot sm_80 loss_terms"]
    assert "misspelt" in {row["check"]: row["detail"] for row in compiled}["aot sm_80 loss_terms"]


def test_the_numbers_of_edited_code_are_judged(copy: Path) -> None:
    schedule = copy / "schedule.py"
    for edit, passed in (("# Edited.\n", True), ("formulas.KEY_SHARE *= 1.02\n", False)):
        schedule.write_text(schedule.read_text() + edit)
        files, *rest = verify_package(copy, examples=4, edited=True)
        assert not files["passed"] and all(row["edited"] for row in rest)
        assert {row["check"]: row["passed"] for row in rest}["numerics dk"] == passed, rest


def test_a_loss_that_is_seldom_finite_fails(tmp_path: Path) -> None:
    """Planted: the logarithm of a similarity, which half of all have none of; 14 inputs were judged good."""
    x = scale * z
    spec = LossSpec("of_logarithms", mean_over_queries(logsumexp_over_keys(x) - log(positive(z))), positives="label")
    package = infcl_gen.generate(loss=spec, batch_size=64, dim=16, dtype="fp32", target="cpu", output=tmp_path / "loss")
    row = next(row for row in verify_package(package) if row["check"] == "numerics loss")
    assert not row["passed"] and row["detail"].endswith("or too large: its formula leaves the range"), row


def test_an_input_has_tiles_that_are_computed_again(tmp_path: Path) -> None:
    """Planted: tiles of a wide range are used as they are."""
    settings = {"strategy": "panel"}
    folder = infcl_gen.generate(
        output=tmp_path / "p", loss="clip", batch_size=512, dim=16, dtype="bf16", device_profile="h100", set=settings
    )
    kernels = folder / "kernels.py"
    kernels.write_text(kernels.read_text().replace("tl.min(lowest) > SPREAD", "tl.min(lowest) > 1e30"))
    passed = {row["check"]: row["passed"] for row in verify_package(folder, examples=3, edited=True)}
    assert not passed["numerics dq"] and not passed["numerics dk"] and passed["numerics loss"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "add", "spec"])
def test_a_damaged_package_fails(copy: Path, damage: str) -> None:
    if damage == "truncate":
        (copy / "loss.py").write_bytes((copy / "loss.py").read_bytes()[:-20])
    elif damage == "remove":
        (copy / "schedule.py").unlink()
    elif damage == "add":
        (copy / "extra.py").write_text("")
    else:
        (copy / "spec.py").write_text("SPEC = __import__('os').environ\n")
    (row,) = verify_package(copy)
    assert not row["passed"] and "\n" not in row["detail"]


def test_no_package_is_an_input_error(tmp_path: Path, good: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing", good / "spec.py"):
        with pytest.raises(InputError):
            verify_package(folder)
    for ranks in (0, -1, 1000):
        with pytest.raises(InputError, match="--ranks"):
            verify_package(good, ranks=ranks)


PLANTED = {  # edits of a good package's text, each a bug that a peer has had, and what must notice it
    "a positive of too little weight": ("loss.py", "POSITIVE_REST = 0.0", "POSITIVE_REST = 0.02", "numerics dq"),
    "a wrong share of the keys": ("loss.py", "KEY_SHARE = 0.5", "KEY_SHARE = 0.51", "numerics dk"),
    "a scale applied twice": (
        "loss.py",
        "def dscale_factor(scale: Tensor, bias: Tensor) -> Tensor | float:",
        "def dscale_factor(scale, bias):\n    return scale\n\n\ndef unused(scale, bias):",
        "numerics dscale",
    ),
    "panels of keys after the first without negatives": (
        "schedule.py",
        "panels.add_product(dq[i : i + PANEL_ROWS], g, k, fresh_dq and j == 0)",
        "panels.add_product(dq[i : i + PANEL_ROWS], g * (j == 0), k, fresh_dq and j == 0)",
        "numerics dq",
    ),
    "the gradient of the loss left out": (
        "schedule.py",
        "acc.mul_(upstream * weight * formulas",
        "acc.mul_(weight * formulas",
        "numerics dk",
    ),
    "sums that change from call to call": (
        "schedule.py",
        "    acc.mul_(upstream",
        "    acc += 1e-9 * torch.rand(())\n    acc.mul_(upstream",
        "repeats",
    ),
    "NaN replaced by zeros": (
        "schedule.py",
        "    if out is not acc:",
        "    acc.nan_to_num_()\n    if out is not acc:",
        "NaN",
    ),
    "a crash": ("schedule.py", "import torch\n", "import torch\n\nimport os; os.abort()\n", "numerics"),
    "an exception": ("schedule.py", "import torch\n", "import torch\n\nraise RuntimeError('planted')\n", "numerics"),
}


PLANTED_OF_CI = [  # one for each check, and one for a second panel
    "NaN replaced by zeros", "a crash", "a wrong share of the keys", "panels of keys after the first without negatives",
    "sums that change from call to call",
]  # fmt: skip


@pytest.mark.parametrize(("bug", "processes"), combined(nightly(sorted(PLANTED), PLANTED_OF_CI), [1, 3]))
def test_planted_bugs_are_found(copy: Path, bug: str, processes: int) -> None:
    path, old, new, check = PLANTED[bug]
    text = (copy / path).read_text()
    assert old in text
    (copy / path).write_text(text.replace(old, new, 1))
    resealed(copy)
    rows = verify.run("numerics", copy, "cpu", 7, processes)
    assert check in [row["check"] for row in rows if not row["passed"]]
    assert all("\n" not in row["detail"] for row in rows)


@pytest.mark.parametrize(
    ("flags", "edit", "quantity"),
    [
        ({}, None, ""),
        ({"dtype": "bf16"}, None, ""),
        ({"loss": "infonce", "keys": 700, "frozen": "key"}, None, ""),
        ({"loss": "ntxent"}, None, ""),
        ({"loss": "rince", "dtype": "fp64"}, None, ""),
        ({}, "g[:, max(0, 650 - j) :] = 0.0", "dq"),
        ({"dtype": "bf16"}, "g[:, max(0, 650 - j) :] = 0.0", "dk"),
        ({"dtype": "bf16"}, "g[max(0, 699 - i) :] *= 0.9", "dq"),  # of one row
    ],
)
def test_numbers_are_compared_at_the_planned_size(
    flags: dict[str, Any], edit: str | None, quantity: str, tmp_path: Path
) -> None:
    """Of more rows than other inputs have on a CPU. Planted: what is wrong beyond those alone."""
    folder = infcl_gen.generate(**{"batch_size": 700, "dim": 16, "dtype": "fp32", "target": "cpu"} | flags,
                                output=tmp_path / "p")  # fmt: skip
    if edit is not None:
        place, schedule = "            panels.add_product(dq[i", folder / "schedule.py"
        assert schedule.read_text().count(place) == 1
        schedule.write_text(schedule.read_text().replace(place, f"            {edit}\n{place}"))
        resealed(folder)
        assert all(row["passed"] for row in verify.run("numerics", folder, "cpu", 7))
    memory, numbers = verify.run("memory", folder, "cpu")
    assert memory["check"] == "memory" and numbers["check"] == "numerics at the planned size"
    assert numbers["passed"] == (edit is None), numbers
    assert (f"{quantity}: error" if edit else "largest error 0.") in numbers["detail"]


@pytest.mark.parametrize(
    ("flags", "place", "old", "new"),
    [
        ({"target": "cpu"}, "cpu", "fresh_dk and i == 0", "fresh_dk"),
        ({"target": "cuda", "device_profile": "h100"}, "interpreter", "fresh_dk and row0 == 0", "fresh_dk"),
    ],
)
def test_a_rank_of_a_ring_meets_several_panels(
    flags: dict[str, Any], place: str, old: str, new: str, tmp_path: Path
) -> None:
    """Planted: what is wrong from a rank's second panel on, which one process does not run."""
    folder = infcl_gen.generate(output=tmp_path / "p", loss="clip", batch_size=200, dim=16, dtype="fp32", **flags)
    assert all(row["passed"] for row in verify.run("ring", folder, place, 2, 2))
    schedule = folder / "schedule.py"
    assert schedule.read_text().count(old) == 1
    schedule.write_text(schedule.read_text().replace(old, new))
    resealed(folder)
    (row,) = verify.run("ring", folder, place, 2, 2)
    assert not row["passed"] and ": dk: error" in row["detail"], row


def test_numbers_of_a_large_planned_size_are_not_compared(tmp_path: Path) -> None:
    folder = infcl_gen.generate(output=tmp_path / "p", batch_size="8k", dim=16, dtype="fp32", target="cpu")
    assert [row["check"] for row in verify.run("memory", folder, "cpu")] == ["memory"]


@pytest.mark.parametrize("how", ["hang", "die"])
def test_a_ring_that_hangs_or_dies_is_ended(copy: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act = "time.sleep(1000)" if how == "hang" else "os._exit(3)"
    engine = copy / "_runtime" / "engine.py"
    text = engine.read_text()
    head = "    group = find_group(call.options.group_name)\n"
    assert 0 < text.find(head) < text.find("def backward("), "the forward of a ring"
    engine.write_text(
        text.replace(
            head, f"{head}    import os, time\n    if group is not None and group.rank == 1:\n        {act}\n", 1
        )
    )
    resealed(copy)
    started = time.monotonic()
    limit_s = 6.0 if how == "hang" else 200.0
    monkeypatch.setattr(verify, "TIMEOUT_S", limit_s)
    (row,) = verify.run("ring", copy, "cpu", 1, 2)
    assert time.monotonic() - started < limit_s + 10
    assert not row["passed"]
    assert ("not finished after 6 s" if how == "hang" else "rank 1 of 2: exit code 3") in row["detail"]


@pytest.mark.parametrize(
    ("numpy", "triton", "says"),
    [
        ("2.3.5", "3.6.0", None),
        ("2.4.0", "3.7.1", None),
        ("3.0.1", "3.6.0", "install 'numpy<2.4', or Triton 3.7"),
        ("2.4.0rc1", "3.6.0+git", "NumPy 2.4.0rc1"),
        (None, "3.7.1", "install numpy"),
    ],
)
def test_an_interpreter_that_cannot_run_is_named(
    monkeypatch: pytest.MonkeyPatch, numpy: str | None, triton: str, says: str | None
) -> None:
    found = {"triton": triton} | ({} if numpy is None else {"numpy": numpy})
    monkeypatch.setattr(version, "installed", lambda *names: {name: found[name] for name in names if name in found})
    spec = {"problem": {"target": "cuda"}, "plan": {"strategy": "panel"}}
    assert verify._place({**spec, "plan": {"strategy": "torch"}}, 1) == "cpu"
    interpreter = {row.subject: row for row in doctor.examine().findings}["interpreter"]
    if says is None:
        assert verify._place(spec, 2) == "interpreter" and interpreter.state == "ok"
        return
    with pytest.raises(ToolchainError, match="without 2 GPUs kernels are interpreted") as error:
        verify._place(spec, 2)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert interpreter.state == "missing" and str(error.value).endswith(interpreter.advice)
