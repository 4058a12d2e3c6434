"""Whether a processor multiplies bfloat16, by what Linux says of it."""

import pytest

from rlhf.tuning import processor


@pytest.fixture(autouse=True)
def asked_anew():
    processor._flags.cache_clear()
    yield
    processor._flags.cache_clear()


@pytest.mark.parametrize(
    ("flags", "multiplies"),
    [
        ("fpu vme avx512f avx512_bf16", True),
        ("fpu amx_bf16 amx_tile", True),
        ("fpu avx2 avx512f avx512_vnni", False),
        # Words are compared whole.
        ("fpu avx512_bf16x", False),
    ],
)
def test_it_is_known_by_its_flags(tmp_path, monkeypatch, flags, multiplies):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: avx512_bf16 of it\nflags\t: {flags}\n\n" * 2)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.multiplies_bfloat16() is multiplies


def test_a_system_without_that_file_is_told_nothing_of(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "missing")
    assert processor.multiplies_bfloat16() is False
