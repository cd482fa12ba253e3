"""open_clip_loop judges what a loop returned; the loops themselves run outside of the suite."""

import subprocess
import sys

import pytest

from tests.outside.open_clip_loop import Case, all_cases, judge

PLAIN, SUMMED = Case(1, "fp32", "plain"), Case(2, "fp32", "accumulated", ("--accum-freq", "2"))
FALLING = [4.0, 3.0, 2.0]


def result(error: float, ratio: float, losses: list[float] = FALLING) -> dict[str, object]:
    """Of a model with a weight whose gradient has this error, and a scale with this factor of the true gradient."""
    return {"gradients": {"visual.proj": [error, 1.0], "logit_scale": [abs(ratio - 1), ratio]}, "losses": losses}


@pytest.mark.parametrize(
    ("case", "found", "wrong"),
    [
        (PLAIN, result(1e-6, 1.0), ""),
        (PLAIN, result(2e-5, 1.0), "visual.proj: error 2.0e-05, allowed 1.0e-05"),
        (PLAIN, result(1e-6, 1.001), "logit_scale: error 1.0e-03"),
        (PLAIN, result(float("nan"), 1.0), "visual.proj: error nan"),
        (PLAIN, result(1e-6, 1.0, [4.0, 4.5]), "the loss did not fall"),
        (SUMMED, result(1e-6, 2.0), ""),
        (SUMMED, result(1e-6, 1.0), "logit_scale: error 5.0e-01"),
        (Case(2, "fp32", "", SUMMED.flags, divided=True), result(1e-6, 1.0), ""),
        (Case(2, "fp32", "", SUMMED.flags, divided=True), result(1e-6, 2.0), "logit_scale: error 1.0e+00"),
    ],
)
def test_exact_cases(case: Case, found: dict[str, object], wrong: str) -> None:
    said = judge(case, found, None)
    assert not said if not wrong else len(said) == 1 and said[0].startswith(wrong)


def test_under_autocast_errors_are_compared_with_those_of_open_clips_own_loss() -> None:
    case = Case(2, "amp_bf16", "accumulated", SUMMED.flags)
    beside = result(0.02, 2.02)
    assert not judge(case, result(0.045, 2.05), beside)
    assert judge(case, result(0.05, 2.0), beside)[0].startswith("visual.proj: error 5.0e-02, allowed 4.8e-02")
    assert judge(case, result(0.01, 2.2), beside)[0].startswith("logit_scale: error 1.0e-01, allowed 2.8e-02")


def test_only_an_open_clip_with_tasks_is_sharded() -> None:
    assert not any("--fsdp" in case.flags for case in all_cases(False, "cpu"))
    assert any("--fsdp" in case.flags and case.precision == "amp" for case in all_cases(True, "cuda"))


def test_without_open_clip_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['open_clip'] = None\nfrom tests.outside.open_clip_loop import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "open_clip is not installed: pip install open_clip_torch webdataset pandas\n"
