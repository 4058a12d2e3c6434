"""`rlhf doctor` names NVIDIA's driver, and the faults of a machine that a run would meet later."""

import pytest

from rlhf.stages.tools.doctor import facts_of_machine, nvidia_driver, show, warnings_of
from rlhf.tuning.rewards import sandbox

OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "550.54.14")])
def test_the_driver_is_the_kernel_modules(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert nvidia_driver(tmp_path / "version") == version
    assert nvidia_driver(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("platform", "driver", "memory", "expected"),
    [
        ("cpu", None, 2**34, []),
        ("cpu", None, 2**32, ["less than 7 GB of memory"]),
        ("cpu", "550.54.14", 2**34, ["driver 550.54.14 is older than 580"]),
        ("cpu", "580.65.06", 2**34, ["JAX found no GPU"]),
        ("gpu", "580.65.06", 2**34, ["has not passed `make test-device`"]),
    ],
)
def test_warnings_name_the_fault(platform, driver, memory, expected):
    found = warnings_of(platform, driver, memory, "0.10.2")
    assert len(found) == len(expected)
    assert all(text in warning for text, warning in zip(expected, found, strict=True))


def test_a_machine_whose_sandbox_runs_no_program_gets_its_facts_and_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "_run", lambda *_, **__: 1)
    sandbox.gaps.cache_clear()
    facts = facts_of_machine()
    sandbox.gaps.cache_clear()
    assert facts["sandbox_gaps"] is None
    assert any("no program runs in the sandbox (status 1)" in warning for warning in facts["warnings"])
    show(facts)
    assert "rewards and tools that run code cannot: no program runs" in capsys.readouterr().out
