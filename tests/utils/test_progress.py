"""The progress of long functions where stderr is not a terminal."""

import pytest

from diffcap.utils.progress import progress_bar, progress_bars


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with the time."""
    now = [0.0]
    monkeypatch.setattr("diffcap.utils.progress.time.monotonic", lambda: now[0])
    return now


def test_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("captioning", 5000, 1000) as advance, progress_bar("nothing", 1, hidden=True) as hidden:
        for _ in range(8):
            clock[0] += 25
            advance(100)
            hidden(1)
    assert capsys.readouterr().err.splitlines() == [
        "captioning: 1,300 of 5,000, about 15 min left",
        "captioning: 1,600 of 5,000, about 14 min left",
    ]
    with progress_bars(of_bytes=True) as bar:
        update, other = bar("fetching a.zip"), bar("fetching\nb.zip")
        update(10_000, None)
        other(10_000, 20_000)
        clock[0] += 61
        update(2_000_000, None)
        other(20_000, 20_000)
    assert capsys.readouterr().err.splitlines() == [
        "fetching a.zip, bytes: 2,000,000",
        "fetching\\nb.zip, bytes: 20,000 of 20,000, about 0 s left",
    ]
