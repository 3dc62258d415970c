"""CUDA graphs and memory pools of fake CUDA devices."""

import gc

import pytest
import torch
from torch import nn

from torchext.dry_run import world
from torchext.fake import fake_mode, is_fake
from torchext.memory import track_memory

MIB = 2**20


class Reserved:
    """The bytes that PyTorch has reserved since construction: other tests leave workspaces."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_reserved()

    def __call__(self) -> int:
        return torch.cuda.memory_reserved() - self.before


def test_body_runs_once_in_a_pool_of_the_graph_and_replays_do_nothing() -> None:
    with fake_mode(gpu=True):
        x = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")
        graph, runs = torch.cuda.CUDAGraph(), []
        reserved = Reserved()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            runs.append(1)
            y = x + 1
        after = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(3):
            graph.replay()
        assert is_fake(y) and runs == [1]  # noqa: PT018
        assert not torch.cuda.is_current_stream_capturing()
        assert isinstance(graph, torch.cuda.CUDAGraph)
        assert reserved() == 20 * MIB
        assert torch.cuda.memory_stats()["num_device_alloc"] == after


def test_memory_of_a_graph_is_not_reused_while_the_graph_lives() -> None:
    with fake_mode(gpu=True):
        reserved = Reserved()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            temporary = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            del temporary
        with torch.cuda.stream(side):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert reserved() == 30 * MIB
        graph.reset()
        torch.cuda.empty_cache()
        assert reserved() == 0


def test_graphs_of_one_pool_share_its_memory() -> None:
    with fake_mode(gpu=True):
        reserved = Reserved()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, pool in ((first, None), (second, first)):
            with torch.cuda.graph(graph, pool=pool.pool() if pool else None):
                torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        assert reserved() == 30 * MIB
        assert first.pool() == second.pool() != torch.cuda.graph_pool_handle()
        pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
        assert pools - {(0, 0)} == {first.pool()}


def test_output_of_a_graph_outlives_it() -> None:
    with fake_mode(gpu=True):
        reserved = Reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.ones(30 * MIB, dtype=torch.uint8, device="cuda")
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        assert reserved() == 30 * MIB
        del y
        torch.cuda.empty_cache()
        assert reserved() == 0


def test_graphs_raise_the_errors_of_real_ones() -> None:
    with fake_mode(gpu=True):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="replay without a preceding successful capture"):
            graph.replay()
        with pytest.raises(RuntimeError, match="Capture must end on the same stream it began on"):
            graph.capture_end()
        with torch.cuda.graph(graph):
            pass
        with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()


def test_error_in_a_body_ends_the_capture() -> None:
    with fake_mode(gpu=True):
        with pytest.raises(ValueError, match="of the program"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise ValueError("of the program")
        assert not torch.cuda.is_current_stream_capturing()
        count = len(torch.cuda.memory_snapshot())
        x = torch.ones(30 * MIB, dtype=torch.uint8, device="cuda")
        new = torch.cuda.memory_snapshot()[count:]
        assert [segment["segment_pool_id"] for segment in new] == [(0, 0)]
        del x


def test_graphed_callables_train() -> None:
    with world(2, 0) as job, track_memory():
        model = nn.Linear(4, 4).cuda()
        graphed = torch.cuda.make_graphed_callables(model, (torch.randn(2, 4, device="cuda"),))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            graphed(torch.randn(2, 4, device="cuda")).sum().backward()
            optimizer.step()
        assert model.weight.grad.shape == (4, 4)
    assert "A CUDA graph was captured by running its body once" in job.remarks[0]


def test_graphed_callables_work_without_a_dry_run() -> None:
    with fake_mode(gpu=True):
        model = nn.Linear(4, 4).cuda()
        graphed = torch.cuda.make_graphed_callables(model, (torch.randn(2, 4, device="cuda"),))
        graphed(torch.randn(2, 4, device="cuda")).sum().backward()
        assert model.weight.grad.shape == (4, 4)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA makes pools in C, which are refused")
def test_pools_of_the_program_have_separate_memory() -> None:
    with fake_mode(gpu=2):
        reserved = Reserved()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            assert pool.use_count() == 2
        assert [segment["total_size"] for segment in pool.snapshot()] == [30 * MIB]
        assert isinstance(pool, torch.cuda.MemPool)
        del x
        torch.cuda.empty_cache()
        assert reserved() == 30 * MIB
        del pool
        torch.cuda.empty_cache()
        assert reserved() == 0
