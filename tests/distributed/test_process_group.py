"""How ranks meet, who can hear them, and what they believe."""

import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepzero.comm import flight_recorder, process_group, rendezvous, topology
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator, DryRunCommunicator, DryRunRank
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import ChaosConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.zero.partition_parameters import Init
from tests import doors
from tests.distributed.pool import on_ranks
from tests.e2e.test_launch import free_port

CPU = torch.device("cpu")


def test_what_a_stranger_could_do_to_a_store(tmp_path):
    """This is why ranks meet at none that is reached through a port; and the other tests' stranger is a real one."""
    store = rendezvous.host_store(0, timedelta(seconds=5))
    assert doors.beyond(doors.listening([os.getpid()])) == []
    assert doors.poke(store.port, tmp_path / "evidence")
    pickle.loads(store.get("deepzero/secret"))
    assert (tmp_path / "evidence").exists()


def send_as_a_stranger(payload, call):
    """What rank 0 sends in ``call``, without a seal."""
    if call == "broadcast_object":
        dist.broadcast(torch.tensor([payload.numel()]), src=0)
        dist.broadcast(payload, src=0)
        return
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([payload.numel()]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    if call == "gather_object":
        dist.gather(padded, None, dst=1)
    else:
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)


def told_by_a_stranger(rank, world_size, folder):
    """Rank 0 sends what no rank would: a pickle without a seal, in the place of each kind of small talk."""
    talk = [
        lambda: process_group.broadcast_object("x"),
        lambda: process_group.all_gather_object("x"),
        lambda: process_group.gather_object("x", dst=1),
    ]
    said = []
    for listen in talk:
        payload = torch.frombuffer(bytearray(pickle.dumps(doors.Payload(Path(folder)))), dtype=torch.uint8)
        if rank == 1:
            try:
                listen()
            except RuntimeError as error:
                said.append(str(error))
        else:
            # The stranger's calls are counted as a rank's: the pool's ranks go on to other tests.
            with flight_recorder.observer().blocking(listen.__code__.co_names[-1]):
                send_as_a_stranger(payload, listen.__code__.co_names[-1])
    return said


def test_what_no_rank_has_sent_is_not_unpickled(ranks, tmp_path):
    evidence = tmp_path / "evidence"
    said = ranks.run(told_by_a_stranger, str(evidence))[1]
    assert len(said) == 3
    assert all("bytes was not sent by a rank of this run" in text for text in said)
    assert not evidence.exists()


@on_ranks()
def test_a_part_of_the_world_has_its_timeout(rank, world_size):
    part = topology.make_group([(0,), (1,)], rank, with_handle=True).handle
    flight_recorder.observer().subgroups.clear()
    for group in (dist.group.WORLD, part):
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=120)


def twice(rank, world_size, port):
    """Join by the variables that a foreign launcher sets, or ours, leave, and join again."""
    if port is not None:
        for name in (rendezvous.LAUNCH_FOLDER_VARIABLE, *rendezvous.loopback_variables()):
            os.environ.pop(name)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "none"
    heard, found = [], set()
    for _ in range(2):
        process_group.init_distributed(backend="gloo")
        heard.append(process_group.all_gather_object(rank))
        found |= doors.listening([os.getpid()])
        assert os.environ["GLOO_SOCKET_IFNAME"] == "none"
        process_group.shutdown()
    return heard, found


def test_ranks_of_a_foreign_launcher_on_one_machine(ranks):
    port = free_port()
    (heard, first), (_, second) = ranks.run(twice, port, process_group=False)
    assert heard == [[0, 1]] * 2
    assert ("127.0.0.1", port) in first
    assert doors.beyond(first | second) == []


def test_ranks_of_our_launcher_join_again(ranks):
    assert [heard for heard, _ in ranks.run(twice, None, process_group=False)] == [[[0, 1]] * 2] * 2


@on_ranks(1, process_group=False)
def test_a_world_of_one(rank, world_size):
    """Without any launcher."""
    for name in ("RANK", "WORLD_SIZE", rendezvous.LAUNCH_FOLDER_VARIABLE, *rendezvous.loopback_variables()):
        os.environ.pop(name)
    Init(config={"train_batch_size": "auto", "zero_optimization": {"stage": 3}, "comm": {"timeout_seconds": 7}})
    found, patience = doors.listening([os.getpid()]), dist.group.WORLD._get_backend(CPU).options._timeout
    process_group.shutdown()
    assert len(found) == 1, "gloo's"
    assert doors.beyond(found) == []
    assert patience == timedelta(seconds=7), "the engine's, which it may have later"
    other = rendezvous.host_store(0, timedelta(seconds=5))  # a job beside this one, at the port that both are told
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(other.port))
    process_group.init_distributed("gloo")
    process_group.shutdown()


@on_ranks()
def test_one_rank_hears_all(rank, world_size):
    heard = process_group.gather_object({"rank": rank, "x": "y" * rank}), process_group.gather_object(rank, dst=1)
    assert heard == (([{"rank": 0, "x": ""}, {"rank": 1, "x": "y"}], None), (None, [0, 1]))[rank]


def test_one_process_hears_itself_and_a_pretended_rank_what_the_others_would_say():
    assert process_group.gather_object(7) == [7]
    with pytest.raises(ValueError, match="rank 3 of 3 ranks: they are numbered 0 to 2"):
        DryRunRank(3, 3, "cpu", 3)
    comm = DryRunCommunicator(DryRunRank(1, 3, "cpu", 3), Ledger(), Chaos(ChaosConfig(), 0))
    assert comm.all_gather_object(7) == [7, 7, 7]
    comm.raise_on_all_ranks(None)
    with pytest.raises(ConfigError, match=r"^so it is$"):
        comm.raise_on_all_ranks("so it is", ConfigError)


def test_a_store_that_is_gone():
    """As torchrun's is with its agent."""
    server = rendezvous.host_store(0, timedelta(seconds=5))
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    board = process_group.StoreMailbox("board", client, 0, 2)
    board.set("key", "there")
    del server
    with pytest.raises(dist.DistNetworkError, match="is gone with the process that had it"):
        for _ in range(100):  # the system takes some before it knows
            board.set("key", "gone")
            time.sleep(0.01)


@on_ranks()
def test_a_broadcast_of_any_strides(rank, world_size):
    """``channels_last``, and one element whose stride is 0; both in place."""
    image = torch.arange(16.0).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last)
    tensors = [image * (rank + 1), torch.full((), 1.0 + rank).expand(1), torch.full((), rank + 1j)]
    for tensor in tensors:
        process_group.broadcast_tensor(tensor, 1)
    assert torch.equal(tensors[0], image * 2) and tensors[0].stride() == image.stride()
    assert [tensor.tolist() for tensor in tensors[1:]] == [[2.0], 1 + 1j]


@on_ranks()
def test_a_broadcast_is_one_collective(rank, world_size):
    """The collectives of a communicator's broadcast, and what is waited for meanwhile."""
    comm, trail = Communicator(CPU, Ledger(), Chaos(ChaosConfig(), rank)), flight_recorder.observer().flight_recorder
    before, waiting = trail.sequence, []
    with mock.patch.object(dist, "broadcast", lambda *_, **__: waiting.append(trail.waiting.kind)):
        comm.broadcast("setup.broadcast", torch.zeros(3))
    assert [launch.kind for launch in trail.recent if launch.sequence > before] == waiting == ["setup.broadcast"]
