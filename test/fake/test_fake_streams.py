"""Streams, events and random generators of fake CUDA devices."""

from __future__ import annotations

import threading

import pytest
import torch

from torchext.fake import fake_mode

pytestmark = pytest.mark.usefixtures("empty_devices")

MIB = 2**20


class TestStreams:
    def test_are_current_in_their_block(self) -> None:
        with fake_mode(gpu=2):
            stream = torch.cuda.Stream()
            assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
            with torch.cuda.stream(stream):
                assert torch.cuda.current_stream() == stream
                assert torch.accelerator.current_stream() == stream
            assert torch.cuda.current_stream() == torch.cuda.default_stream()

    def test_of_another_device_make_it_current(self) -> None:
        with fake_mode(gpu=2):
            stream = torch.cuda.Stream(device=1)
            with torch.cuda.stream(stream):
                assert torch.cuda.current_device() == 1
                assert torch.empty(1, device="cuda").device.index == 1
            assert torch.cuda.current_device() == 0

    def test_are_streams_of_pytorch(self) -> None:
        with fake_mode(gpu=True):
            stream = torch.cuda.Stream(priority=-1)
            assert isinstance(stream, torch.Stream)
            assert stream.device == torch.device("cuda:0")
            assert stream == torch.cuda.Stream(stream_id=stream.stream_id, device_index=0, device_type=1)
            assert "torch.cuda.Stream device=cuda:0 cuda_stream=0x" in repr(stream)
            assert len({stream, torch.cuda.Stream()}) == 2

    def test_have_priorities(self) -> None:
        with fake_mode(gpu=True):
            lowest, highest = torch.cuda.Stream().priority_range()
            assert torch.cuda.Stream().priority == lowest
            assert torch.cuda.Stream(priority=-1).priority == -1
            assert torch.cuda.Stream(priority=-9).priority == highest

    def test_have_nothing_to_wait_for(self) -> None:
        with fake_mode(gpu=True):
            stream, other = torch.cuda.Stream(), torch.cuda.Stream()
            stream.wait_stream(other)
            stream.wait_event(other.record_event())
            stream.synchronize()
            torch.cuda.synchronize()
            assert stream.query()

    def test_have_separate_blocks_of_memory(self) -> None:
        with fake_mode(gpu=True):
            torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_reserved() == 2 * 20 * MIB

    def test_that_use_a_tensor_may_be_recorded(self) -> None:
        with fake_mode(gpu=True):
            tensor = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
            tensor.record_stream(torch.cuda.Stream())
            del tensor
            assert torch.cuda.memory_stats()["active_bytes.all.current"] == 4 * MIB
            torch.empty(1, device="cuda")
            assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0

    def test_of_a_thread_are_its_own(self) -> None:
        with fake_mode(gpu=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                seen = []

                def look() -> None:
                    with fake_mode(gpu=True):
                        seen.append(torch.cuda.current_stream() == torch.cuda.default_stream())

                thread = threading.Thread(target=look)
                thread.start()
                thread.join()
            assert seen == [True]

    def test_do_not_disturb_the_backward_pass(self) -> None:
        with fake_mode(gpu=True):
            x = torch.ones(4, device="cuda", requires_grad=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                y = x * 2
            (y + x).sum().backward()
            assert x.grad is not None

    def test_leave_the_backward_pass_on_the_device_of_the_program(self) -> None:
        seen = []

        class Looking(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return 2 * x

            @staticmethod
            def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
                seen.append((torch.cuda.current_device(), torch.empty(1, device="cuda").device.index))
                return gradient

        with fake_mode(gpu=4):
            torch.cuda.set_device(3)
            x = torch.ones(4, device="cuda", requires_grad=True)
            Looking.apply(x).sum().backward()  # type: ignore[no-untyped-call]
            assert torch.cuda.current_device() == 3
        assert seen == [(3, 3)]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_are_missing_outside_of_blocks(self) -> None:
        with fake_mode(gpu=True):
            pass
        with pytest.raises((RuntimeError, AssertionError)):
            torch.cuda.Stream()


class TestEvents:
    def test_are_done_and_a_millisecond_apart(self) -> None:
        """Programs divide by elapsed times, and add them."""
        with fake_mode(gpu=True):
            begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            begin.record()
            middle.record()
            end.record(torch.cuda.current_stream())
            end.synchronize()
            assert end.query()
            assert begin.elapsed_time(begin) == 0.0
            assert begin.elapsed_time(middle) == middle.elapsed_time(end) == 1.0
            assert begin.elapsed_time(end) == -end.elapsed_time(begin) == 2.0
            assert isinstance(begin, torch.Event)

    def test_of_accelerators_are_a_millisecond_apart(self) -> None:
        with fake_mode(gpu=True):
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            end.record()
            assert begin.elapsed_time(end) == 1.0

    def test_without_timing_have_no_elapsed_time(self) -> None:
        with fake_mode(gpu=True):
            begin, end = (torch.cuda.Event() for _ in range(2))
            with pytest.raises(RuntimeError, match="enable_timing=True"):
                begin.elapsed_time(end)


class TestGenerators:
    def test_have_a_seed_and_an_offset(self) -> None:
        with fake_mode(gpu=2):
            generator = torch.Generator("cuda:1").manual_seed(7)
            assert generator.device == torch.device("cuda:1")
            assert generator.initial_seed() == 7
            state = generator.get_state()
            assert state.shape == (16,)
            generator.manual_seed(8)
            generator.set_state(state)
            assert generator.initial_seed() == 7

    def test_can_be_given_to_operators(self) -> None:
        with fake_mode(gpu=True):
            generator = torch.Generator(device="cuda").manual_seed(1)
            assert torch.randn(4, device="cuda", generator=generator).shape == (4,)
            torch.empty(4, device="cuda").normal_(generator=generator)

    def test_of_devices_are_seeded_with_the_others(self) -> None:
        with fake_mode(gpu=2):
            torch.manual_seed(5)
            torch.cuda.manual_seed_all(5)
            assert torch.cuda.initial_seed() == 5
            states = torch.cuda.get_rng_state_all()
            torch.cuda.manual_seed(6)
            assert torch.cuda.initial_seed() == 6
            torch.cuda.set_rng_state_all(states)
            assert torch.cuda.initial_seed() == 5

    def test_are_as_before_after_a_fork(self) -> None:
        with fake_mode(gpu=1):
            torch.cuda.manual_seed(5)
            with torch.random.fork_rng(devices=[0]):
                torch.cuda.manual_seed(6)
            assert torch.cuda.initial_seed() == 5


def test_stream_of_another_device_makes_that_device_current() -> None:
    with fake_mode(gpu=2):
        torch.cuda.set_device(1)
        with torch.Stream(device="cuda:0"):
            assert torch.empty(1, device="cuda").device == torch.device("cuda", 0)
        assert torch.cuda.current_device() == 1


def test_negative_numbers_of_streams_and_devices_do_not_end_the_process() -> None:
    with fake_mode(gpu=1):
        assert torch._C._cuda_getCurrentStream(-1)[0] == 0
        assert torch.cuda.Stream(stream_id=-1, device_index=0, device_type=1).query()
        with torch.cuda.stream(torch.cuda.ExternalStream(-8)):
            assert torch.ones(3, device="cuda").shape == (3,)
        with pytest.raises(RuntimeError, match=r"invalid device ordinal: -1"):
            torch._C._cuda_setStream(stream_id=0, device_index=-1, device_type=1)
