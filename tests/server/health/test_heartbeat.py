"""The shared memory: what is read is whole, or is not believed."""

import mmap
import multiprocessing
import time

from quire_server.health.heartbeat import Control, Heartbeat, Phase, SharedState


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


def test_a_half_written_sample_is_not_believed(tmp_path):
    state = SharedState.create(tmp_path)
    state.write_heartbeat(sample(7))
    with (tmp_path / "heartbeat").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[8] ^= 0xFF
    assert state.read_heartbeat() is None


def write_for_a_second(run_dir):
    state = SharedState.open(run_dir)
    end, number = time.monotonic() + 1.0, 0
    while time.monotonic() < end:
        number += 1
        state.write_heartbeat(sample(number))


def test_a_reader_beside_a_fast_writer_never_sees_a_mixture(tmp_path):
    state = SharedState.create(tmp_path)
    writer = multiprocessing.get_context("spawn").Process(target=write_for_a_second, args=(tmp_path,))
    writer.start()
    seen = set()
    while writer.is_alive():
        read = state.read_heartbeat()
        if read is not None:
            assert read == sample(read.steps)
            seen.add(read.steps)
    writer.join()
    assert writer.exitcode == 0
    assert len(seen) > 100
