"""The record of a run is whole at each moment, and what is written for it is in proportion to its nodes."""

import uuid

import pytest

from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.runs import Recorder
from tests.stages.store.distant import Distant

PART = 8


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(runs, "PART", PART)


@pytest.fixture
def far():
    """An empty store that counts."""
    Distant.begin()
    return Store(f"distant://{uuid.uuid4().hex}")


def entry(number: int, state: str = "made") -> dict:
    return {"stage": "score", "key": f"{number:064x}", "state": state, "metrics": {"reward": number / 7}}


def record(tries: int = 1) -> dict:
    return {"name": "one", "status": "running", "started": "2026", "recipe": {"name": "r"}, "tries": tries, "nodes": {}}


def grow(recorder: Recorder, of: dict, count: int) -> None:
    """Nodes that begin and end, with a write at each."""
    for number in range(len(of["nodes"]), count):
        of["nodes"][f"n{number}"] = made = entry(number, "running")
        recorder.write(of)
        made |= {"state": "made", "digest": f"d{number}"}
    recorder.write(of)


def parts(store: Store) -> list[str]:
    return [name for name in store.names("runs", "one") if name != runs.HEAD]


@pytest.mark.slow
def test_a_record_reads_back_at_each_moment_in_the_order_of_its_nodes(store):
    recorder, of = Recorder(store, "one"), record()
    assert runs.read(store, "one") is None and not runs.exists(store, "one")
    for count in (0, 1, PART, PART + 1, 3 * PART, 4 * PART + 5):
        grow(recorder, of, count)
        found = runs.read(store, "one")
        assert found == of and list(found["nodes"]) == list(of["nodes"])
    assert runs.exists(store, "one") and runs.names(store) == ["one"]
    assert len(parts(store)) == 4 and len(runs.head(store, "one")["nodes"]) == 5


def test_a_node_that_runs_is_in_the_head_and_those_behind_it_too(far):
    recorder, of = Recorder(far, "one"), record()
    of["nodes"] = {f"n{i}": entry(i, "running" if i == 3 else "made") for i in range(3 * PART)}
    recorder.write(of)
    assert parts(far) == [] and runs.head(far, "one") == of


@pytest.mark.slow
@pytest.mark.parametrize("change", ["made again", "gone"])
def test_what_is_made_again_or_gone_is_so_in_the_record_and_leaves_no_part_behind(store, change):
    recorder, of = Recorder(store, "one"), record()
    grow(recorder, of, 4 * PART)
    first = parts(store)[0]
    if change == "gone":
        del of["nodes"][f"n{PART + 2}"]
    else:
        of["nodes"][f"n{PART + 2}"] = entry(0, "made")
    recorder.write(of)
    assert runs.read(store, "one") == of
    # Entries before it were not written again.
    assert parts(store)[0] == first and len(parts(store)) == 3


@pytest.mark.slow
def test_a_run_that_goes_on_has_its_own_entries_alone(store):
    grow(Recorder(store, "one"), record(), 3 * PART)
    again, of = Recorder(store, "one"), record(tries=2)
    grow(again, of, 1)
    assert runs.read(store, "one") == of and parts(store) == []
    grow(again, of, 2 * PART + 1)
    assert runs.read(store, "one") == of and len(parts(store)) == 2


def test_a_reader_never_sees_half_a_record_while_parts_are_replaced(far, monkeypatch):
    recorder, of = Recorder(far, "one"), record()
    grow(recorder, of, 3 * PART)
    read_json, reads = far.read_json, []

    def read_and_replace(*place):
        found = read_json(*place)
        reads.append(place[-1])
        if len(reads) == 1:
            # Between the head and its parts all of them become others.
            of["nodes"] = {f"m{i}": entry(i) for i in range(3 * PART)}
            recorder.write(of)
        return found

    monkeypatch.setattr(far, "read_json", read_and_replace)
    # One of them is the writer's.
    assert runs.read(far, "one") == of and reads.count(runs.HEAD) == 3


def test_a_part_that_is_gone_is_an_error_with_its_name(store):
    grow(Recorder(store, "one"), record(), 3 * PART)
    gone = store.join("runs", "one", parts(store)[1])
    store.remove(gone)
    with pytest.raises(ArtifactError, match="nodes-1-00001.json is missing: the record of run one is not whole"):
        runs.read(store, "one")


def test_what_is_written_is_in_proportion_to_the_nodes(far):
    written, requests = [], []
    for count in (50, 1000):
        Distant.begin()
        grow(Recorder(far, f"run-{count}"), record(), count)
        written.append(Distant.bytes_written)
        requests.append(Distant.requests)
    assert written[1] < 22 * written[0] and requests[1] < 22 * requests[0]


def test_records_of_a_store_far_away_are_read_side_by_side_and_in_their_order(far):
    for number in range(64):
        Recorder(far, f"run-{number:03d}").write(record() | {"name": f"run-{number:03d}", "number": number})
    Distant.begin(0.02)
    found = runs.in_parallel(far, lambda name: runs.read(far, name)["number"], runs.names(far))
    assert list(found) == list(range(64)) and Distant.requests <= 65


def test_a_record_on_s3_is_one_request(s3, monkeypatch):
    store = Store(f"{s3}/one-request")
    Recorder(store, "one").write(record())
    asked = []
    call = type(store.fs)._call_s3

    async def counted(fs, method, *args, **options):
        asked.append(method)
        return await call(fs, method, *args, **options)

    monkeypatch.setattr(type(store.fs), "_call_s3", counted)
    assert runs.read(store, "one") is not None and asked == ["get_object"]
