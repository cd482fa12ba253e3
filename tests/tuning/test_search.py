"""Tuning runs on the CPU: end to end, with candidates that misbehave, interrupted, and two at once."""

import dataclasses
import functools
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import infcl_gen
from infcl_gen import cli
from infcl_gen.emission import build, read_package, rerender
from infcl_gen.emission.package import content_digest
from infcl_gen.errors import InputError, ToolchainError, VerificationError
from infcl_gen.inputs.problem import make_problem
from infcl_gen.planning import records
from infcl_gen.planning.records import Candidate, Found, Settings, read_records
from infcl_gen.processes import Worker
from infcl_gen.tuning import search
from infcl_gen.tuning.family import Case, Entry, Family, Limits, Progress, Proposed, fastest, hopeless, proposed
from infcl_gen.tuning.search import tune
from infcl_gen.verification.aot import Kernels, aot_checks
from tests.tiers import LONG
from tests.tuning.program import OTHER, short_run
from tests.tuning.test_records import revise

SMALL: dict[str, Any] = {"batch_size": 256, "dim": 16, "dtype": "fp32", "target": "cpu"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return infcl_gen.generate(output=tmp_path / "package", **SMALL)


@pytest.mark.usefixtures("forked")
def test_two_candidates_end_to_end(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = short_run(package, tmp_path / "records")
    record = outcome.record
    assert record.complete and record.families == ("panel",)
    assert [(c.settings, c.status) for c in record.candidates if c.status != "slower"][:1] == [((), "timed")]
    assert {c.settings for c in record.candidates} == {(), OTHER}
    assert all(len(c.times_ms) == 2 and min(c.times_ms) > 0 for c in record.candidates)
    assert read_records(tmp_path / "records" / "cpu.json") == (record,)
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["cpu.json"]  # no partial file is left
    # What was timed is what is there, and what is generated with this record from now on.
    written = read_package(package)
    assert written.digest == record.digest and rerender(package) == written.files
    assert ["records", "measured"] in list(map(list, written.spec["problem"]["settings"]))
    monkeypatch.setattr(records, "record_folders", lambda: (tmp_path / "records",))
    assert content_digest(build(make_problem(**SMALL))) == record.digest
    # A tuned package can be tuned again: the measured settings are not taken for the user's.
    assert search._case(written.spec).problem.settings.pairs == ()


SLOW = """
import time as _time
_whole = contrastive_loss
def contrastive_loss(*a, **k):
    _time.sleep(0.6)
    return _whole(*a, **k)
"""
AT_SIZE = """
_whole, _grads = contrastive_loss, loss_and_grads
def contrastive_loss(q, *a, **k):
    if len(q) == 256:
        {what}
    return _whole(q, *a, **k)
"""
DENSE = """
def _wrong(q, k, scale=1.0, bias=None, **_):
    import torch
    x = scale * (q @ k.T) + (0.0 if bias is None else bias)
    own = torch.arange(len(q))
    return 0.5 * (torch.nn.functional.cross_entropy(x, own) + torch.nn.functional.cross_entropy(x.T, own))
"""
PLANTED: dict[Settings, tuple[str, str]] = {
    (): (SLOW, "timed|slower"),
    OTHER: ("", "timed"),
    (("panel_rows", "64"),): (AT_SIZE.format(what="import time; time.sleep(1e6)"), "hung"),
    (("panel_rows", "128"),): (
        AT_SIZE.format(what="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        "crashed",
    ),
    (("panel_keys", "64"),): (AT_SIZE.format(what="import torch; torch.empty(1 << 50)"), "out of memory"),
    # The dense loss is the fastest at this size. Off by 0.3 % everywhere; or only at the size that is timed.
    (("panel_keys", "128"),): (DENSE + "def contrastive_loss(*a, **k):\n    return 1.003 * _wrong(*a, **k)\n", "wrong"),
    (("panel_keys", "64"), ("panel_rows", "128")): (
        DENSE + AT_SIZE.format(what="return 1.003 * _wrong(q, *a, **k)"),
        "wrong",
    ),
    (("panel_keys", "128"), ("panel_rows", "64")): ("raise RuntimeError('on import')\n", "crashed"),
    (("panel_rows", "65"),): ("", "illegal"),
}


def plant(settings: Settings, folder: Path) -> None:
    with (folder / "__init__.py").open("a") as file:
        file.write(PLANTED[settings][0])


def edit_candidates(patch: pytest.MonkeyPatch, edit: Callable[[Settings, Path], None], *others: Settings) -> None:
    """These candidates beside the default, each edited after it is written."""
    write = Family._write

    def planted(self: Family, entry: Entry) -> None:
        write(self, entry)
        edit(entry.settings, entry.folder)

    patch.setattr(Family, "_write", planted)
    patch.setattr(search, "proposals", lambda *_: list(others))


@pytest.mark.usefixtures("forked")
def test_candidates_that_misbehave_are_dropped_and_change_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs, one that crashes, one without memory, and wrong ones that would be the fastest."""
    limits = Limits(minutes=5, timed=9, rounds=2, repeats=1, sample_s=10)
    edit_candidates(monkeypatch, plant, *PLANTED)
    outcome = tune(package, tmp_path / "records", limits)
    found = {candidate.settings: candidate for candidate in outcome.record.candidates}
    for settings, (_, status) in PLANTED.items():
        assert found[settings].status in status.split("|"), found[settings]
        assert found[settings].detail or found[settings].status == "timed"
    assert outcome.record.settings == OTHER
    assert rerender(package) == read_package(package).files
    assert read_package(package).digest == outcome.record.digest
    assert processes_below(Path(tempfile.gettempdir())) == []


def test_the_default_wins_ties_and_a_winner_must_beat_the_spread(tmp_path: Path) -> None:
    def winner(*times: list[float]) -> int:
        entries = [Entry((), tmp_path, rounds=[[value] for value in values]) for values in times]
        return entries.index(fastest(entries, entries[0]))

    steady = [100.0, 100.1, 99.9]
    assert winner(steady) == 0
    assert winner(steady, [99.5, 99.4, 99.6]) == 0  # within one per cent
    assert winner(steady, [90.0, 90.1, 89.9]) == 1
    assert winner([100.0, 80.0, 120.0], [90.0, 90.1, 89.9]) == 0  # within the spread
    assert winner(steady, [95.0, 95.1, 94.9], [90.0, 90.1, 89.9]) == 2
    wide = [100.0 + 5.0 * math.sin(7 * i) for i in range(60)]  # whose median is known better than one time is
    assert winner(wide, [value - 4.0 for value in wide]) == 1
    assert winner(wide[:6], [value - 4.0 for value in wide[:6]]) == 0


def test_a_candidate_is_given_up_by_its_best_time(tmp_path: Path) -> None:
    """A board that other work slows down makes medians large; one good time is enough to stay."""
    rounds = ([[1.0, 1.0, 1.1]], [[1.9, 1.29, 2.0]], [[1.31, 1.32, 1.4]])
    racing = [Entry((), tmp_path, rounds=times) for times in rounds]
    assert hopeless(racing) == racing[2:]


@pytest.mark.usefixtures("forked")
def test_candidates_are_compiled_before_they_are_run(tmp_path: Path) -> None:
    """Ahead of time, for a GPU that is not here: what spills or does not compile never runs."""
    package = infcl_gen.generate(
        output=tmp_path / "p", batch_size="16k", dim=768, device_profile="h200", set={"strategy": "panel"}
    )
    case = search._case(read_package(package).spec)

    wanted: list[Settings] = [
        (),
        (("gradient.stages", "2"),),
        (("gradient.keys", "256"), ("gradient.rows", "64")),
        (("gradient.keys", "256"), ("gradient.rows", "256"), ("gradient.warps", "16")),
    ]
    if not LONG:
        wanted = [wanted[0], wanted[2]]
    run = Family(case, "gradient", (), Limits(jobs=2), tmp_path)
    run.entries = [Entry(settings, tmp_path / f"c{index}") for index, settings in enumerate(wanted)]
    run._judge_legality()
    assert not any(entry.status for entry in run.entries)
    run._compile(math.inf)
    fine = 2 if LONG else 1
    assert not any(entry.status for entry in run.entries[:fine])
    for entry in run.entries[fine:]:
        assert entry.status in ("spills", "does not compile") and entry.detail


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_candidate_may_spill_on_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `verify --aot` will judge the winner: the wide forward of these tiles spills where sizes are ragged, alone."""
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="16k", dim=768, device_profile="h200")
    tiles = {"rows": "128", "keys": "256", "depth": "64", "warps": "8", "stages": "4"}
    settings = tuple(sorted((f"forward.{name}", value) for name, value in tiles.items()))
    run = Family(search._case(read_package(package).spec), "forward", (), Limits(), tmp_path)
    run.entries = [Entry((), tmp_path / "c0"), Entry(settings, tmp_path / "c1")]
    run._judge_legality()
    run._compile(math.inf)
    # The other kernels are those of any package of this size, which tests/test_aot.py compiles.
    monkeypatch.setattr(Kernels, "names", lambda *_: ["forward", "forward_wide"])
    rows = aot_checks(tmp_path / "c1", ["sm_90"])
    (wide,) = [row for row in rows if row["check"].endswith("forward_wide")]
    assert not wide["passed"] and all(row["passed"] for row in rows if row is not wide)
    assert run.entries[1].status == "spills" and "forward_wide" in run.entries[1].detail


def test_compiling_keeps_to_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being compiled is finished; nothing more is begun. The best so far needs no compiling."""
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="16k", dim=768, device_profile="h200")
    case = search._case(read_package(package).spec)
    wanted = [(), *((("gradient.stages", str(stages)),) for stages in (2, 3, 4))]
    run = Family(case, "gradient", (), Limits(jobs=2), tmp_path)
    run.entries = [Entry(settings, tmp_path / f"c{index}") for index, settings in enumerate(wanted)]
    monkeypatch.setattr("infcl_gen.tuning.family.Worker", lambda *_: SimpleNamespace(kill=lambda: None))
    monkeypatch.setattr(run, "_answers", lambda *_, **__: [])
    run._compile(-math.inf)
    assert [entry.status for entry in run.entries] == ["", "", "", "not timed"]
    assert "the time was up" in run.entries[3].detail


def test_the_command_line_reports_the_outcome(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def fake(folder: str, where: Path | None, limits: Limits, progress: Progress | None) -> search.Outcome:
        given.append((folder, where, limits.minutes))
        case = search._case(read_package(folder).spec)
        key = records.record_key(case.problem, case.loss, case.cluster)
        timed = Candidate("panel", OTHER, "timed", "", 1.0, (1.0, 3.0))
        hung = Candidate("panel", (), "hung", "no answer within 1 s")
        record = records.Record(key, OTHER, "d", (), {}, False, ("panel",), {}, (hung, timed))
        return search.Outcome(record, tmp_path / "cpu.json", Path(folder))

    monkeypatch.setattr(search, "tune", fake)
    done = CliRunner().invoke(cli.main, ["tune", str(package), "--minutes", "2.5", "--records", "somewhere"])
    assert done.exit_code == 0 and given == [(str(package), Path("somewhere"), 2.5)]
    assert "fastest: panel_keys=64 panel_rows=64; the time was up" in done.stdout
    assert "hung" in done.stdout and "no answer within 1 s" in done.stdout and "2 ms" in done.stdout
    done = CliRunner().invoke(cli.main, ["tune", str(package), "--json"])
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1 and result["best_ms"] == 2.0 and given[-1][1:] == (None, 20.0)
    assert result["record"]["candidates"][0]["status"] == "hung"


def start(package: Path, folder: Path, scratch: Path, how: str) -> Worker:
    scratch.mkdir(exist_ok=True)
    arguments = [str(package), str(folder), how]
    return Worker("tests.tuning.program:tuned", arguments, scratch / f"{package.name}.log", {"TMPDIR": str(scratch)})


def processes_below(folder: Path) -> list[str]:
    """Command lines of living processes that name something in a folder, or whose errors go there: what is forked has
    the command line of its server."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            errors = os.readlink(process / "fd" / "2")
        except OSError:
            continue
        if (str(folder) in line or errors.startswith(f"{folder}/")) and str(os.getpid()) != process.name:
            found.append(line)
    return found


def run_two_at_once(package: Path, tmp_path: Path, how: str) -> float:
    """Of two sizes, into one folder; the seconds that both took."""
    other = infcl_gen.generate(output=tmp_path / "other", **{**SMALL, "dim": 24})
    runs = [start(path, tmp_path / "records", tmp_path / "scratch", how) for path in (package, other)]
    started = time.monotonic()
    for run in runs:
        assert run.answer(120) == {"done": True}
        run.kill()
    return time.monotonic() - started


def interrupted_run_leaves_both(
    package: Path, tmp_path: Path, how: str, pause: Callable[[], None], sent: signal.Signals
) -> None:
    """And no process."""
    folder, scratch = tmp_path / "records", tmp_path / "scratch"
    before = read_records(folder / "cpu.json")
    assert {record.key.dim for record in before} == {16, 24}
    run = start(package, folder, scratch, how)
    pause()
    os.kill(run._popen.pid, sent)
    if (answer := run.answer(60)) == {"done": True}:
        answer = run.answer(60)
    assert answer is not None and "ended" in answer
    wait_until(lambda: processes_below(scratch) == [])
    assert [record.key for record in read_records(folder / "cpu.json")] == [record.key for record in before]
    for partial in folder.glob(".*.partial.json"):
        read_records(partial)
    read_package(package)  # intact


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("forked")
def test_two_runs_at_once_keep_both_records_and_an_interrupted_one_leaves_them(package: Path, tmp_path: Path) -> None:
    """Interrupted as it has one process for each candidate."""
    run_two_at_once(package, tmp_path, "forked")
    pause = lambda: wait_until(lambda: len(processes_below(tmp_path / "scratch")) == 3)  # noqa: E731
    interrupted_run_leaves_both(package, tmp_path, "forked", pause, signal.SIGINT)


@pytest.mark.long
def test_interrupted_at_many_random_moments(package: Path, tmp_path: Path) -> None:
    whole_s = run_two_at_once(package, tmp_path, "started")
    for _ in range(20):
        sent = random.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        pause = functools.partial(time.sleep, random.uniform(0.05, 1.1) * whole_s)
        interrupted_run_leaves_both(package, tmp_path, "started", pause, sent)


def test_finished_families_are_not_tuned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial file of an interrupted run on a GPU's package; what runs on the GPU is replaced."""
    package = infcl_gen.generate(
        output=tmp_path / "p", batch_size="16k", dim=768, device_profile="h200", set={"strategy": "panel"}
    )
    seen: list[tuple[str, Settings]] = []
    stop_at = ["gradient"]

    class Replaced:
        def __init__(self, case: Case, family: str, best: Settings, *_: Any) -> None:
            self.case, self.family, self.best = case, family, best

        def run(self, *_: Any) -> tuple[Settings, str, tuple[Candidate, ...]]:
            seen.append((self.family, self.best))
            if [self.family] == stop_at:
                raise KeyboardInterrupt
            settings = tuple(sorted((*self.best, (f"{self.family}.stages", "2"))))
            settings = tuple(sorted((*settings, ("products", "triton")))) if self.family == "product" else settings
            return settings, content_digest(self.case.files(settings)), ()

    monkeypatch.setattr(search, "Family", Replaced)
    monkeypatch.setattr(search, "check_device", lambda _: None)
    folder = tmp_path / "records"
    before = read_package(package).digest
    with pytest.raises(KeyboardInterrupt):
        tune(package, folder)
    assert not (folder / "h200.json").exists() and read_package(package).digest == before
    case, partial = search._case(read_package(package).spec), next(folder.glob(".*.partial.json"))
    key = records.record_key(case.problem, case.loss, case.cluster)
    assert search._resumed(partial, key, case).families == ("forward",)
    with monkeypatch.context() as patch:  # what was timed are kernels of another revision
        revise(patch, "forward", 99)
        assert search._resumed(partial, key, case).families == ()
    stop_at.clear()
    outcome = tune(package, folder, Limits(minutes=1e-9))  # no time: one family, and the record says so
    assert not outcome.record.complete and outcome.record.families == ("forward",)
    outcome = tune(package, folder)
    assert outcome.record.complete and outcome.record.families == ("forward", "gradient", "product")
    assert [family for family, _ in seen] == ["forward", "gradient", "gradient", "product"]
    assert seen[-1][1] == (("forward.stages", "2"), ("gradient.stages", "2"))
    assert [path.name for path in folder.iterdir()] == ["h200.json"]
    monkeypatch.setattr(records, "record_folders", lambda: (folder,))
    problem = make_problem(batch_size="16k", dim=768, device_profile="h200", set={"strategy": "panel"})
    assert content_digest(build(problem)) == outcome.record.digest
    pipeline = infcl_gen.emission.pipeline
    assert isinstance(pipeline.find_record(pipeline.case_of(problem)), Found)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"dim": 768, "set": {"strategy": "panel"}}, {"forward", "gradient", "product"}),
        ({"dim": 128, "set": {"strategy": "fused"}}, {"forward", "fused"}),
        ({"dim": 768, "set": {"strategy": "stash"}}, {"forward", "gradient", "product"}),
        ({"dim": 768, "loss": "infonce", "set": {"strategy": "rows"}}, {"forward", "product"}),
        ({"dim": 768, "dtype": "fp32"}, {"forward", "gradient", "product"}),
    ],
)
def test_every_family_of_every_strategy_has_legal_candidates(
    tmp_path: Path, flags: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = infcl_gen.generate(output=tmp_path / "p", batch_size="16k", device_profile="h200", **flags)
    case = search._case(read_package(package).spec)
    planned: dict[Settings, str] = {}

    def noting(case: Case, settings: Settings, whole: Any = Case.plan) -> Any:
        found = whole(case, settings)
        planned[settings] = found.strategy
        return found

    monkeypatch.setattr(Case, "plan", noting)
    assert set(search.families(case.default)) == expected
    for family in expected:
        run = Family(case, family, (), Limits(), tmp_path)
        offered = search.proposals(case, family, ())
        wanted = dict.fromkeys([(), *offered[:: 1 if LONG else max(1, len(offered) // 7)]])
        run.entries = [Entry(settings, tmp_path / str(index)) for index, settings in enumerate(wanted)]
        run._judge_legality()
        run._rank(8)
        assert 4 <= len(run._racing()) <= 8 and not run.entries[0].status
        assert {planned[entry.settings] for entry in run._racing()} == {case.default.strategy}
        if family == "product" and flags.get("dtype") != "fp32":
            assert any(("products", "triton") in entry.settings for entry in run._racing())


def test_the_most_promising_are_compiled_first(tmp_path: Path) -> None:
    """By the model; before those up to half of what is timed may be what a record, of older kernels too, found fast,
    whatever the best of the other families was."""
    flags = {"batch_size": "16k", "dim": 768, "loss": "infonce", "set": {"strategy": "rows"}}  # planned in least time
    package = infcl_gen.generate(output=tmp_path / "p", device_profile="h200", **flags)
    case = search._case(read_package(package).spec)
    best: Settings = (("forward.stages", "2"),)
    judged = Family(case, "gradient", best, Limits(), tmp_path)
    wanted = dict.fromkeys([best, *search.proposals(case, "gradient", best)[::3]])
    judged.entries = [Entry(settings, tmp_path / str(index)) for index, settings in enumerate(wanted)]
    judged._judge_legality()

    def ranked(earlier: dict[Proposed, float], count: int) -> list[Settings]:
        run = Family(case, "gradient", best, Limits(timed=4), tmp_path, earlier=earlier)
        run.entries = [dataclasses.replace(entry) for entry in judged.entries]
        run._rank(count)
        racing = run._racing()
        assert len(racing) == count and run.entries[:count] == racing
        return [entry.settings for entry in racing]

    legal = [entry for entry in judged.entries[1:] if not entry.status]
    legal.sort(key=lambda entry: (entry.predicted_ms, entry.distance))
    model = [entry.settings for entry in legal]
    assert len(model) > 30 and ranked({}, 20) == [best, *model[:19]]
    times = {model[5]: 3.0, model[30]: 1.0, model[25]: 2.0, best: 0.5}
    elsewhere = {proposed("gradient", settings): ms for settings, ms in times.items()}
    assert all("forward" not in name for _, pairs in elsewhere for name, _ in pairs)
    rest = [settings for settings in model if settings not in (model[30], model[25])]
    assert ranked(elsewhere, 20) == [best, model[30], model[25], *rest[:17]]
    assert ranked({("forward", pairs): ms for (_, pairs), ms in elsewhere.items()}, 20) == [best, *model[:19]]


@pytest.mark.usefixtures("forked")
def test_a_run_knows_what_an_older_one_found_fast(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a stale record, here and where records are looked for; of what stayed in the race."""
    folder, installed = tmp_path / "records", tmp_path / "installed"
    record = short_run(package, folder).record
    fates = {(): "timed", OTHER: "slower"}
    stale = dataclasses.replace(
        record,
        revisions={"sweep": 0},
        candidates=tuple(dataclasses.replace(c, status=fates[c.settings]) for c in record.candidates),
    )
    default = next(c for c in record.candidates if not c.settings)
    expected = {("panel", ()): statistics.median(default.times_ms)}
    for where in (folder, installed):
        (folder / "cpu.json").unlink(missing_ok=True)
        where.mkdir(exist_ok=True)
        records.write_records(where / "cpu.json", [stale])
        monkeypatch.setattr(records, "record_folders", lambda: (installed,))
        assert search._timed_before(folder, record.key) == expected
    assert search._timed_before(folder, dataclasses.replace(record.key, dim=17)) == {}
    given: list[Any] = []
    family = search.Family

    def noting(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return family(*arguments)

    monkeypatch.setattr(search, "Family", noting)
    short_run(package, folder)
    assert given == [expected]
    (installed / "cpu.json").write_text("{")
    (folder / "cpu.json").unlink()
    assert search._timed_before(folder, record.key) == {}


@pytest.mark.usefixtures("forked")
def test_sources_that_change_while_they_are_timed_are_noticed(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = Family.run, read_package(package).digest

    def changed(self: Any, *arguments: Any) -> tuple[Settings, str, tuple[Candidate, ...]]:
        found, files = run(self, *arguments), Case.files
        edited = lambda case, settings: {**files(case, settings), "loss.py": "# Another one."}  # noqa: E731
        monkeypatch.setattr(Case, "files", edited)
        return found

    monkeypatch.setattr(Family, "run", changed)
    with pytest.raises(VerificationError, match="not the one that was timed"):
        short_run(package, tmp_path / "records")
    assert read_package(package).digest == before and not list((tmp_path / "records").glob("*.json"))


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_tuned_says_so(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = infcl_gen.generate(output=tmp_path / "fixed", **SMALL, set={"panel_rows": 64})
    with pytest.raises(InputError, match="panel_rows"):
        tune(fixed)
    gpu = infcl_gen.generate(output=tmp_path / "gpu", batch_size=1024, dim=64, device_profile="h200")
    monkeypatch.setattr("infcl_gen.hardware.detection.find_device", lambda: None)
    with pytest.raises(ToolchainError, match="h200"):
        tune(gpu)
    done = CliRunner().invoke(cli.main, ["tune", str(gpu)])
    assert done.exit_code == 4 and len(done.stderr.splitlines()) == 1
    for minutes in ("0", "-1", "x", "inf", "nan", "1e9"):
        done = CliRunner().invoke(cli.main, ["tune", str(package), "--minutes", minutes])
        assert done.exit_code == 2 and "--minutes" in done.stderr

    def broken(settings: Settings, folder: Path) -> None:
        (folder / "__init__.py").write_text("raise RuntimeError('broken')\n")

    before = read_package(package).digest
    with pytest.raises(VerificationError, match="broken"):
        edit_candidates(monkeypatch, broken)
        tune(package, tmp_path / "records")
    assert read_package(package).digest == before and not list((tmp_path / "records").glob("*.json"))
