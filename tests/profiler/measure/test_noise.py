from __future__ import annotations

from pathlib import Path

from profiler.measure.noise import clocks, governor


def test_clocks_and_governor_are_read_where_the_system_tells_them(tmp_path: Path) -> None:
    folder = tmp_path / "cpu3" / "cpufreq"
    folder.mkdir(parents=True)
    for name, text in {
        "scaling_cur_freq": "2450000",
        "scaling_max_freq": "3500000",
        "scaling_governor": "powersave",
    }.items():
        (folder / name).write_text(f"{text}\n")
    assert clocks(3, tmp_path, tmp_path / "none") == {"now": 2.45e9, "most": 3.5e9}
    assert governor(3, tmp_path) == "powersave"


def test_else_the_processor_s_own_word_counts(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name\t: X\ncpu MHz\t\t: 2000.5\nmodel name\t: X\ncpu MHz\t\t: 3000.0\n")
    assert clocks(1, tmp_path, info) == {"now": 3e9}
    assert clocks(7, tmp_path, info) == {}
    assert clocks(None, tmp_path, info) == {"now": 2000.5e6}
    assert (clocks(0, tmp_path, tmp_path / "none"), governor(0, tmp_path)) == ({}, "")
