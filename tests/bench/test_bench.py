"""`infcl-gen bench` on the CPU: rows, turns, contestants that misbehave, files, and the command end to end."""

import functools
import importlib.util
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.bench import measure, peers, timing
from infcl_gen.bench.contest import Contest, Limits
from infcl_gen.bench.measure import measure_point
from infcl_gen.bench.peers import PEERS, Peer, chosen_peers
from infcl_gen.bench.point import Inputs, LossFunction, Point, bare_products, point_of, training_step
from infcl_gen.bench.results import RESULTS, identity, table
from infcl_gen.emission import import_package, read_package
from infcl_gen.errors import InputError, ToolchainError
from infcl_gen.losses import BUILTIN_LOSSES, spec_as_dict
from infcl_gen.processes import Worker
from infcl_gen.verification.memory import PeakMeter
from tests.bench.libraries import write_libraries
from tests.bench.rows import assert_is_row, measure_package
from tests.tiers import LONG

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL: dict[str, Any] = {"batch_size": 96, "dim": 16, "dtype": "fp64", "target": "cpu"}
Rows = dict[str, dict[str, Any]]
CLIP = spec_as_dict(BUILTIN_LOSSES["clip"])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return infcl_gen.generate(output=tmp_path_factory.mktemp("bench") / "small", **SMALL)


def measured(package: Path, *names: str, **options: Any) -> tuple[Rows, list[str | None]]:
    """Rows by name (the package's is "infcl"), and whose turn it was, in order."""
    rows: Rows = {}
    turns: list[str | None] = []
    point = point_of([read_package(package)], peers=names, **options)
    for name, row in measure_point(point):
        if row is None:
            turns.append(name)
        else:
            rows[row["impl"]] = row
    return rows, ["infcl" if name in point.packages else name for name in turns]


def enter(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Inputs, torch.Tensor], torch.Tensor]) -> None:
    """A contestant that computes the right loss and then changes it."""

    def prepare(inputs: Inputs) -> LossFunction:
        right = PEERS["torch"].prepare(inputs)
        return lambda: change(inputs, right())

    monkeypatch.setitem(PEERS, name, Peer(name, prepare))


PLAIN = (
    "torch", "torch-autocast", "torch-checkpoint", "torch-linear-cross-entropy", "torch-simclr", "torch-supcon",
    "torch-four-blocks",
)  # fmt: skip
LIBRARIES = (
    "pytorch-metric-learning",
    "pytorch-metric-learning-supcon",
    "inf_cl",
    "cut-cross-entropy",
    "cut-cross-entropy-exact",
    "liger-kernel",
    "liger-kernel-fp32-sums",
    "liger-kernel-cute",
    "sentence-transformers",
    "quack",
    "memeff",
    "open_clip",
    "open_clip-siglip",
    "siglip-kernel",
    "siglip-kernel-smallest",
    "siglip-kernel-plus",
)
WITHOUT_SCALE = ("memeff", "sentence-transformers", "pytorch-metric-learning", "pytorch-metric-learning-supcon")
COMPUTED_BY = {
    "clip": 12,
    "infonce": 12,
    "siglip": 3,
    "siglip_multi": 1,
    "ntxent": 2,
    "four_block": 2,
    "supcon_out": 2,
    "infonce_out": 1,
}  # peers, where torch has its own


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins instead of whatever is installed here."""
    folder = write_libraries(tmp_path / "libraries")
    names = {peer.module.partition(".")[0] for peer in PEERS.values()} - {"torch"}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in names:
            del sys.modules[name]


@pytest.mark.parametrize(
    "loss",
    ["clip", "infonce", "infonce with fewer keys", "siglip", "siglip_multi", "siglip_multi with fewer keys", "ntxent",
     "four_block", "supcon_out", "infonce_out"],
)  # fmt: skip
def test_every_peer_computes_the_package_s_loss(loss: str, libraries: Path, tmp_path: Path) -> None:
    """In fp64, so that halves, directions, labels and the scale's gradient have nowhere to hide."""
    name, _, fewer = loss.partition(" ")
    keys = {"keys": 40} if fewer else {}
    package = infcl_gen.generate(output=tmp_path / "p", **SMALL, loss=name, **keys)
    spec = read_package(package).spec["loss"]
    names = [n for n in (*PLAIN, *LIBRARIES) if PEERS[n].absent(spec) is None]
    rows, _ = measured(package, *names, scale=7.5, rounds=1, errors=True)
    assert set(rows) == {"infcl", *names} and len(names) >= COMPUTED_BY[name]
    for who, row in rows.items():
        assert_is_row(row)
        if fewer and who == "sentence-transformers":
            assert "N = 40 keys for B = 96 queries" in row["error"]
            continue
        assert row["error"] is None, row
        assert row["keys"] == (40 if fewer else 96)
        unknown = who in WITHOUT_SCALE and row["err"]["dscale"] is None
        found = {key: value for key, value in row["err"].items() if not (unknown and key == "dscale")}
        assert set(row["err"]) == {"loss", "dq", "dk", "dscale"}
        if name in ("ntxent", "four_block", "supcon_out"):
            assert found.pop("dk") is None  # a call has one side
        assert all(value is not None and value < 1e-10 for value in found.values()), row
    assert all(rows[who]["err"]["dscale"] is None for who in WITHOUT_SCALE if who in rows and rows[who]["err"])


