"""Which graph a batch replays, the content of its buffers, and the progress reported while capturing."""

import torch
from torch import Tensor

from quire_server.runner.gpu.cuda_graphs import CudaGraphs
from tests.server.runner.gpu.fake_device import FakeDevice

PADDING = 9


def captured(
    *shapes: tuple[int, int],
) -> tuple[CudaGraphs, FakeDevice, list[Tensor], list[tuple[int, int]]]:
    """Graphs that sum each column; the entries they saw, and the reported progress."""
    device, seen, progress = FakeDevice(), list[Tensor](), list[tuple[int, int]]()

    def compute(entries: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append(entries.clone())
        return entries.sum(0).float().flatten()[:, None], entries.sum(0).flatten()

    graphs = CudaGraphs(device)
    graphs.capture(
        shapes, PADDING, compute, lambda tokens: None, lambda done, wanted: progress.append((done, wanted))
    )
    return graphs, device, seen, progress


def test_captures_begin_with_the_largest_see_only_padding_and_report_progress() -> None:
    _, device, seen, progress = captured((4, 1), (2, 1), (1, 1))
    assert device.log == ["capture"] * 3
    assert [tuple(entries.shape[1:]) for entries in seen[::2]] == [(4, 1), (2, 1), (1, 1)]
    for entries in seen:
        assert (entries[0] == PADDING).all() and (entries[1] == -1).all() and (entries[2] == 0).all()
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_replay_computes_the_copied_entries_into_the_captured_outputs() -> None:
    graphs, device, seen, _ = captured((4, 1), (2, 1), (1, 1))
    first = torch.arange(12).view(3, 4, 1)
    logits, tokens = graphs.replay(first)
    assert tokens.tolist() == first.sum(0).flatten().tolist() and logits[:, 0].tolist() == tokens.tolist()
    again, _ = graphs.replay(first + 1)
    assert again.data_ptr() == logits.data_ptr() and tokens.tolist() == (first + 1).sum(0).flatten().tolist()
    graphs.replay(torch.full((3, 2, 1), 5))
    assert [entries.shape[1] for entries in seen[6:]] == [4, 4, 2]
    assert device.log[3:] == ["replay"] * 3


def test_the_smallest_fitting_graph_is_chosen_and_none_without_a_capture() -> None:
    graphs, device, _, _ = captured((4, 1), (2, 1), (1, 1))
    found = [graphs.shape_for((1,) * count) for count in (1, 2, 3, 4, 5)]
    assert found == [(1, 1), (2, 1), (4, 1), (4, 1), None]
    assert CudaGraphs(device).shape_for((1,)) is None


def test_a_graph_of_drafts_gets_them_by_sequence() -> None:
    graphs, _, seen, _ = captured((2, 3), (4, 1))
    assert graphs.shape_for((3, 2)) == (2, 3)
    entries = torch.arange(18).view(3, 2, 3)
    _, tokens = graphs.replay(entries)
    assert torch.equal(seen[-1], entries) and tokens.tolist() == entries.sum(0).flatten().tolist()
