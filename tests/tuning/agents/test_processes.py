"""An episode's process costs at most its own episode, and leaves nothing behind."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tuning.agents.contract import Fault, Observed, Spec, Task
from tuning.agents.processes import EnvironmentRefused
from tuning.agents.processes import EnvironmentLimits, Environments

OWN = "tests.tuning.agents.own_environments"
ROOT = Path(__file__).parents[3]
# Three episodes tell their process, and go on: with a child, busy, asleep.
OWNER = """
import sys
from tuning.agents.contract import Spec, Task
from tuning.agents.processes import EnvironmentLimits, Environments
actions, pids = ["child", "spin", "sleep"], []
environments = Environments(Spec("{own}:Faulty"), EnvironmentLimits(), 3)
for number in range(3):
    environments.open(number, Task(number))
while True:
    for number, answer in environments.poll(600.0):
        if answer.reward is None:
            environments.step(number, "pid")
        elif actions[number]:
            pids.append(answer.observation)
            environments.step(number, actions[number])
            actions[number] = ""
    if not any(actions):
        print(*pids, flush=True)
        sys.stdin.read()
"""
LIMITS = EnvironmentLimits(reset_seconds=20.0, step_seconds=20.0, megabytes=256)


def gathered(environments, keys, seconds=30.0):
    """The answers of some episodes."""
    found, until = {}, time.monotonic() + seconds
    while set(found) < set(keys) and time.monotonic() < until:
        found.update(environments.poll(0.5))
    return found


def one(environments, key="one"):
    return gathered(environments, [key])[key]


@pytest.fixture(scope="module")
def faulty():
    with Environments(Spec(f"{OWN}:Faulty"), LIMITS, 64) as environments:
        yield environments


@pytest.fixture(scope="module")
def hasty():
    """For steps that hang: its limit is soon over."""
    limits = EnvironmentLimits(reset_seconds=20.0, step_seconds=0.15, megabytes=256)
    with Environments(Spec(f"{OWN}:Faulty"), limits, 64) as environments:
        yield environments


@pytest.fixture
def begun(faulty):
    """An episode that has answered its reset."""
    faulty.open("one", Task(1))
    assert isinstance(one(faulty), Observed)
    yield faulty
    faulty.discard("one")


def test_an_episode_alone_equals_the_same_one_among_others():
    """Its environment draws from the global generators."""

    def transcript(environments, key, answers):
        return [(a.observation, a.reward, a.terminated, dict(a.info)) for a in answers[key]]

    with Environments(Spec(f"{OWN}:Dice"), LIMITS, 32) as environments:
        alone, among = {7: []}, {seed: [] for seed in range(31)}
        for answers in (alone, among):
            for seed in answers:
                environments.open(seed, Task(seed))
            for turn in range(3):
                for key, answer in gathered(environments, answers).items():
                    assert isinstance(answer, Observed), answer
                    answers[key].append(answer)
                for key in reversed(list(answers)):
                    if turn < 2:
                        environments.step(key, f"throw {turn}")
            for seed in answers:
                environments.discard(seed)
        assert transcript(environments, 7, alone) == transcript(environments, 7, among)
        assert len({a[0].observation for a in among.values()}) > 20
        assert alone[7][0].reward is None and alone[7][0].info == {"state": [7]}


@pytest.mark.parametrize(
    "action, kind, told",
    [
        ("raise", "error", r"step 1: RuntimeError: no such room \(own_environments.py:\d+\)"),
        ("leave", "error", "step 1: SystemExit: enough"),
        ("memory", "error", "step 1: MemoryError: more than 256 MB"),
        ("nan", "error", "step 1: ValueError: the reward is nan: expected a finite number"),
        ("tuple", "error", "Faulty.step returned a tuple of 2: expected .observation, reward, terminated"),
        ("exit", "crash", "step 1: the process ended: status 3; printed last: .*about to exit"),
        ("segfault", "crash", "step 1: the process ended: signal 11, SIGSEGV; .*about to segfault"),
    ],
)
def test_a_failing_step_is_a_fault_that_says_why(begun, action, kind, told):
    begun.step("one", action)
    fault = one(begun)
    assert isinstance(fault, Fault) and fault.kind == kind
    assert re.search(told, fault.message, re.DOTALL), fault.message
    # The episode is over, its key free, and others go on.
    begun.open("one", Task(1))
    assert isinstance(one(begun), Observed)


@pytest.mark.parametrize("action", ["sleep", "spin", "spin in c"])
def test_what_hangs_in_a_step_is_killed_at_its_limit(hasty, action):
    hasty.open("one", Task(1))
    one(hasty)
    start = time.monotonic()
    hasty.step("one", action)
    fault = one(hasty)
    assert fault.kind == "timeout" and fault.message.startswith("step 1: no answer within 0.15 s")
    assert 0.15 <= fault.seconds <= time.monotonic() - start < 10.0


def test_what_hangs_in_reset_is_killed_at_its_limit():
    limits = EnvironmentLimits(reset_seconds=1.0, step_seconds=20.0)
    with Environments(Spec(f"{OWN}:Faulty", {"at_reset": "spin"}), limits, 2) as environments:
        environments.open("one", Task(1))
        fault = one(environments)
    assert fault.kind == "timeout" and fault.message.startswith("reset: no answer within 1 s")
    assert "about to spin" in fault.message


def test_large_answers_and_noise_block_nobody(begun):
    """Two megabytes of action and three of observation, in pieces, beside output that nobody reads."""
    begun.open("two", Task(2))
    one(begun, "two")
    begun.step("one", "large")
    begun.step("two", "y" * 2_000_000)
    found = gathered(begun, ["one", "two"])
    assert len(found["one"].observation) == 3_000_000 and len(found["two"].observation) == 2_000_000
    begun.step("one", "print")
    assert one(begun).observation == "print"
    begun.discard("two")


def test_a_busy_owner_costs_no_episode_its_answer(hasty):
    """It reads a long answer only when the limit is over."""
    hasty.open("one", Task(1))
    one(hasty)
    hasty.step("one", "large")
    (episode,) = hasty._episodes.values()
    select.select([episode.stream], [], [], 20.0)
    while time.monotonic() <= episode.deadline:
        time.sleep(0.05)
    assert len(one(hasty).observation) == 3_000_000
    hasty.discard("one")


def test_an_episode_without_output_disturbs_no_later_one(begun):
    begun.step("one", "mute")
    one(begun)
    begun.open("two", Task(2))
    assert isinstance(one(begun, "two"), Observed)
    begun.discard("two")


def test_a_discarded_episode_takes_with_it_what_it_has_started(begun):
    begun.step("one", "child")
    child = int(one(begun).observation)
    begun.step("one", "pid")
    pid = int(one(begun).observation)
    assert psutil.pid_exists(child) and psutil.pid_exists(pid)
    begun.discard("one")
    assert gone([child, pid]) and begun.poll(0.0) == []


def test_an_environment_is_closed_behind_its_own_end(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOSED_IN", str(tmp_path))
    with Environments(Spec(f"{OWN}:Faulty"), LIMITS, 2) as environments:
        environments.open("one", Task(1))
        one(environments)
        environments.step("one", "end")
        assert one(environments).terminated
        environments.discard("one")
        until = time.monotonic() + 5
        while not list(tmp_path.iterdir()) and time.monotonic() < until:
            time.sleep(0.02)
        assert [path.name for path in tmp_path.iterdir()] == ["closed"]


def test_schemas_are_asked_beside_episodes_and_a_cut_episode_for_its_last_reward():
    spec = Spec(f"{OWN}:Counter", tools=[f"{OWN}:stall"], tool_seconds=0.1)
    with Environments(spec, LIMITS, 1) as environments:
        environments.open("one", Task(1, {"start": 3}))
        assert [s["function"]["name"] for s in environments.schemas()] == ["add", "wait", "stall"]
        first = one(environments)
        assert first.observation == "\nThe counter is at 3." and first.info == {"joins_prompt": True}
        calls = [{"name": "stall", "arguments": {"seconds": 60}}, {"name": "add", "arguments": {"amount": 2}}]
        environments.step("one", "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls))
        answer = one(environments)
        assert [m["content"] for m in answer.observation] == [
            "error: stall took longer than 0.1 s",
            "The counter is at 5.",
        ]
        environments.finish("one")
        last = one(environments)
        assert (last.observation, last.reward, last.terminated, last.truncated) == (None, 0.5, False, True)
    broken = Spec(f"{OWN}:Counter", tools=[f"{OWN}:untold"])
    with (
        Environments(broken, LIMITS, 1) as environments,
        pytest.raises(EnvironmentRefused, match="tool untold: no doc"),
    ):
        environments.schemas()


def test_a_killed_owner_leaves_no_process():
    program = OWNER.format(own=OWN)
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    family = [process.pid for process in psutil.Process(owner.pid).children(recursive=True)]
    assert set(pids) < set(family)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    assert gone(family, 2.0)


def test_the_death_of_the_zygote_costs_the_episodes_that_are_open(faulty):
    faulty.open("one", Task(1))
    faulty.open("two", Task(1))
    gathered(faulty, ["one", "two"])
    faulty.step("one", "sleep")
    me = psutil.Process()
    (zygote,) = {p.parent().pid for p in me.children(recursive=True) if p.parent().pid != me.pid and open_here(p)}
    os.kill(zygote, signal.SIGKILL)
    fault = one(faulty)
    assert fault.kind == "crash" and "signal 9, SIGKILL" in fault.message
    faulty.step("two", "hello")
    assert one(faulty, "two").kind == "crash"
    faulty.open("one", Task(1))
    assert isinstance(one(faulty), Observed)
    faulty.discard("one")


def test_sixty_four_episodes_with_faults_are_all_told_in_bounded_time():
    limits = EnvironmentLimits(reset_seconds=60.0, step_seconds=2.0, megabytes=256)
    with Environments(Spec(f"{OWN}:Faulty"), limits, 64) as environments:
        faults_are_told(environments)


def faults_are_told(environments):
    actions = {n: "sleep" if n % 20 == 3 else "exit" if n % 20 == 7 else "on" for n in range(64)}
    for n in actions:
        environments.open(n, Task(n))
    assert all(isinstance(answer, Observed) for answer in gathered(environments, actions).values())
    start = time.monotonic()
    for n, action in actions.items():
        environments.step(n, action)
    found = gathered(environments, actions)
    told = {n: getattr(answer, "kind", "on") for n, answer in found.items()}
    assert told == {n: {"sleep": "timeout", "exit": "crash"}.get(action, "on") for n, action in actions.items()}
    assert time.monotonic() - start < 20.0


@pytest.mark.parametrize(
    "spec, told",
    [
        (Spec(f"{OWN}:Absent"), "has no attribute 'Absent'"),
        (Spec("tests.tuning.agents.none_there:Class"), "No module named"),
        (Spec(), "no environment and no tools"),
        (Spec(tools=["calculater"]), "did you mean calculator?"),
    ],
)
def test_an_environment_that_is_none_is_refused_with_its_reason(spec, told):
    with Environments(spec, LIMITS, 1) as environments, pytest.raises(EnvironmentRefused, match=told):
        environments.open("one", Task(1))


def test_the_process_that_episodes_are_forked_from_loads_no_numeric_library_and_starts_no_thread():
    program = """
