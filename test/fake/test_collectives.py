"""Collectives materialize deferred tensors; for fakes on the backend "fake" they return metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from collective_calls import C10D, FUNCTIONAL, MIXED, OF_SEVERAL, SYMMETRIC, Call, Make, group
from common import assert_same_module, assert_same_tensor, build_both, in_fake_mode
from comparisons import PROPERTIES, metadata
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from torchext import inspect
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of PyTorch has no gloo")

T = TypeVar("T")

SIZES = {"fake": 8, "gloo": 1}


@pytest.fixture(params=list(SIZES))
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Create a process group of this process only."""
    size = SIZES[request.param]
    store = FakeStore() if request.param == "fake" else dist.HashStore()
    dist.init_process_group(request.param, store=store, rank=0, world_size=size)
    yield size
    dist.destroy_process_group()


of_fake_backend = pytest.mark.parametrize("world", ["fake"], indirect=True)
# Whether PyTorch's backend "fake" has the behavior with which these tests compare.
IS_COMPLETE = TORCH_RELEASE >= (2, 13)
of_gloo = pytest.mark.parametrize("world", ["gloo"], indirect=True)


def named(*tables: dict[str, Call]) -> pytest.MarkDecorator:
    calls = {name: call for table in tables for name, call in table.items()}
    return pytest.mark.parametrize("call", calls.values(), ids=calls.keys())


def deferred(numel: int) -> Tensor:
    return deferred_init(torch.ones, numel)


def fake(numel: int) -> Tensor:
    return fake_like(torch.ones(numel))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def outcome(call: Call, world: int, make: Make) -> tuple[str, list[Tensor]]:
    """Return the error of the call, and its tensors afterwards."""
    made: list[Tensor] = []

    def note(numel: int) -> Tensor:
        made.append(make(numel))
        return made[-1]

    try:
        waited(call(note, world))
        return "", made
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, made


def assert_does_what_eager_does(call: Call, world: int) -> None:
    def counted(numel: int) -> Tensor:
        return torch.arange(numel, dtype=torch.float32).add_(1)

    wanted, eager = outcome(call, world, counted)
    found, tensors = outcome(call, world, lambda numel: deferred_init(counted, numel))
    assert found == wanted
    for tensor, expected in zip(tensors, eager, strict=True):
        assert torch.equal(materialize_tensor(tensor), expected)


@of_fake_backend
@named(C10D, FUNCTIONAL, SYMMETRIC, MIXED, OF_SEVERAL)
def test_deferred_tensors_become_real_and_are_communicated(world: int, call: Call) -> None:
    assert_does_what_eager_does(call, world)


FROM_ITSELF = ("send", "recv", "recv_from_any")  # a process alone would wait


@of_gloo
@named({name: call for name, call in (C10D | FUNCTIONAL | MIXED).items() if name not in FROM_ITSELF})
def test_deferred_tensors_become_real_and_are_communicated_by_gloo(world: int, call: Call) -> None:
    assert_does_what_eager_does(call, world)


def test_deferred_tensors_with_plain_fakes_are_an_error(world: int) -> None:
    tensor = deferred(2)
    with pytest.raises(RuntimeError, match=r"`c10d::allgather_` takes a fake tensor of shape \[2\] together with"):
        dist.all_gather([fake(2) for _ in range(world)], tensor)
    assert is_deferred(tensor)


def test_result_of_a_collective_in_a_block_is_that_of_eager_construction(world: int) -> None:
    def build() -> Tensor:
        weight = torch.rand(4)
        dist.broadcast(weight, 0)
        return weight.mul_(2)

    eager, made = build_both(build)
    assert_same_tensor(materialize_tensor(made), eager)


@of_gloo
@named(C10D, FUNCTIONAL, SYMMETRIC)
def test_fakes_are_refused_on_a_backend_that_communicates(world: int, call: Call) -> None:
    with pytest.raises(
        RuntimeError, match=r"on a fake tensor of shape .* by the backend `gloo`.* the backend \"fake\""
    ):
        call(fake, world)


@named(MIXED)
def test_fakes_are_refused_together_with_real_tensors(world: int, call: Call) -> None:
    with pytest.raises(RuntimeError, match="takes a fake tensor of shape .* together with a real one"):
        call(fake, world)


@of_fake_backend
@named(C10D, FUNCTIONAL, OF_SEVERAL)
def test_fakes_have_the_metadata_of_real_tensors_on_the_backend_fake(world: int, call: Call) -> None:
    real, real_results = run(call, torch.ones, world)
    fakes, fake_results = run(call, fake, world)
    compared = PROPERTIES | {"storage_offset"}
    assert metadata(fakes, compared | {"version"}) == metadata(real, compared | {"version"})
    assert metadata(fake_results, compared) == metadata(real_results, compared)
    assert all(is_fake(t) for t in (*fakes, *fake_results))
    # Compare which results are arguments, or share memory with them.
    assert [place(t, fakes) for t in fake_results] == [place(t, real) for t in real_results]


