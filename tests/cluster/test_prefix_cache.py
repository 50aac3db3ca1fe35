"""Tests how much the prefix caches of a whole cluster save, without any change to the tokens."""

from __future__ import annotations

from tests.cluster.nodes import MODEL, ServedCluster, http, random_prompt

BLOCK = 16


def received(cluster: ServedCluster) -> float:
    return sum(node.metric("kv_transfer_bytes_total", direction="received") for node in cluster.decode)


def hits(cluster: ServedCluster) -> float:
    return sum(node.metric("prefix_cache_hits_total") for node in cluster.nodes)


def test_a_prompt_that_every_decode_node_has_moves_nothing(pd_cluster: ServedCluster) -> None:
    ids = random_prompt(600, seed=1)
    # Requests go round-robin: both decode nodes have fetched the prompt, the second one perhaps from a prefill node
    # that already had it.
    answers = [pd_cluster.complete(ids, 6, ignore_eos=True) for _ in range(2)]
    pd_cluster.until_idle()
    moved, found = received(pd_cluster), hits(pd_cluster)
    answers += [pd_cluster.complete(ids, 6, ignore_eos=True) for _ in range(2)]
    assert answers == [answers[0]] * 4
    pd_cluster.until_idle()
    assert received(pd_cluster) == moved
    assert hits(pd_cluster) - found == 2 * ((600 - 1) // BLOCK * BLOCK)


def test_a_longer_prompt_moves_only_what_is_new(pd_cluster: ServedCluster) -> None:
    ids = random_prompt(640, seed=2)
    for _ in range(2):
        pd_cluster.complete(ids, 2, ignore_eos=True)
    pd_cluster.until_idle()
    before = received(pd_cluster)
    long = ids + random_prompt(100, seed=3)
    first = pd_cluster.complete(long, 4, ignore_eos=True)
    pd_cluster.until_idle()
    moved = received(pd_cluster) - before
    pd_cluster.complete(ids[:100], 4, ignore_eos=True, cache_salt="another")
    pd_cluster.until_idle()
    whole = received(pd_cluster) - before - moved
    # The 100 tokens behind 40 cached blocks fill 7 blocks, as 100 uncached tokens do.
    assert moved == whole > 0
    assert pd_cluster.complete(long, 4, ignore_eos=True, cache_salt="fresh") == first


def test_three_choices_are_what_three_requests_would_be_answered(
    pd_cluster: ServedCluster, mixed_cluster: ServedCluster
) -> None:
    options = {"temperature": 0.9, "ignore_eos": True}
    for cluster in (pd_cluster, mixed_cluster):
        ids = random_prompt(90, seed=4)
        body = {"model": MODEL, "prompt": ids, "max_tokens": 12, "n": 3, "seed": 70, "return_token_ids": True}
        reply = http(cluster.url + "/v1/completions", body | options)
        assert reply.status == 200, reply.body
        choices = [choice["token_ids"] for choice in reply.json()["choices"]]
        assert reply.json()["usage"]["prompt_tokens"] == 90
        singles = [cluster.complete(ids, 12, **options | {"seed": 70 + i, "cache_salt": f"{i}"}) for i in range(3)]
        assert choices == singles
        assert len({tuple(choice) for choice in choices}) == 3
        cluster.until_idle()