import sys, threading, tuning.agents.zygote
print({"jax", "jaxlib", "torch", "transformers", "tokenizers", "stages", "flows"} & set(sys.modules))
print(threading.active_count())
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["set()", "1"]


def test_what_a_caller_does_wrong_is_told(begun):
    with pytest.raises(ValueError, match="is open already"):
        begun.open("one", Task(1))
    with pytest.raises(ValueError, match="no episode 'none' is open"):
        begun.step("none", "")
    begun.step("one", "sleep")
    with pytest.raises(ValueError, match="has not answered step 1 yet"):
        begun.step("one", "")
    with pytest.raises(ValueError, match="expected the longer one for the step"):
        Environments(Spec(tools=["calculator"], tool_seconds=30.0), LIMITS, 1)


def open_here(process):
    return "tuning.agents.zygote" in " ".join(process.cmdline())


def gone(pids, seconds=2.0):
    """Whether these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while living(pids) and time.monotonic() < until:
        time.sleep(0.02)
    return living(pids) == []


def living(pids):
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def test_answers_at_the_edge_of_the_contract_are_made_whole_or_are_errors_of_the_environment():
    with Environments(Spec(f"{OWN}:Odd"), LIMITS, 16) as environments:
        names = ["surrogate", "parts", "one", "real", "numpy", "assistant", "none", "image", "word", "many"]
        for name in names:
            environments.open(name, Task(1))
        opened = gathered(environments, names)
        assert opened["one"].observation[1] == {"role": "assistant", "content": "two"}
        for name in names:
            environments.step(name, name)
        found = gathered(environments, names)
    assert found["surrogate"].observation == "file ?.txt" and found["surrogate"].info["state"] == {"name ?": "x"}
    assert found["parts"].observation == [{"role": "user", "content": "ab"}]
    assert [found[n].info["success"] for n in ("one", "real", "numpy", "parts")] == [True, False, True, None]
    for name, reason in {
        "assistant": "message 1 .* role 'assistant'",
        "none": "content of type NoneType: expected text",
        "image": "content of type list",
        "word": "success.* is 'yes': expected true or false",
        "many": "success.* is 2: expected",
    }.items():
        assert found[name].kind == "error" and re.search(reason, found[name].message), found[name].message


def test_owner_and_zygote_with_much_to_say_do_not_wait_for_each_other():
    """The news of 48 ends fills the zygote's buffer while the owner, whose own is small, tells it of further ends."""
    with Environments(Spec(f"{OWN}:Faulty"), LIMITS, 64) as environments:
        environments._zygote.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for number in range(48):
            environments.open(number, Task(number))
        gathered(environments, range(48))
        for number in range(48):
            environments.step(number, "bells")
        assert all(isinstance(a, Observed) for a in gathered(environments, range(48)).values())
        for number in range(48):
            environments.discard(number)
        environments.open("next", Task(1))
        assert isinstance(one(environments, "next"), Observed)
