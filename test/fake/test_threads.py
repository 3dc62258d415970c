"""Threads and the blocks of fake_mode() and world()."""

import _thread
import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from queue import Queue
from typing import Any

import pytest
import torch
from torch import nn

from torchext.dry_run import world
from torchext.fake import fake_mode, inherit_blocks, is_fake, threads_inherit_blocks
from torchext.memory import fits, track_memory


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def in_plain_thread(function: Callable[[], Any]) -> Any:
    results: Queue[Any] = Queue()
    threading.Thread(target=lambda: results.put(function())).start()
    return results.get(timeout=60)


def in_raw_thread(function: Callable[[], Any]) -> Any:
    results: Queue[Any] = Queue()
    _thread.start_new_thread(lambda: results.put(function()), ())
    return results.get(timeout=60)


def in_raw_thread_with_arguments(function: Callable[[], Any]) -> Any:
    results: Queue[Any] = Queue()
    _thread.start_new_thread(lambda of, into: into.put(of()), (function,), {"into": results})
    return results.get(timeout=60)


def in_timer(function: Callable[[], Any]) -> Any:
    results: Queue[Any] = Queue()
    threading.Timer(0, lambda: results.put(function())).start()
    return results.get(timeout=60)


def in_pool_of_multiprocessing(function: Callable[[], Any]) -> Any:
    with ThreadPool(2) as pool:
        return pool.map(lambda _: function(), range(3))[-1]


def in_asyncio(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await asyncio.to_thread(function)

    return asyncio.run(main())


def in_thread_of_thread(function: Callable[[], Any]) -> Any:
    return in_thread(lambda: in_plain_thread(function))


def in_context(function: Callable[[], Any]) -> Any:
    return in_thread(lambda: contextvars.copy_context().run(function))


WAYS = (
    in_thread,
    in_plain_thread,
    in_raw_thread,
    in_raw_thread_with_arguments,
    in_timer,
    in_pool_of_multiprocessing,
    in_asyncio,
    in_thread_of_thread,
    in_context,
)


def train_on_gpu() -> tuple[object, ...]:
    model = nn.Linear(4, 4, device="cuda:1")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4, device="cuda:1")).sum().backward()
    optimizer.step()
    return is_fake(torch.ones(3)), str(model.weight.grad.device), torch.cuda.device_count(), torch.cuda.is_available()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_thread_that_is_started_in_carried_blocks_is_in_them(way: Callable[[Any], Any]) -> None:
    with fake_mode(gpu=2), threads_inherit_blocks():
        assert way(train_on_gpu) == (True, "cuda:1", 2, True)


def test_thread_inherits_no_blocks_and_the_error_names_the_remedy() -> None:
    with fake_mode(gpu=2):
        assert not is_fake(in_thread(lambda: torch.ones(3)))
        with pytest.raises(NotImplementedError, match=r"Threads do not inherit blocks: .*inherit_blocks\(\)"):
            in_thread(lambda: torch.empty(4, device="cuda:0"))


def test_carried_function_runs_in_the_blocks_in_which_it_was_wrapped() -> None:
    with fake_mode(gpu=2):
        run = inherit_blocks(train_on_gpu)
    assert in_thread(run) == (True, "cuda:1", 2, True)
    assert not is_fake(torch.ones(1))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
        assert not is_fake(pool.submit(torch.ones, 1).result())


def test_function_wrapped_outside_of_blocks_runs_unmodified() -> None:
    run = inherit_blocks(torch.ones)
    with fake_mode():
        assert not is_fake(in_thread(lambda: run(1)))


def test_error_of_a_carried_function_leaves_its_blocks() -> None:
    def fail() -> None:
        raise ValueError("of the program")

    with fake_mode(gpu=2), ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="of the program"):
            pool.submit(inherit_blocks(fail)).result()
        assert not is_fake(pool.submit(torch.ones, 1).result())


def test_state_of_the_thread_is_that_of_a_new_thread() -> None:
    def state() -> tuple[object, ...]:
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda")
        return torch.cuda.current_device(), grad, autocast, torch.is_inference_mode_enabled()

    with fake_mode(gpu=2), threads_inherit_blocks():
        torch.cuda.set_device(1)
        with torch.autocast("cuda"), torch.inference_mode():
            assert in_thread(state) == (0, True, False, False)
        in_thread(lambda: torch.cuda.set_device(0))
        assert torch.cuda.current_device() == 1


def test_blocks_of_another_thread_are_not_carried() -> None:
    may_start, started = threading.Event(), Queue[bool]()

    def start_in_a_block_of_its_own() -> None:
        may_start.wait(60)
        with fake_mode():
            started.put(is_fake(in_plain_thread(lambda: torch.ones(1))))

    other = threading.Thread(target=start_in_a_block_of_its_own)
    other.start()
    with fake_mode(), threads_inherit_blocks():
        may_start.set()
        assert started.get(timeout=60) is False
    other.join()


def test_blocks_may_be_left_while_a_thread_is_in_them() -> None:
    may_go_on, results = threading.Event(), Queue[Any]()

    def run() -> None:
        first = torch.ones(3, device="cuda")
        results.put(None)
        may_go_on.wait(60)
        second = torch.ones(2**20, device="cuda") + 1
        results.put((is_fake(first + first), is_fake(second), torch.cuda.device_count(), str(second.device)))

    with world(4, 1), threads_inherit_blocks(), track_memory():
        thread = threading.Thread(target=run)
        thread.start()
        results.get(timeout=60)
    assert not is_fake(torch.ones(1))
    may_go_on.set()
    assert results.get(timeout=60) == (True, True, 4, "cuda:0")
    thread.join()
    assert not torch.cuda.is_available()


def test_memory_of_threads_is_tracked_with_their_modules() -> None:
    def program() -> None:
        model = nn.Sequential(nn.Linear(512, 512, device="cuda"), nn.Linear(512, 512, device="cuda"))
        model(torch.ones(4, 512, device="cuda")).sum().backward()

    def programs() -> None:
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(program) for _ in range(8)]:
                future.result()

    fit = fits(programs, "H100-80GB")
    holders = fit.memory.by_module("cuda:0")
    assert fit
    assert {"Sequential.0", "Sequential.1"} <= holders.keys()


def test_description_of_gpus_is_carried() -> None:
    with world(2, 1, "A100-40GB"), threads_inherit_blocks():
        assert in_thread(lambda: torch.cuda.get_device_properties(0).name).startswith("NVIDIA A100")
        with pytest.raises(torch.OutOfMemoryError, match="39"):
            in_thread(lambda: torch.empty(2**36, device="cuda"))


def test_many_threads_train_at_once() -> None:
    def train(number: int) -> None:
        device = f"cuda:{number % 2}"
        model = nn.Linear(16, 16, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(torch.randn(8, 16, device=device)).sum().backward()
            optimizer.step()

    with world(2, 0) as job, threads_inherit_blocks(), track_memory() as memory:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(train, range(32)))
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))
    assert len(job.collectives) == 1
    assert {str(device) for device in memory.devices} >= {"cuda:0", "cuda:1"}