def test_a_row_of_a_package(package: Path) -> None:
    row = measure_package(package, repeats=4)
    assert_is_row(row)
    assert (row["impl"], row["package"], row["strategy"], row["repeats"]) == ("infcl", "small", "torch", 4)
    assert row["err"] is None and row["floor_ms"] > 0 and row["predicted_ms"] > 0
    assert row["peak_bytes"] <= row["predicted_peak_bytes"] <= row["budget_bytes"]
    smaller = measure_package(package, batch=64, repeats=1, errors=True)
    assert smaller["batch"] == smaller["keys"] == 64 and smaller["std_ms"] == 0.0
    assert smaller["predicted_ms"] is None  # the plan is for another batch
    assert max(smaller["err"].values()) < 1e-10


@pytest.mark.usefixtures("forked")
def test_a_gpu_s_package_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = infcl_gen.generate(output=tmp_path / "gpu", batch_size=256, dim=64, device_profile="h200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="torch sees none"):
        measure_package(gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the worker
    with Contest([]) as contest, pytest.raises(ToolchainError, match=r"^measuring needs the GPU"):
        contest.rows(contest.point([gpu]))


def test_a_key_for_each_query_stays_so_in_a_smaller_batch(tmp_path: Path) -> None:
    """Also where the flags have named the keys, as the command for another size does."""
    package = infcl_gen.generate(output=tmp_path / "named", **{**SMALL, "keys": SMALL["batch_size"]})
    row = measure_package(package, batch=40, repeats=1)
    assert (row["batch"], row["keys"], row["error"]) == (40, 40, None)


def test_everybody_runs_once_a_round_in_an_order_that_changes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("a", "b"):
        enter(monkeypatch, name, lambda inputs, loss, name=name: calls.append(name) or loss)
    rows, turns = measured(package, "a", "b", rounds=4)
    first, rounds = turns[:4], turns[4:]
    assert first == [None, "infcl", "a", "b"]
    everybody = ["infcl", "a", "b", "infcl"]  # the last: the products of its plan
    orders = [rounds[start : start + 4] for start in range(0, 16, 4)]
    assert len(rounds) == 16 and all(sorted(order) == sorted(everybody) for order in orders)
    assert len(set(map(tuple, orders))) > 1
    assert calls[:4] == ["a", "a", "b", "b"]  # to compile, then for the peak
    first_round, later = orders[0], rounds[4:]
    twice = [name for name in first_round for _ in range(2)]  # once before the run that is timed
    assert calls[4:] == [name for name in (*twice, *later) if name != "infcl"]
    assert {row["repeats"] for row in rows.values()} == {4}


@pytest.mark.parametrize(
    ("busy_host_ms", "leads"), [(1.0, [3.5]), (5.0, [3.5, 7.0]), (1e9, [3.5, 7.0, 14.0, 28.0, 40.0])]
)
def test_a_host_that_is_late_is_given_more_time(busy_host_ms: float, leads: list[float]) -> None:
    """Its 2 ms on an idle device ask for 3.5 ms of other work; behind that it may take longer."""
    given: list[float] = []

    class Late(timing.Timer):
        def __init__(self) -> None:
            self.device = "cuda"

        def idle_ms(self, run: Callable[[], object]) -> tuple[float, float]:
            return 6.0, 2.0

        def queued_ms(self, run: Callable[[], object], lead_ms: float) -> tuple[float, bool]:
            given.append(lead_ms)
            return 5.0 + max(0.0, busy_host_ms - lead_ms), lead_ms < busy_host_ms

    times = Late().times(lambda: None)
    assert given == leads and times.idle_ms == 6.0
    assert (times.queued_ms == 5.0) == (busy_host_ms <= timing.LONGEST_LEAD_MS)


def test_memory_includes_the_gradients_that_are_returned(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Inputs] = []

    def prepare(inputs: Inputs) -> LossFunction:
        seen.append(inputs)
        return lambda: inputs.q.sum() + inputs.k.sum() + inputs.scale

    def start(meter: PeakMeter, enter: Callable[..., PeakMeter] = PeakMeter.__enter__) -> PeakMeter:
        # On a GPU an earlier gradient that is freed inside would hide as many bytes of the new one.
        assert all(x.grad is None for inputs in seen for x in (inputs.q, inputs.k, inputs.scale))
        return enter(meter)

    monkeypatch.setattr(PeakMeter, "__enter__", start)
    monkeypatch.setitem(PEERS, "sum", Peer("sum", prepare))
    rows, _ = measured(package, "sum", "torch", rounds=1)
    assert rows["sum"]["error"] is None and len(seen) == 1
    gradients = 2 * 96 * 16 * 8
    assert gradients <= rows["sum"]["peak_bytes"] < gradients + 4096
    assert rows["torch"]["peak_bytes"] >= gradients + 2 * 96 * 96 * 8


def test_who_takes_more_than_its_share_of_the_time_stops_early(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, "slow", lambda inputs, loss: time.sleep(0.2) or loss)
    rows, _ = measured(package, "slow", rounds=6, seconds=1.0)
    assert rows["slow"]["repeats"] == measure.LEAST_ROUNDS and rows["infcl"]["repeats"] == 6
    assert rows["slow"]["median_ms"] > 200 > rows["infcl"]["median_ms"]


def no_memory(inputs: Inputs, loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.empty(1 << 55).sum()


def fails_later(calls: list[int]) -> Callable[[Inputs, torch.Tensor], torch.Tensor]:
    def change(inputs: Inputs, loss: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("broken\nat last")
        return loss

    return change


PLANTED: dict[str, tuple[Callable[[Inputs, torch.Tensor], torch.Tensor], str]] = {
    "no memory": (no_memory, "out of memory"),
    "nan": (lambda inputs, loss: loss * math.nan, "not finite: loss, dq, dk, dscale"),
    "infinite": (lambda inputs, loss: loss + math.inf, "not finite: loss"),
    "wrong loss": (lambda inputs, loss: loss + (loss / 3).detach(), "wrong: loss is off by 0.33"),
    "wrong gradient": (lambda inputs, loss: 3 * loss - 2 * loss.detach(), "wrong: dq is off by 2"),
    "half a gradient": (lambda inputs, loss: loss * 0 + inputs.q.sum(), "wrong: loss"),
    "no gradient": (lambda inputs, loss: inputs.q.sum(), "no result: dk"),
    "broken": (fails_later([]), "RuntimeError: broken at last"),
    "silent": (lambda inputs, loss: [][0], "IndexError"),
}


def test_contestants_that_fail_are_reported_and_change_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (change, _) in PLANTED.items():
        enter(monkeypatch, name, change)
    rows, _ = measured(package, *PLANTED, "torch", rounds=4, errors=True)
    assert set(rows) == {"infcl", *PLANTED, "torch"}
    for name, row in rows.items():
        assert_is_row(row)
        if name in PLANTED:
            assert row["error"].startswith(PLANTED[name][1]), row
        else:
            assert row["error"] is None and row["repeats"] == 4 and max(row["err"].values()) < 1e-10
    assert rows["nan"]["err"] == dict.fromkeys(RESULTS)
    assert abs(rows["wrong gradient"]["err"]["dq"] - 2) < 1e-6
    shown = {line[3]: line for line in table(list(rows.values()))[1]}
    assert shown["no memory"][-1] == "out of memory" and shown["infcl small"][8] == "1.00"
    alone, _ = measured(package, "nan", rounds=1)  # without fp64 to compare with, too
    assert alone["nan"]["error"] == PLANTED["nan"][1] and alone["nan"]["err"] is None


@pytest.mark.usefixtures("forked")
def test_a_worker_that_starts_slowly_is_waited_for(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is to blame before it is somebody's turn; longer than START_S it is not."""
    folder = write_libraries(tmp_path / "libraries", {})
    (folder / "sitecustomize.py").write_text("import time\ntime.sleep(5)\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    limits = Limits(rounds=1, silent_s=4)  # longer than a turn of plain torch, shorter than the start
    with Contest(chosen_peers(["torch"]), limits=limits) as contest:
        rows = contest.rows(contest.point([package], 64))
    assert [row["impl"] for row in rows] == ["infcl", "torch"]
    monkeypatch.setattr("infcl_gen.bench.contest.START_S", 4.0)
    refused = pytest.raises(ToolchainError, match="nothing can be measured: no result within 4 s")
    with Contest(chosen_peers(["torch"]), limits=limits) as contest, refused:
        contest.rows(contest.point([package], 64))


def hurried(answer: Callable[..., Any], mark: Path) -> Callable[..., Any]:
    """`Worker.answer` that waits for its timeout, but only a second of it after the file is there."""

    def waiting(worker: Worker, timeout_s: float) -> dict[str, Any] | None:
        found, deadline = None, time.monotonic() + timeout_s
        while found is None and time.monotonic() < deadline:
            if mark.exists():
                mark.unlink()  # those that are measured afterwards have their time
                return answer(worker, 1.0)
            found = answer(worker, 0.2)
        return found

    return waiting


@pytest.mark.usefixtures("forked")
def test_a_crash_and_a_hang_cost_only_whoever_did_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the real worker process: libraries that crash, hang and run out of memory, and others that work."""
    does = {
        "inf_cl": "os.kill(os.getpid(), signal.SIGSEGV)",
        "memeff": f"open({str(tmp_path / 'hangs')!r}, 'w'); time.sleep(1e6)",
        "cut_cross_entropy": "given == (None,) and torch.empty(1 << 55)",
    }
    folder = write_libraries(tmp_path / "libraries", does)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a lock of its own: nobody waits for the hang
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))  # as for whoever asks: this process says who is absent
    monkeypatch.setattr(Worker, "answer", hurried(Worker.answer, tmp_path / "hangs"))
    names = ["inf_cl", "memeff", "cut-cross-entropy", "cut-cross-entropy-exact", "torch"]
    # Amid the whole suite on two cores a turn of less than a second has taken 30.
    with Contest(chosen_peers(names), limits=Limits(rounds=2, silent_s=90)) as contest:
        rows = {row["impl"]: row for row in contest.rows(contest.point([package], 64))}
    assert list(rows) == ["infcl", *names] and not contest.absent
    expected = {
        "inf_cl": "killed by signal 11",
        "memeff": "no result within 90 s",
        "cut-cross-entropy-exact": "out of memory",
    }
    for name, row in rows.items():
        assert_is_row(row)
        assert (row["error"] or "").startswith(expected.get(name, "")) and bool(row["error"]) == (name in expected)
        assert row["batch"] == 64
    worked = [row for row in rows.values() if not row["error"]]
    assert all(row["repeats"] == 2 and max(row["err"].values()) < 1e-10 for row in worked)


def test_a_worker_that_cannot_start_says_so(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch is not what it was')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Contest(chosen_peers("torch")) as contest, pytest.raises(ToolchainError, match="not what it was"):
        contest.rows(contest.point([package]))


@pytest.mark.usefixtures("forked")
def test_packages_that_do_not_belong_together(package: Path, tmp_path: Path) -> None:
    def made(name: str, **flags: Any) -> Path:
        return infcl_gen.generate(output=tmp_path / name, **{**SMALL, **flags})

    for name, flags in {
        "dim": {"dim": 24},
        "dtype": {"dtype": "fp32"},
        "loss": {"loss": "infonce"},
        "ring": {"devices": 2},
    }.items():
        with pytest.raises(InputError, match=r"^--package: .*"), Contest([]) as contest:
            contest.point([package, made(name, **flags)])
    with pytest.raises(InputError, match=r"^--batches: 97 is more than the 96"), Contest([]) as contest:
        contest.point([package], 97)
    larger = made("larger", batch_size=128)
    rows: list[dict[str, Any]] = []
    with Contest([], limits=Limits(rounds=1)) as contest:
        for batch in (64, None):
            rows += contest.rows(contest.point([package, larger], batch))
    assert [(row["package"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (64, 96) for name in ("small", "larger")
    ]


def test_a_loss_of_ones_own_has_no_peers(tmp_path: Path) -> None:
    """Also when it is called clip: what peers compute is clip's formula."""
    (tmp_path / "mine.py").write_text(
        "from infcl_gen.losses.language import *\nfrom infcl_gen.losses import language as l\n"
        "x = l.scale * l.z\n"
        "clip = l.LossSpec('clip', 3 * l.mean_over_queries(l.logsumexp_over_keys(x) - l.positive(x)),"
        " positives='diagonal')\n"
    )
    package = infcl_gen.generate(output=tmp_path / "p", **SMALL, loss=f"{tmp_path / 'mine.py'}:clip")
    with Contest(chosen_peers("torch,memeff")) as contest:
        contest.point([package])
    assert (
        set(contest.absent) == {"torch", "memeff"} and contest.absent["memeff"] == "does not compute a loss of your own"
    )


def test_who_computes_another_loss_is_absent_there_only(
    package: Path, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device, and on several: what computes clip is no peer of infonce."""
    infonce = infcl_gen.generate(output=tmp_path / "p", **SMALL, loss="infonce")
    with Contest(chosen_peers("memeff,torch")) as contest:
        assert contest.point([infonce]).peers == ("torch",)
        assert contest.absent == {"memeff": "does not compute infonce"}
        assert contest.point([package]).peers == ("memeff", "torch")
    monkeypatch.setattr(
        "infcl_gen.bench.contest.run_ranks", lambda task, job, *_: [[p["peers"] for p in job["points"]]]
    )
    made = {loss: tmp_path / loss for loss in ("clip", "infonce", "siglip")}
    for loss, folder in made.items():
        infcl_gen.generate(output=folder, **SMALL, loss=loss, devices=2)
    with Contest(chosen_peers(None, ranks=2)) as contest:
        assert contest.ring([made["infonce"]], 2) == [("inf_cl",)] and contest.absent["open_clip"]
        assert contest.ring([made["clip"]] * 2, 2) == [("open_clip", "inf_cl"), ()]
        ways = *(f"open_clip-siglip-{way}" for way in ("bidir", "shift", "reduce", "gather")), "siglip-kernel-ring"
        assert contest.ring([made["siglip"]], 2) == [(*ways, "siglip-kernel-gather")]


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "memeff" else real(name, *a))
    assert PEERS["memeff"].absent(CLIP) == "memeff is not installed"
    assert PEERS["torch"].absent(CLIP) is None
    newer = Peer("newer", PEERS["torch"].prepare, module="torch.nn.functional", attribute="no_such_loss")
    assert newer.absent(CLIP) == f"torch {torch.__version__}: it has no torch.nn.functional.no_such_loss"
    broken = Peer("broken", PEERS["torch"].prepare, module="torch.no_such_module", attribute="loss")
    assert broken.absent(CLIP) == f"torch {torch.__version__}: No module named 'torch.no_such_module'"


def test_names_of_peers() -> None:
    alone = tuple(peer for peer in PEERS.values() if peer.prepare is not None)
    assert chosen_peers(None) == chosen_peers("all") == alone
    assert {peer.name for peer in PEERS.values() if peer not in alone} == {
        *(f"open_clip-siglip-{way}" for way in ("bidir", "shift", "reduce", "gather")),
        *(f"siglip-kernel-{way}" for way in ("ring", "gather")),
    }
    assert chosen_peers("none") == ()
    assert [peer.name for peer in chosen_peers("memeff, torch,memeff")] == ["memeff", "torch"]
    for name, peer in PEERS.items():
        prepare = peer.prepare or peer.on_ranks
        assert peer.name == name and getattr(prepare, "func", prepare).__doc__
    for text, part in (
        ("tortch", "did you mean 'torch'"),
        ("", "valid: torch"),
        ("siglip-kernel-ring", "runs on several devices"),
    ):
        with pytest.raises(InputError, match=f"^--against: .*{part}"):
            chosen_peers(text)


@pytest.mark.usefixtures("forked")
def test_the_command_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    words = ["bench", "--batches", "64,96", "--dims", "16", "--dtype", "fp32", "--target", "cpu", "--scale", "5"]
    words += ["--against", "torch,memeff", "--repeats", "2", "--errors", "64", "-o", str(output)]
    done = CliRunner().invoke(cli.main, [*words, "--json", "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert json.loads(output.read_text()) == result
    later = ["bench", "--results", str(output), "--json", "--html", str(tmp_path / "later.html")]
    assert json.loads(CliRunner().invoke(cli.main, later).stdout) == result
    assert (tmp_path / "later.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert result["schema_version"] == 1 and result["command"].startswith("infcl-gen bench --dtype fp32")
    installed = importlib.util.find_spec("memeff") is not None
    names = ["infcl", "torch", *(["memeff"] if installed else [])]
    assert installed or result["absent"] == {"memeff": "memeff is not installed"}
    assert [(row["impl"], row["batch"]) for row in result["rows"]] == [(n, b) for b in (64, 96) for n in names]
    for row in result["rows"]:
        assert_is_row(row)
        assert (row["dim"], row["dtype"], row["scale"], row["ranks"]) == (16, "fp32", 5.0, 1)
        if row["impl"] != "memeff":  # which wants a GPU
            assert row["error"] is None and row["repeats"] == 2, row
            assert (row["err"] is None) == (row["batch"] == 96)


@pytest.mark.usefixtures("forked")
def test_the_table_of_given_packages(package: Path, tmp_path: Path) -> None:
    against = "torch-compiled" if LONG else "torch"
    words = ["bench", "--package", str(package), "--against", against, "--repeats", "1"]
    done = CliRunner().invoke(cli.main, [*words, "-o", str(tmp_path / "r.json")])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split()[:6] == ["loss", "B", "D", "who", "median", "ms"]
    assert "infcl small" in lines[1] and lines[2].split()[3] == against
    assert lines[-1] == f"wrote {tmp_path / 'r.json'}"
    peer = json.loads((tmp_path / "r.json").read_text())["rows"][1]
    if shutil.which("g++") or not LONG:
        assert peer["error"] is None and max(peer["err"].values()) < 1e-10
    else:
        assert peer["error"]


def test_the_compiled_peer_computes_the_package_s_loss(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # 2.4 s, in each worker of the suite

    graphs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    rows, _ = measured(package, "torch-compiled", rounds=1, errors=True)
    row = rows["torch-compiled"]
    assert row["error"] is None and max(row["err"].values()) < 1e-10, row
    assert graphs.frame_count


def edit(folder: Path, body: str) -> None:
    with (folder / "__init__.py").open("a") as file:
        file.write(f"_original = contrastive_loss\n\n\ndef contrastive_loss(*args, **options):\n    {body}\n")


def test_an_edited_package_is_timed_and_marked(package: Path, tmp_path: Path) -> None:
    """A file that was added counts as an edit; a wrong result is told; errors are never those of an edited formula."""
    copies = {name: Path(shutil.copytree(package, tmp_path / name)) for name in ("slow", "wrong", "formula")}
    edit(copies["slow"], "import time; time.sleep(0.05); return _original(*args, **options)")
    (copies["slow"] / "notes.txt").write_text("sleeps")
    edit(copies["wrong"], "return 3 * _original(*args, **options)")
    with (copies["formula"] / "loss.py").open("a") as file:
        file.write("\n\ndef gradient_factor(scale, bias):\n    return 3 * scale\n")
    packages = [read_package(folder, edited=True) for folder in (*copies.values(), package)]
    assert [found.edited for found in packages] == [("__init__.py", "notes.txt"), ("__init__.py",), ("loss.py",), ()]
    assert len({found.digest for found in packages}) == 4
    point = point_of(packages, rounds=2, errors=True)
    rows = {Path(name).name: row for name, row in measure_point(point) if row is not None}
    assert {name for name, row in rows.items() if row.get("edited") is True} == set(copies)
    assert "edited" not in rows["small"] and max(rows["small"]["err"].values()) < 1e-10
    assert rows["slow"]["error"] is None and rows["slow"]["median_ms"] > 50 > rows["small"]["median_ms"]
    assert rows["wrong"]["error"].startswith("wrong: loss is off by 2")
    assert rows["formula"]["error"].startswith("wrong: ")
    shown = {line[3] for line in table(list(rows.values()))[1]}
    assert shown == {"infcl small", *(f"infcl {name} (edited)" for name in copies)}
    with pytest.raises(InputError, match="edited"):
        read_package(copies["wrong"])
    (copies["slow"] / "spec.py").write_text("SPEC = {}\n")
    with pytest.raises(InputError, match=r"spec\.py was edited"):
        read_package(copies["slow"], edited=True)


def test_generated_packages_are_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def rows(self: Contest, point: Point) -> list[dict[str, Any]]:
        (package,) = map(Path, point.packages)
        assert read_package(package).spec["problem"]["batch_size"] == point.batch
        folders.append(package)
        return [{**point.row(str(package)), "error": "not measured"}]

    monkeypatch.setattr(Contest, "rows", rows)
    words = "bench --batches 32,64 --dim 16 --dtype fp64 --target cpu --against none --json"
    done = CliRunner().invoke(cli.main, words.split())
    assert done.exit_code == 0, done.output
    assert [(row["batch"], row["package"]) for row in json.loads(done.stdout)["rows"]] == [
        (batch, "generated") for batch in (32, 64)
    ]
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("changes", "keys", "similarities", "others"),
    [
        ({}, 64, 2, 2),
        ({}, 128, 4, 4),
        ({}, 100, 4, 4),
        ({"stash_rows": 64}, 64, 1, 2),
        ({"split": True}, 64, 2, 6),
        ({"known": "before"}, 128, 2, 4),
        ({"known": "row"}, 64, 2, 2),
    ],
)
def test_the_floor_is_the_products_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keys: int, similarities: int, others: int
) -> None:
    counts = {"mm": 0, "addmm": 0}
    for name in counts:
        real = getattr(torch, name)

        def counted(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    plan = {"strategy": "torch", "panel_rows": 64, "panel_keys": 64, "stash_rows": 0, "split": False} | changes
    q, k = (torch.randn(rows, 32) for rows in (64, keys))
    known = plan.pop("known", "all")
    dq, dk = bare_products(plan, q, k, known)()
    assert counts == {"mm": similarities, "addmm": others}
    if keys == 64 and not plan["split"]:
        assert torch.allclose(dq, q @ k.T @ k, rtol=1e-4, atol=1e-3)
        assert torch.allclose(dk, (q @ k.T).T @ q, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("side", "result"), [("query", "dq"), ("key", "dk")])
def test_a_frozen_side_is_frozen_for_everybody(tmp_path: Path, side: str, result: str) -> None:
    """Rows name it, so that they are not compared with others; bare products leave its product out."""
    package = infcl_gen.generate(output=tmp_path / side, frozen=side, **SMALL)
    rows, _ = measured(package, "torch", rounds=1, errors=True)
    for row in rows.values():
        assert row["frozen"] == side and row["error"] is None
        assert [name for name, error in row["err"].items() if error is None] == [result]
    whole = {name: value for name, value in rows["infcl"].items() if name != "frozen"}
    assert identity(rows["infcl"]) == identity(rows["torch"]) != identity(whole)
    plan = read_package(package).spec["plan"]
    dq, dk = bare_products(plan, torch.randn(8, 4), torch.randn(8, 4))()
    assert [bool(x.any()) for x in (dq, dk)] == [side != "query", side != "key"]


def test_forward_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's loss requires gradients, plans predict no time and memory of it, and bare products have z once."""
    package = infcl_gen.generate(output=tmp_path / "alone", **SMALL)
    seen: list[bool] = []

    def watch(inputs: Inputs, loss: torch.Tensor) -> torch.Tensor:
        seen.append(loss.requires_grad)
        return loss

    enter(monkeypatch, "watching", watch)
    rows, _ = measured(package, "watching", rounds=1, errors=True, gradients=False)
    assert set(seen) == {False}
    for row in rows.values():
        assert row["gradients"] is False and row["error"] is None and row["predicted_ms"] is None
        assert [name for name, error in row["err"].items() if error is not None] == ["loss"]
    whole = {name: value for name, value in rows["infcl"].items() if name != "gradients"}
    assert identity(rows["infcl"]) == identity(rows["watching"]) != identity(whole)
    dq, dk = bare_products(read_package(package).spec["plan"], torch.randn(8, 4), torch.randn(8, 4), gradients=False)()
    assert not dq.any() and not dk.any()


def test_fp32_features_under_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets them, products are in bf16, and a package's gradients come back unrounded."""
    package = infcl_gen.generate(output=tmp_path / "bf16", batch_size=96, dim=16, dtype="bf16", target="cpu")
    seen: list[tuple[torch.dtype, ...]] = []

    def watch(inputs: Inputs, loss: torch.Tensor) -> torch.Tensor:
        product = inputs.q @ inputs.k.T
        seen.append((inputs.q.dtype, inputs.dtype, product.dtype))
        return loss

    enter(monkeypatch, "watching", watch)
    rows, _ = measured(package, "watching", rounds=1, errors=True, feature_dtype="fp32")
    assert set(seen) == {(torch.float32, torch.bfloat16, torch.bfloat16)}
    for row in rows.values():
        assert_is_row(row)
        assert (row["dtype"], row["precision"], row["error"]) == ("bf16", "autocast from fp32", None)
        assert row["err"]["dq"] > 1e-4, "products of fp32 numbers"
    q, k = (torch.nn.functional.normalize(torch.randn(96, 16)).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, requires_grad=True)
    step = training_step(import_package(package), q, k, scale, torch.bfloat16)
    for gradient in step()[1:3]:
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())
    # Copies in bf16 and gradients in fp32 are not in the plan.
    assert rows["infcl"]["predicted_peak_bytes"] is None and rows["infcl"]["predicted_ms"] is None
    small = infcl_gen.generate(output=tmp_path / "fp64", **SMALL)
    for folder, given in ((package, "fp16"), (small, "fp32")):
        with pytest.raises(
            InputError, match=rf"^--features: '{given}' is not what the packages take; valid: (bf16|fp64)"
        ):
            point_of([read_package(folder)], feature_dtype=given)


def test_libraries_that_know_nothing_of_autocast_are_given_features_cast(libraries: Path, tmp_path: Path) -> None:
    package = infcl_gen.generate(output=tmp_path / "bf16", batch_size=96, dim=16, dtype="bf16", target="cpu")
    rows, _ = measured(package, "cut-cross-entropy", "memeff", rounds=1, feature_dtype="fp32")
    assert [row["error"] for row in rows.values()] == [None] * 3


def test_rounding_the_features_counts_for_nobody(libraries: Path, tmp_path: Path) -> None:
    """A package's gradients are those of fp32 accumulators; whatever goes through bf16 products is rounded to bf16."""
    package = infcl_gen.generate(output=tmp_path / "bf16", batch_size=128, dim=64, dtype="bf16", target="cpu")
    rows, _ = measured(package, "open_clip", rounds=1, errors=True, feature_dtype="rounded fp32")
    assert rows["infcl"]["err"]["dq"] < 1e-5 and 1e-3 < rows["open_clip"]["err"]["dq"] < 0.1
    assert rows["infcl"]["precision"] == "autocast from rounded fp32"


@pytest.mark.usefixtures("forked")
def test_features_of_another_dtype_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    words = "bench --batch-size 64 --dim 16 --dtype bf16 --features fp32 --target cpu --against none --repeats 1 -o"
    done = CliRunner().invoke(cli.main, [*words.split(), str(output)])
    assert done.exit_code == 0, done.output
    result = json.loads(output.read_text())
    assert [row["precision"] for row in result["rows"]] == ["autocast from fp32"]
    assert "--features fp32" in result["command"]


def test_peers_do_not_hide_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there but cannot be imported is an error of its own, not absent."""
    monkeypatch.setitem(PEERS, "half", Peer("half", peers._inf_cl, module="json", distribution="half"))
    monkeypatch.setitem(sys.modules, "inf_cl", None)
    assert PEERS["half"].absent(CLIP) is None
    inputs = Inputs(torch.ones(2, 16), torch.ones(2, 16), torch.tensor(1.0), torch.arange(2), 2, torch.float32)
    with pytest.raises(ImportError):
        PEERS["half"].prepare(inputs)


@pytest.mark.parametrize("how", ["idle", "queued", "on the CPU"])
def test_every_run_begins_on_a_cold_cache(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush is larger than caches, comes after whatever else, and none of it is timed."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: object) -> float:
            return 1.0

    real = torch.Tensor.zero_

    def flush(self: torch.Tensor) -> torch.Tensor:
        assert self.nbytes >= timing.CPU_FLUSH_BYTES
        done.append("flush")
        return real(self)

    timer = timing.Timer("cpu")
    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("wait"))
    monkeypatch.setattr(time, "perf_counter", lambda: done.append("clock") or 0.0)
    monkeypatch.setattr(timer, "device", "cpu" if how == "on the CPU" else "cuda")
    monkeypatch.setattr(timing.Timer, "_lead", (lambda times: done.append("lead"), 1.0))
    for _ in range(2):
        done.clear()
        timed = ["clock", "run", "clock"]
        if how == "queued":
            timer.queued_ms(lambda: done.append("run"), 1.0)
            assert done == ["lead", "flush", "event", *timed, "event", "wait"]
        else:
            timer.idle_ms(lambda: done.append("run"))
            assert done == ["flush", *(timed if how == "on the CPU" else ["wait", "event", *timed, "event", "wait"])]
    assert timing.FLUSH_BYTES >= 4 * 50 << 20  # the L2 cache of an H200 has 50 MB


@pytest.mark.parametrize("loss", BUILTIN_LOSSES)
def test_every_built_in_loss_is_measured(tmp_path: Path, loss: str) -> None:
    """Also one without keys, and one whose tiles tell apart pairs. Planted: ids of keys that there are not."""
    package = infcl_gen.generate(output=tmp_path / "package", loss=loss, **SMALL)
    rows, _ = measured(package, rounds=2, errors=True)
    assert rows["infcl"]["error"] is None, rows["infcl"]["error"]
    assert rows["infcl"]["err"]["dq"] < 1e-6
