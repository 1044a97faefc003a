"""Engines in processes of their own over a real Mooncake cluster, by TCP: one prefills, another one decodes."""

import pytest
from demo.engines import KNOWN, PAGE, PROMPT, answer_without_a_cache, engine
from stores.engines.mooncake_server import Cluster, main, run_scenario

OBJECT = 64 + PAGE * 2 * 2 * 2 * 16 * 4
"""Bytes of a page of the small model (2 layers, keys and values, 2 heads of 16 float32), and of the trailer."""


def one_engine_prefills_and_another_one_decodes(cluster: Cluster) -> None:
    """The pages are in the memory of a third process, so that they outlive both engines."""
    transfer = cluster.directory / "transfer.npz"
    answer = answer_without_a_cache(transfer)
    cluster.start_master(60_000)
    with cluster.client(size=OBJECT, segment=64 << 20):
        first = engine("prefill", cluster.url("pages"), transfer)
        assert first["answer"] == answer[:1]
        assert first["put_hits"] == PROMPT // PAGE
        second = engine("next", cluster.url("pages"), transfer)
    assert second["answer"] == answer[KNOWN:]
    assert second["stored"] == PROMPT


SCENARIOS = {"mooncake": one_engine_prefills_and_another_one_decodes}


@pytest.mark.xdist_group("two engines")
@pytest.mark.parametrize("name", SCENARIOS)
def test_engines_share_a_real_cluster(name, tmp_path):
    run_scenario(__file__, name, tmp_path, seconds=300)


if __name__ == "__main__":
    main(SCENARIOS)
