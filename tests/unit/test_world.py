"""What rank 0 says of the nodes and groups of a run."""

import pytest

from deepzero.comm.topology import Nodes, find_nodes, oddities
from deepzero.config.strict import ConfigError
from tests.configs.compose import run_config


@pytest.mark.parametrize("preset", ["all", "hpz", "qgz", "qwz"])
def test_zeropp_on_one_node_says_what_to_set(preset):
    config = run_config(f"zeropp={preset}", "zero.stage=3").engine
    (said,) = oddities(config, Nodes(2, 2), [2, 2])
    assert said.startswith("all 2 ranks are one node, between which ZeRO++ has nothing to save")
    assert said.endswith("with comm.ranks_per_node=1 zero.zero_hpz_partition_size=1")
    (said,) = oddities(config, Nodes(4, 4), [4] * 4)
    assert said.endswith("with comm.ranks_per_node=R zero.zero_hpz_partition_size=R for an R below 4 that divides it")
    assert oddities(config, Nodes(4, 2), [2] * 4) == []


def test_ranks_that_the_preset_does_not_divide():
    with pytest.raises(ConfigError, match=r"nodes have 1 or 3 ranks \(zeropp=all and zeropp=hpz begin with 2: set c"):
        find_nodes(2, 3)
