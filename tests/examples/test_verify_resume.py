"""The plain script of `examples/verify_resume`: exact, unless it forgets a part of its state."""

from pathlib import Path

import pytest

from paceline.testing import verify_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_resume"


@pytest.mark.long
@pytest.mark.parametrize("forgotten", ["", "random"])
def test_plain_script_of_torch(forgotten: str, tmp_path: Path) -> None:
    options = ["--forget", forgotten] if forgotten else []
    verdict = verify_command(
        [str(EXAMPLE / "plain_torch.py"), *options],
        directory=tmp_path / "runs",
        source=EXAMPLE,
        environment={"OMP_NUM_THREADS": "1"},
        timeout_s=200,
    )
    assert verdict.adapter == "torch", verdict
    if not forgotten:
        assert verdict.is_exact, verdict
    else:
        assert verdict.result == "different", verdict
        first = verdict.first_difference
        assert first is not None
        assert (first.kind, first.step) == ("loss", (verdict.resumed_from or 0) + 1)
