"""The shared memory: a half-written sample is never used."""

import mmap
import multiprocessing

from quire_server.core.topology import MAX_RANKS
from quire_server.health.heartbeat import Control, Heartbeat, Phase, Process, RankEcho, SharedState


def sample(number):
    """A heartbeat in which every field says the same number, so that a mixture shows."""
    return Heartbeat(
        written_at=float(number),
        phase=Phase.SERVING,
        work_pending=bool(number % 2),
        queued=number,
        running=number,
        steps=number,
        loaded_bytes=number,
        total_bytes=number,
        started_at=float(number),
        load_seconds=float(number),
        progress_at=float(number),
        proof_at=float(number),
        kv_utilization=float(number),
        reason="x" * (number % 32),
        lost_rank=number % MAX_RANKS,
        transfer_degraded=bool(number % 2),
        requested_at=float(number),
    )


def test_what_was_written_is_read(tmp_path):
    writer = SharedState.create(tmp_path)
    reader = SharedState.open(tmp_path)
    assert reader.read_heartbeat() is None
    assert reader.read_control() == Control()
    writer.write_heartbeat(sample(7))
    writer.write_control(Control(draining=True, failed="EngineCrashed"))
    assert reader.read_heartbeat() == sample(7)
    assert reader.read_control() == Control(draining=True, failed="EngineCrashed")


def tear(run_dir, offset):
    """What a reader finds when the writer lost its CPU in the middle of a write."""
    with (run_dir / "heartbeat").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 0xFF


def test_in_the_largest_group_no_process_overwrites_what_another_one_has_written(tmp_path):
    writer, ranks = SharedState.create(tmp_path), range(MAX_RANKS)
    writer.write_heartbeat(sample(7))
    writer.write_control(Control(failed="RankLost", killed="rank 31"))
    for process in (*Process, *ranks[1:]):
        writer.beat(process)
    for rank in ranks:
        writer.write_step(rank, rank + 100)
        writer.write_echo(rank, RankEcho(rank + 200, 1.0, 2.0, 3.0, rank))

    reader = SharedState.open(tmp_path)
    assert reader.read_heartbeat() == sample(7)
    assert reader.read_control() == Control(failed="RankLost", killed="rank 31")
    assert set(reader.read_beats()) == {*Process, *ranks[1:]}
    assert reader.read_steps() == {rank: rank + 100 for rank in ranks}
    assert [echo.number for echo in reader.read_echoes().values()] == [rank + 200 for rank in ranks]


def test_a_half_written_sample_is_not_believed(tmp_path):
    state = SharedState.create(tmp_path)
    state.write_heartbeat(sample(7))
    tear(tmp_path, 8)
    assert state.read_heartbeat() is None


def test_while_a_sample_is_half_written_the_one_before_it_counts(tmp_path):
    """Or a server that has served for days would look, for a moment, like one that never loaded."""
    writer, reader = SharedState.create(tmp_path), SharedState.open(tmp_path)
    writer.write_heartbeat(sample(7))
    writer.write_control(Control(draining=True))
    assert (reader.read_heartbeat(), reader.read_control()) == (sample(7), Control(draining=True))
    tear(tmp_path, 8)
    tear(tmp_path, 2048)
    assert (reader.read_heartbeat(), reader.read_control()) == (sample(7), Control(draining=True))
    writer.write_heartbeat(sample(8))
    assert reader.read_heartbeat() == sample(8)


def write_until(stop, run_dir):
    state, number = SharedState.open(run_dir), 0
    while not stop.is_set():
        number += 1
        state.write_heartbeat(sample(number))


def test_a_reader_beside_a_fast_writer_never_sees_a_mixture(tmp_path):
    state = SharedState.create(tmp_path)
    processes = multiprocessing.get_context("spawn")
    stop = processes.Event()
    writer = processes.Process(target=write_until, args=(stop, tmp_path))
    writer.start()
    seen = set()
    while len(seen) < 200 and writer.is_alive():
        read = state.read_heartbeat()
        if read is not None:
            assert read == sample(read.steps)
            seen.add(read.steps)
    stop.set()
    writer.join()
    assert writer.exitcode == 0