def run(call: Call, make: Make, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors made for a call, and its results."""
    made: list[Tensor] = []

    def remember(numel: int) -> Tensor:
        made.append(make(numel))
        return made[-1]

    results = [result for result in tree_leaves(call(remember, world)) if isinstance(result, Tensor)]
    return made, [r.wait() if isinstance(r, funcol.AsyncCollectiveTensor) else r for r in results]


def place(result: Tensor, made: list[Tensor]) -> tuple[list[bool], list[bool]]:
    storage = result.untyped_storage()._cdata
    return [t is result for t in made], [t.untyped_storage()._cdata == storage for t in made]


@of_fake_backend
def test_result_of_a_functional_collective_outside_of_a_block_is_fake(world: int) -> None:
    result = funcol.all_reduce(fake(16), "sum", group()) + 1
    assert is_fake(result)
    assert result.shape == (16,)


@of_fake_backend
@pytest.mark.skipif(not IS_COMPLETE, reason="the backend of PyTorch before 2.13 checks nothing")
def test_checks_of_the_backend_are_those_of_real_tensors(world: int) -> None:
    for make in (torch.ones, fake):
        with pytest.raises(RuntimeError, match="must be the same size as output size times world size"):
            dist.reduce_scatter_tensor(make(3), make(4))


WRITERS: dict[str, Callable[[Tensor, int], object]] = {
    "all_gather": lambda k, n: dist.all_gather([k, *(torch.tensor(0.0) for _ in range(n - 1))], torch.tensor(1.0)),
    "all_reduce": lambda k, n: dist.all_reduce(k),
    "all_reduce_of_a_view": lambda k, n: dist.all_reduce(k.view(1)),
    "all_to_all": lambda k, n: dist.all_to_all(
        [k, *(torch.tensor(0.0) for _ in range(n - 1))], [torch.tensor(1.0) for _ in range(n)]
    ),
    "broadcast": lambda k, n: dist.broadcast(k, 1),
    "coalesced": lambda k, n: group().allreduce_coalesced([k]),
    "functional": lambda k, n: torch.ops._c10d_functional.all_reduce_(k, "sum", group().group_name),
    "gather": lambda k, n: dist.gather(torch.tensor(1.0), [k, *(torch.tensor(0.0) for _ in range(n - 1))]),
    "irecv": lambda k, n: dist.irecv(k, 1),
    "of_the_group": lambda k, n: group().allreduce([k]),
    "recv": lambda k, n: dist.recv(k, 1),
    "reduce": lambda k, n: dist.reduce(k, 0),
    "reduce_scatter": lambda k, n: dist.reduce_scatter(k, [torch.tensor(1.0) for _ in range(n)]),
    "scatter": lambda k, n: dist.scatter(k, [torch.tensor(1.0) for _ in range(n)]),
}
if hasattr(torch.ops._c10d_functional, "irecv"):  # since 2.12
    WRITERS["functional_irecv"] = lambda k, n: torch.ops._c10d_functional.irecv(k, 1, 0, group().group_name)


@of_fake_backend
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_value_of_a_constant_is_forgotten_when_a_collective_writes_it(
    world: int, write: Callable[[Tensor, int], object]
) -> None:
    with fake_mode():
        constant = torch.tensor(3.0)
        write(constant, world)
        with pytest.raises(DataDependentError, match="needs the values"):
            constant.item()


@of_fake_backend
@pytest.mark.parametrize(
    "read",
    [
        lambda k, n: dist.all_gather([torch.tensor(0.0) for _ in range(n)], k),
        lambda k, n: dist.send(k, 1),
        lambda k, n: funcol.all_reduce(k, "sum", group()),
        lambda k, n: funcol.wait_tensor(k),
    ],
    ids=["all_gather", "send", "functional_all_reduce", "wait_tensor"],
)
def test_value_of_a_constant_stays_when_a_collective_reads_it(
    world: int, read: Callable[[Tensor, int], object]
) -> None:
    with fake_mode():
        constant = torch.tensor(3.0)
        read(constant, world)
        assert constant.item() == 3.0


@of_fake_backend
def test_result_of_a_functional_collective_of_a_constant_is_unknown(world: int) -> None:
    with fake_mode(), pytest.raises(DataDependentError, match="needs the values"):
        funcol.all_reduce(torch.tensor(3.0), "sum", group()).item()


@pytest.mark.parametrize("make", [fake, deferred, torch.ones])
def test_waiting_returns_the_tensor_that_was_waited_for(world: int, make: Make) -> None:
    tensor = make(2)
    waited = funcol.wait_tensor(tensor)
    waited.add_(1)
    assert tensor._version == 1
    assert waited.untyped_storage()._cdata == tensor.untyped_storage()._cdata


@pytest.mark.parametrize("block", [fake_mode, lambda: None], ids=["fake_mode", "deferred_init"])
def test_barriers_in_a_block_happen(world: int, block: Callable[[], object]) -> None:
    done = []

    def synchronize() -> None:
        done.append(dist.barrier(async_op=True))

    if block is fake_mode:
        with fake_mode():
            synchronize()
    else:
        deferred_init(synchronize)
    assert type(done[0]).__name__ == ("FakeWork" if world > 1 else "Work")
    done[0].wait()
    if TORCH_RELEASE < (2, 12):
        dist.barrier()  # `ProcessGroup::barrier()` keeps its tensor in a static variable until the next barrier


def test_collectives_of_real_tensors_in_a_block_happen(world: int) -> None:
    real = torch.full((2,), 3.0)
    outputs = [torch.zeros(2) for _ in range(world)]
    with fake_mode():
        dist.all_gather(outputs, real)
    assert all(torch.equal(output, real) for output in outputs)
    outputs[0].zero_()
    deferred_init(dist.all_gather, outputs, real)
    assert torch.equal(outputs[0], real)


def test_data_parallel_module_stays_deferred_where_all_have_recorded_the_same(world: int) -> None:
    eager, module = build_both(mlp)
    parallel = nn.parallel.DistributedDataParallel(module)
    assert all(is_deferred(parameter) for parameter in module.parameters())
    materialize_module(parallel)
    assert_same_module(module, eager)
    assert parallel(torch.ones(2, 8)).shape == (2, 8)


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def parallelize(module: nn.Module, mesh: DeviceMesh, **kwargs: object) -> nn.Module:
    return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [0, None])
def test_tensor_parallel_module_stays_deferred_where_all_have_recorded_the_same(world: int, source: int | None) -> None:
    eager, module = build_both(mlp)
    mesh = mesh_of(world)
    # PyTorch's backend "fake" scatters nothing.
    eager = parallelize(eager, mesh, src_data_rank=None)
    module = parallelize(module, mesh, src_data_rank=source)
    assert all(is_deferred(parameter) for parameter in module.parameters())
    materialize_module(module)
    for parameter, expected in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), expected.to_local())


def test_tensor_parallelism_of_a_fake_module(world: int) -> None:
    mesh = mesh_of(world)
    module = fake_like(mlp())
    if world == 1:
        with pytest.raises(RuntimeError, match="by the backend `gloo`"):
            parallelize(module, mesh)
        return
    module = parallelize(module, mesh)
    assert module[0].weight.to_local().shape == (8 // world, 8)  # type: ignore[index]
    assert is_fake(module[0].weight.to_local())  # type: ignore[index]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_distributed_tensor_stays_deferred_where_all_have_recorded_the_same(world: int, placement: Placement) -> None:
    eager, made = build_both(lambda: torch.rand(8))
    local = distribute_tensor(made, mesh_of(world), [placement]).to_local()
    assert is_deferred(local)
    expected = eager if placement == Replicate() else eager[: 8 // world]
    assert torch.equal(materialize_tensor(local), expected)


@of_fake_backend
@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.full_tensor(),
        lambda t: t.redistribute(placements=[Replicate()]),
        lambda t: t.redistribute(placements=[Shard(1)]),
        lambda t: t.sum().full_tensor(),
    ],
    ids=["full_tensor", "replicate", "shard", "sum"],
)
def test_gathered_deferred_distributed_tensor_is_real(world: int, use: Callable[[Tensor], Tensor]) -> None:
    tensor = distribute_tensor(deferred_init(torch.ones, 8, 8), mesh_of(world), [Shard(0)], src_data_rank=None)
    assert not is_deferred(use(tensor))


def test_fakes_like_distributed_tensors_are_on_their_mesh(world: int) -> None:
    real = distribute_tensor(torch.ones(8, 8), mesh_of(world), [Shard(0)], src_data_rank=None)
    fake = fake_like(real)
    assert (type(fake), fake.shape, fake.placements) == (type(real), real.shape, real.placements)
    assert fake.device_mesh is real.device_mesh
    assert is_fake(fake.to_local())
    assert not is_fake(real.to_local())


def test_distributed_tensors_of_fakes_are_gathered_on_the_backend_fake(world: int) -> None:
    tensor = distribute_tensor(fake_like(torch.ones(8, 8)), mesh_of(world), [Shard(0)], src_data_rank=None)
    assert is_fake(tensor.full_tensor())
    assert tensor.full_tensor().shape == (8, 8)


def test_shards_of_a_deferred_module_are_computed_without_communication(world: int) -> None:
    torch.manual_seed(0)
    eager = mlp()
    torch.manual_seed(0)
    module = deferred_init(mlp)
    fully_shard(module, mesh=mesh_of(world))
    materialize_module(module)
    shard = module[0].weight.to_local()  # type: ignore[index]
    assert torch.equal(shard, eager[0].weight[: 8 // world])  # type: ignore[index]


def waited(result: object) -> object:
    return [t.wait() if isinstance(t, funcol.AsyncCollectiveTensor) else t for t in tree_leaves(result)]


@pytest.mark.parametrize("make", [fake, deferred, torch.ones])
@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_", "wait_tensor"])
def test_route_describes_collectives(world: int, op: str, make: Make) -> None:
    overload = getattr(torch.ops._c10d_functional, op).default
    arguments = (make(4), "sum", group().group_name) if op != "wait_tensor" else (make(4),)
    route = inspect.route(overload, *arguments)
    try:
        waited(overload(*arguments))
        refused = False
    except RuntimeError:
        refused = True
    assert refused == (op != "wait_tensor" and make is fake and world == 1)
    assert ("raises" in [step.turn for step in route]) == refused
    if make is deferred and op != "wait_tensor":
        assert route[-1].comment == "makes the deferred arguments real, and is called again"
    else:
        assert refused or route[-1].origin == "CompositeExplicitAutograd"


def test_custom_operator_with_a_group_is_called_with_real_tensors(world: int) -> None:
    library = torch.library.Library("torchext_test_collectives", "FRAGMENT")
    library.define("exchange(Tensor x, str group_name) -> Tensor")
    library.impl("exchange", lambda x, group_name: x.clone(), "CPU")
    library.impl("exchange", lambda x, group_name: torch.empty_like(x), "Meta")
    exchange = torch.ops.torchext_test_collectives.exchange
    assert torch.equal(exchange(deferred(2), "a separate registry"), torch.ones(2))
    assert is_fake(exchange(fake(2), "a separate registry"))
    assert torch.equal(exchange(torch.ones(2), group().group_name), torch.ones(2))
    library._destroy()


def exchange_objects(world: int) -> tuple[object, ...]:
    broadcast, gathered, scattered = [{"a": 1}], [None] * world, [None]
    dist.broadcast_object_list(broadcast)
    dist.all_gather_object(gathered, {"b": 2})
    if IS_COMPLETE or dist.get_backend() != "fake":  # raises EOFError earlier
        dist.scatter_object_list(scattered, [str(rank) for rank in range(world)])
    return broadcast, gathered, scattered


@pytest.mark.parametrize("block", [in_fake_mode, deferred_init])
def test_objects_are_exchanged_in_a_block(world: int, block: Callable[[Callable[[], object]], object]) -> None:
    assert block(lambda: exchange_objects(world)) == exchange_objects(world)


@pytest.mark.parametrize("block", [in_fake_mode, deferred_init])
def test_meshes_of_devices_made_in_a_block_are_real(world: int, block: Callable[[Callable[[], T]], T]) -> None:
    def make() -> DeviceMesh:
        mesh = init_device_mesh("cpu", (world // 2 or 1, min(world, 2)), mesh_dim_names=("a", "b"))
        mesh["a"]._flatten("c")
        return mesh

    mesh = block(make)
    assert not is_fake(mesh.mesh)
    assert mesh.mesh.tolist() == make().mesh.tolist()
    assert mesh["b"].mesh.tolist() == make()["b"].mesh.tolist()


@of_fake_backend
def test_default_mesh_of_fully_shard_is_on_the_fake_devices(world: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, where no devices are faked")
    with fake_mode(gpu=world):
        module = mlp().cuda()
        fully_shard(module)
        weight = module[0].weight  # type: ignore[index]
        assert weight.device_mesh.device_type == "cuda"
        assert weight.to_local().device.type == "cuda"


@of_fake_backend
def test_fully_sharded_module_of_fakes_trains(world: int) -> None:
    with fake_mode():
        module = mlp()
        fully_shard(module, mesh=mesh_of(world))
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        gradient = module[0].weight.grad.to_local()  # type: ignore[index]
    assert is_fake(gradient)
    assert gradient.shape == (8 // world, 8)
